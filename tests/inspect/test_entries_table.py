"""The table of graphs. Truth: the Manager's own records, one by one."""

from __future__ import annotations

import pandas as pd
import pytest
import torch
from contracts.toy import WIDTH

from vgraph_lab.graphs import Descriptor
from vgraph_lab.inspect.entries import ENTRY_COLUMNS, entries_table

SMALL, MIDDLE, LARGE = Descriptor(1, 4), Descriptor(1, 6), Descriptor(2, 8)
LAZY = {"toy.main": {"enable_lazy_capture": True, "max_extra_graphs": 1}}


def test_one_row_per_graph_in_capture_order(make_manager):
    manager, target = make_manager(SMALL, LARGE)
    report = manager.capture()
    target(torch.ones(1, 4, WIDTH))
    table = entries_table(manager)
    assert list(table.columns) == list(ENTRY_COLUMNS)
    assert table["descriptor"].tolist() == [str(o.descriptor) for o in report.outcomes] == [str(LARGE), str(SMALL)]
    assert table["order"].tolist() == [0, 1]
    assert table["hits"].tolist() == [0, 1]
    assert table["last_use_utc"].isna().tolist() == [True, False]
    for row, entry in zip(table.itertuples(), manager.entries(), strict=True):
        cost = entry.cost
        assert (row.static_buffer_mib, row.output_mib) == (cost.static_buffer_bytes / 2**20, cost.output_bytes / 2**20)
        assert row.charge_mib == pytest.approx(row.static_buffer_mib + row.pool_delta_mib)
        assert row.pool_after_mib - row.pool_before_mib == pytest.approx(row.pool_delta_mib)
        assert (row.warmup_s, row.capture_s, row.gc_s) == (cost.warmup_s, cost.capture_s, cost.gc_s)
        assert row.nodes == len(entry.graph.nodes()) > 0
        assert row.kernel_nodes + row.memcpy_nodes + row.memset_nodes <= row.nodes


def test_charges_add_up_to_what_the_manager_counts(make_manager):
    manager, _ = make_manager(SMALL, MIDDLE, LARGE)
    manager.capture()
    table = entries_table(manager)
    assert table["charge_mib"].sum() * 2**20 == pytest.approx(manager.charged_bytes)
    assert table["pool_before_mib"].iloc[1:].tolist() == table["pool_after_mib"].iloc[:-1].tolist()


def test_failures_keep_their_place_and_have_no_figures(make_manager):
    manager, target = make_manager(SMALL, MIDDLE, LARGE)
    target.routine.fail, target.routine.fail_for = {"allocate": RuntimeError("no room")}, {MIDDLE}
    report = manager.capture()
    table = entries_table(manager)
    assert table["descriptor"].tolist() == [str(o.descriptor) for o in report.outcomes]
    assert table["status"].tolist() == ["captured", "failed", "captured"]
    failed = table.iloc[1]
    assert failed["reason"] == "failed_descriptor"
    assert "no room" in failed["detail"]
    assert failed[["order", "charge_mib", "pool_delta_mib", "device_delta_mib", "capture_s", "nodes", "last_use_utc"]].isna().all()


def test_lazy_captures_come_last(make_manager):
    manager, target = make_manager(SMALL, targets=LAZY)
    manager.capture()
    target(torch.ones(2, 9, WIDTH))  # captured lazily
    target(torch.ones(2, 12, WIDTH))  # over the cap
    table = entries_table(manager)
    assert table["descriptor"].tolist() == [str(SMALL), "B2×T9", "B2×T12"]
    assert table["is_lazy"].tolist() == [False, True, True]
    assert table["reason"].tolist() == ["", "", "capacity"]


def test_columns_and_dtypes_do_not_depend_on_the_content(make_manager):
    manager, _ = make_manager(SMALL)
    empty = entries_table(manager)
    manager.capture()
    full = entries_table(manager)
    manager.clear()
    cleared = entries_table(manager)
    assert len(empty) == len(cleared) == 0
    pd.testing.assert_series_equal(empty.dtypes, full.dtypes)
    pd.testing.assert_series_equal(cleared.dtypes, full.dtypes)


def test_switched_off_targets_are_listed_as_skipped(make_manager):
    manager, _ = make_manager(SMALL, enforce_eager=True)
    manager.capture()
    table = entries_table(manager)
    assert table[["status", "reason"]].to_numpy().tolist() == [["skipped", "disabled"]]
