"""The ledger adds up. Truth: sizes of the model's own tensors, the Manager's counts, and the sum itself."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from inspect_streaming import tiny_runner

from vgraph_lab.errors import InputError
from vgraph_lab.graphs import Descriptor
from vgraph_lab.inspect import CaptureFigures, MemoryReading, Recording, estimate_table, ledger_table, read_memory, record
from vgraph_lab.inspect.ledger import ESTIMATE_COLUMNS, LEDGER_COLUMNS, LEDGER_PARTS
from vgraph_lab.inspect.records import EstimatedGraph

MIB = 2**20
FIGURES = CaptureFigures("headline", 1.0, 1, 1, 0, 0, False, 0, 0, {})
RECORDING = Recording("2026-01-01T00:00:00+00:00", "cpu", {}, "", None, {}, "ready", (), (), (), MemoryReading(9, 1, 2, 3, 1, 1, 1))


def parts(table, column="now_mib"):
    return dict(zip(table["part"], table[column], strict=True))


def test_before_and_after_a_capture(tiny_folder):
    runner = tiny_runner(tiny_folder)
    before = read_memory(runner)
    runner.capture_model()
    table = ledger_table(runner, before=before)
    assert list(table.columns) == list(LEDGER_COLUMNS)
    assert table["part"].tolist() == [*LEDGER_PARTS, "total"]
    earlier, now = parts(table, "before_mib"), parts(table)
    for moment in (earlier, now):
        assert sum(moment[part] for part in LEDGER_PARTS) == moment["total"]
    decoder = runner.model.decoder
    weights = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in (*decoder.parameters(), *decoder.buffers())}
    assert now["weights"] * MIB == earlier["weights"] * MIB == sum(weights.values())
    assert now["state"] * MIB == runner.model.state_bytes > 0
    assert earlier["static buffers"] == earlier["pool"] == 0
    assert (now["static buffers"] + now["pool"]) * MIB == runner.manager.charged_bytes > 0
    assert parts(table, "change_mib")["pool"] == now["pool"]
    assert "machine" in table.set_index("part").at["total", "meaning"]
    runner.shutdown()


def test_what_the_manager_read_is_before(make_manager):
    manager, _ = make_manager(Descriptor(1, 4))
    manager.capture()
    table, device = ledger_table(manager), manager.memory_before
    assert parts(table, "before_mib")["free"] * MIB == device.free_bytes
    for column in ("before_mib", "now_mib"):
        found = parts(table, column)
        assert sum(found[part] for part in LEDGER_PARTS) == found["total"] == device.total_bytes / MIB
    assert parts(table, "before_mib")["pool"] == parts(table, "before_mib")["static buffers"] == 0
    assert parts(table, "change_mib")["pool"] * MIB == manager.pool.reserved_bytes > 0
    manager.clear()
    after = ledger_table(manager)
    assert parts(after)["pool"] == 0
    assert parts(after, "before_mib")["free"] * MIB == device.free_bytes


def test_another_reading_replaces_the_manager_s(make_manager):
    manager, _ = make_manager(Descriptor(1, 4))
    manager.capture()
    own = replace(read_memory(manager), free_bytes=3 * MIB)
    assert parts(ledger_table(manager, before=own), "before_mib")["free"] == 3


def test_without_a_capture_only_now_is_there(make_manager):
    manager, target = make_manager(Descriptor(1, 4))
    table = ledger_table(manager)
    assert table["before_mib"].isna().all()
    assert table["change_mib"].isna().all()
    assert parts(table)["weights"] * MIB == sum(p.nbytes for p in target.routine.model.parameters())
    assert parts(table)["state"] == 0


def test_a_reading_of_another_device_is_refused(make_manager):
    manager, _ = make_manager(Descriptor(1, 4))
    with pytest.raises(InputError, match="take both readings of one runner"):
        ledger_table(manager, before=replace(read_memory(manager), total_bytes=1))


sizes = st.integers(0, 2**40)


@given(st.builds(MemoryReading, sizes, sizes, sizes, sizes, sizes, sizes, sizes))
def test_any_reading_adds_up_exactly(reading):
    recording = replace(RECORDING, memory=reading, memory_before=replace(reading, pool_bytes=0))
    table = ledger_table(recording)
    for column in ("now_mib", "before_mib"):
        found = parts(table, column)
        assert sum(found[part] for part in LEDGER_PARTS) == found["total"] == reading.total_bytes / MIB


def test_on_a_gpu_the_meanings_are_a_device_s():
    meanings = ledger_table(replace(RECORDING, device="cuda:0")).set_index("part")["meaning"]
    assert meanings["free"] == "as the driver says"
    assert "machine" in ledger_table(RECORDING).set_index("part").at["free", "meaning"]


def test_estimates_stand_beside_the_capture(make_manager):
    manager, target = make_manager(Descriptor(1, 4), Descriptor(2, 8))
    manager.profile_memory()
    target.routine.fail, target.routine.fail_for = {"allocate": RuntimeError("no room")}, {Descriptor(1, 4)}
    report = manager.capture()
    table = estimate_table(manager)
    for same in (CaptureFigures.of(report), record(manager)):
        pd.testing.assert_frame_equal(estimate_table(same), table)
    assert list(table.columns) == list(ESTIMATE_COLUMNS)
    assert table["descriptor"].tolist() == ["B2×T8", "B1×T4", "total"]
    cost = manager.entries()[0].cost
    assert table["measured_mib"].iloc[0] * MIB == cost.charge_bytes
    assert table["error_mib"].iloc[0] == 0
    assert table["measured_mib"].isna().tolist() == [False, True, False]
    assert table["estimated_mib"].iloc[2] * MIB == report.profile.bytes
    assert table["measured_mib"].iloc[2] * MIB == report.bytes


def test_errors_are_estimated_minus_measured():
    figures = replace(
        FIGURES,
        estimates=(EstimatedGraph("t", Descriptor(1, 4), 3 * MIB, 2 * MIB), EstimatedGraph("t", Descriptor(1, 2), MIB, 0)),
    )
    table = estimate_table(replace(RECORDING, capture=figures))
    assert table["error_mib"].tolist() == [1, 1, 2]
    assert table["error_share"].iloc[[0, 2]].tolist() == [0.5, 1.0]
    assert table["error_share"].isna().tolist() == [False, True, False]


def test_without_a_profile_there_is_no_estimate(make_manager):
    manager, _ = make_manager(Descriptor(1, 4))
    for source in (RECORDING, manager):
        with pytest.raises(InputError, match="no capture yet"):
            estimate_table(source)
    manager.capture()
    with pytest.raises(InputError, match="profile_memory"):
        estimate_table(manager)
    with pytest.raises(InputError, match="a table needs"):
        estimate_table([])
    with pytest.raises(InputError, match="profile_memory"):
        estimate_table(FIGURES)


def test_a_manager_s_reading_equals_its_recording_s(make_manager):
    manager, _ = make_manager(Descriptor(1, 4))
    manager.capture()
    reading = record(manager).memory
    assert (reading.pool_bytes, reading.pool_live_bytes) == (manager.pool.reserved_bytes, manager.pool.live_bytes)
    assert reading.total_bytes == manager.backend.memory().total_bytes
