"""Graph against eager, and the summary. Truth: a Routine that is made to err on purpose."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from contracts.toy import WIDTH
from torch import Tensor

from vgraph_lab.errors import InputError, LifecycleError
from vgraph_lab.graphs import Descriptor
from vgraph_lab.inspect.audio import Tolerance
from vgraph_lab.inspect.parity import PARITY_COLUMNS, compare_with_eager, median_speedup, parity_table
from vgraph_lab.inspect.summary import SUMMARY_MIME, CaptureSummary, summarise

SMALL, LARGE = Descriptor(1, 4), Descriptor(2, 8)


def inputs() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"exact": (1, 4), "padded": (2, 5), "missed": (3, 4)}
    return {name: torch.rand(*shape, WIDTH, generator=generator) for name, shape in shapes.items()}


def spoil(target: Any, frames: int, by: float) -> None:
    """Make the graphs, not eager, answer wrongly for calls with this many frames."""
    honest = target.routine.output_after_replay

    def output_after_replay(descriptor: Descriptor, buffers: Any, output: Any, x: Tensor, state: str = "") -> Any:
        cut = honest(descriptor, buffers, output, x, state)
        return cut + by if x.shape[1] == frames else cut

    target.routine.output_after_replay = output_after_replay


def test_each_call_is_compared_and_counted_once(make_manager):
    manager, target = make_manager(SMALL, LARGE)
    manager.capture()
    found = compare_with_eager(manager, target, inputs())
    assert [c.outcome for c in found] == ["exact hit", "padded hit", "fallback"]
    assert [c.route for c in found] == [
        "exact hit: B1×T4",
        "padded hit: B2×T5 in B2×T8",
        "fallback: B3×T4 ran eager (shape_not_covered)",
    ]
    assert manager.stats().calls() == 3
    assert all(c.verdict.passed for c in found)
    for comparison, x in zip(found, inputs().values(), strict=True):
        torch.testing.assert_close(torch.from_numpy(comparison.eager), target.routine.eager_call(x))


@pytest.mark.parametrize("by", [1e-3, float("nan")])
def test_a_wrong_graph_fails(make_manager, by):
    manager, target = make_manager(SMALL, LARGE)
    report = manager.capture()
    spoil(target, frames=5, by=by)
    found = compare_with_eager(manager, target, inputs())
    assert [c.verdict.passed for c in found] == [True, False, True]
    manager.clear()
    summary = summarise(report, manager, found)
    assert not summary.passed
    assert summary.verdict().startswith("FAIL: 2/2 graphs captured; 2/3 utterances equal eager;")
    assert summary.largest_difference_in == "padded"
    json.dumps(summary.to_json(), allow_nan=False)


def test_exact_hits_are_held_to_equal_bits(make_manager):
    manager, target = make_manager(SMALL, LARGE)
    manager.capture()
    for frames in (4, 5):
        spoil(target, frames=frames, by=1e-7)
    found = compare_with_eager(manager, target, inputs(), tolerance=Tolerance(1e-3, "a test"))
    assert [c.verdict.passed for c in found] == [False, True, True]


def test_table_has_one_row_per_comparison(make_manager):
    manager, target = make_manager(SMALL, LARGE)
    manager.capture()
    found = compare_with_eager(manager, target, inputs())
    table = parity_table(found)
    assert list(table.columns) == list(PARITY_COLUMNS)
    assert table["name"].tolist() == ["exact", "padded", "missed"]
    assert table["allowed_dbfs"].tolist() == [-float("inf"), pytest.approx(-120), -float("inf")]
    assert table["is_equal"].all()
    assert set(table["agreement"]) <= {"bit for bit", "within tolerance"}
    assert (table.loc[table["outcome"] != "padded hit", "agreement"] == "bit for bit").all()


def test_comparing_needs_a_capture(make_manager):
    manager, target = make_manager(SMALL)
    with pytest.raises(LifecycleError, match="Call capture"):
        compare_with_eager(manager, target, inputs())
    manager.capture()
    _, stranger = make_manager(SMALL)
    with pytest.raises(LifecycleError, match="not served by this Manager"):
        compare_with_eager(manager, stranger, inputs())


def test_structured_outputs_cannot_be_compared(make_manager):
    manager, target = make_manager(SMALL)
    target.routine.output = lambda y: (y, y)
    manager.capture()
    with pytest.raises(InputError, match="returned tuple"):
        compare_with_eager(manager, target, inputs())


def test_foreign_calls_are_noticed(make_manager):
    manager, target = make_manager(SMALL)
    manager.capture()
    honest, x = target.routine.validate_runtime_inputs, inputs()["exact"]

    def meddle(*args: Any) -> None:
        target.routine.validate_runtime_inputs = honest
        target(x)

    target.routine.validate_runtime_inputs = meddle
    with pytest.raises(LifecycleError, match="2 calls"):
        compare_with_eager(manager, target, {"exact": x})


def test_summary_says_what_happened(make_manager):
    manager, target = make_manager(SMALL, LARGE)
    report = manager.capture()
    found = compare_with_eager(manager, target, inputs())
    assert "not released yet" in summarise(report, manager, found).verdict()
    manager.clear()
    summary = summarise(report, manager, found)
    assert summary.passed
    assert summary.verdict() == (
        "PASS: 2/2 graphs captured; 3/3 utterances equal eager "
        "(1 exact hit and 1 fallback bit for bit, 1 padded hit within tolerance); pool released"
    )
    assert (summary.calls, summary.hits, summary.fallbacks) == (3, 2, {"shape_not_covered": 1})
    assert summary.wasted_share == pytest.approx(6 / (6 + 10 + 4))
    assert summary.pool_bytes == report.pool_reserved_bytes > summary.pool_bytes_after_clear == 0
    assert len(str(summary).splitlines()) == 9


def test_summary_survives_json_and_refuses_other_data(make_manager):
    manager, target = make_manager(SMALL)
    summary = summarise(manager.capture(), manager, compare_with_eager(manager, target, inputs()))
    data = json.loads(json.dumps(summary._repr_mimebundle_()[SUMMARY_MIME]))
    assert CaptureSummary.from_json(data) == summary
    with pytest.raises(InputError, match=r"missing \['calls_lost'\]|unknown \['calls_lost'\]"):
        CaptureSummary.from_json({**data, "calls_lost": 1})


def test_nothing_captured_and_nothing_compared_never_passes(make_manager):
    manager, _ = make_manager(SMALL, enforce_eager=True)
    report = manager.capture()
    manager.clear()
    summary = summarise(report, manager, [])
    assert not summary.passed
    assert median_speedup([]) is None
    assert (summary.median_speedup, summary.wasted_share) == (None, None)
