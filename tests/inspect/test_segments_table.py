"""The pool taken apart. Truth: the pool's own sums, and the addresses of the captured outputs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from inspect_streaming import tiny_runner

from vgraph_lab.errors import InputError
from vgraph_lab.graphs import Descriptor
from vgraph_lab.graphs.structure import tensors
from vgraph_lab.inspect import Recording, record, segments_table
from vgraph_lab.inspect.pool_layout import pool_layout
from vgraph_lab.inspect.segments import SEGMENT_COLUMNS

MIB = 2**20


def test_blocks_tile_segments_and_add_up_to_the_pool(tiny_folder):
    runner = tiny_runner(tiny_folder)
    runner.capture_model()
    table, pool = segments_table(runner), runner.manager.pool
    assert list(table.columns) == list(SEGMENT_COLUMNS)
    assert table["block_mib"].sum() * MIB == pool.reserved_bytes > 0
    assert table.loc[table["is_live"], "block_mib"].sum() * MIB == pool.live_bytes > 0
    for _, blocks in table.groupby("segment"):
        assert (blocks["offset_mib"] == (blocks["block_mib"].cumsum() - blocks["block_mib"])).all()
        assert blocks["block_mib"].sum() == blocks["segment_mib"].iloc[0]
        assert blocks["made_by"].nunique() == blocks["segment_mib"].nunique() == 1
    runner.shutdown()
    assert segments_table(runner).empty


def test_every_graph_s_output_is_found_where_it_is_and_every_segment_where_it_came_from(tiny_folder):
    runner = tiny_runner(tiny_folder)
    runner.capture_model()
    table, entries = segments_table(runner), runner.manager.entries()
    names = {f"{entry.target_id} {entry.descriptor}": entry for entry in entries}
    assert set(table["held_by"]) == {"", *names}
    assert not table.loc[~table["is_live"], "held_by"].any()
    for name, entry in names.items():
        outputs, inputs = ({t.untyped_storage().data_ptr() for t in tensors(each)} for each in (entry.output, dict(entry.buffers)))
        assert (table["held_by"] == name).sum() == len(outputs - inputs)  # an input that is returned stays where it is
    grown = table.drop_duplicates("segment").groupby("made_by")["segment_mib"].sum()
    assert {name: grown.get(name, 0.0) * MIB for name in names} == {n: e.cost.pool_delta_bytes for n, e in names.items()}
    makers = table.drop_duplicates("segment")["made_by"]
    assert makers.map(lambda name: names[name].cost.order).is_monotonic_increasing
    runner.shutdown()


def test_an_output_that_somebody_kept_is_nobody_s(make_manager):
    manager, _ = make_manager(Descriptor(1, 4), Descriptor(1, 2))
    manager.capture()
    kept = manager.entries()[0].output
    manager.clear()
    table = segments_table(manager)
    assert table.loc[table["is_live"], ["made_by", "held_by"]].to_numpy().tolist() == [["", ""]] * sum(1 for _ in tensors(kept))
    del kept
    assert segments_table(manager).empty


def test_a_recording_gives_the_same_table(make_manager, tmp_path):
    manager, _ = make_manager(Descriptor(1, 4), Descriptor(1, 2))
    manager.capture()
    table = segments_table(manager)
    loaded = Recording.load(record(manager).save(tmp_path / "x.vgl"))
    assert loaded.segments == pool_layout(manager) != ()
    assert segments_table(loaded).equals(table)


def test_a_recording_of_before_segments_were_kept_says_so(make_manager):
    manager, _ = make_manager(Descriptor(1, 4))
    manager.capture()
    old = replace(record(manager), segments=None)
    with pytest.raises(InputError, match="before segments of the pool were kept"):
        segments_table(old)


def test_segments_come_in_the_order_of_their_captures_whatever_the_pool_s_order(make_manager, monkeypatch):
    manager, _ = make_manager(Descriptor(64, 4000), Descriptor(1, 2))
    manager.capture()
    segments = manager.pool.segments()
    assert len({entry.cost.segment_addresses for entry in manager.entries()}) > 1
    table = segments_table(manager)
    monkeypatch.setattr(manager.pool, "segments", lambda: segments[::-1])
    assert segments_table(manager)["made_by"].tolist() != []
    first = manager.entries()[0]
    assert segments_table(manager)["made_by"].iloc[0] == table["made_by"].iloc[0] == f"{first.target_id} {first.descriptor}"


def test_before_a_capture_there_is_nothing(make_manager):
    manager, _ = make_manager(Descriptor(1, 4))
    assert segments_table(manager).empty
    with pytest.raises(InputError, match="needs a GPUGenerationModelRunner"):
        segments_table("pool")
