"""Times from a trace: what was run is found under its kind, and nothing is left behind on the modules."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from vgraph_lab.inspect.kernel_times import KERNEL_TIME_COLUMNS, REST, added_times, kernel_times, part_times, times_by_kind
from vgraph_lab.inspect.work_kinds import WORK_KINDS

CPU = torch.device("cpu")


def test_kernels_of_one_call() -> None:
    x = torch.randn(64, 64)
    calls = []

    def run() -> None:
        calls.append(1)
        torch.mm(x, x).sin()

    table = kernel_times(run, CPU, repeats=4)
    assert list(table.columns) == list(KERNEL_TIME_COLUMNS)
    assert len(calls) == 5, "one before the trace"
    per_call = table.set_index("name")["calls"]
    assert per_call["aten::mm"] == per_call["aten::sin"] == 1
    assert table["time_share"].sum() == pytest.approx(1)
    assert table["total_ms"].is_monotonic_decreasing
    by_kind = times_by_kind(table)
    assert {"matrix product", "elementwise"} <= set(by_kind) <= set(WORK_KINDS)
    assert sum(by_kind.values()) == pytest.approx(table["total_ms"].sum())


def test_a_trace_of_nothing_is_empty() -> None:
    table = kernel_times(lambda: None, CPU, repeats=1)
    assert list(table.columns) == list(KERNEL_TIME_COLUMNS)
    assert times_by_kind(table) == {}


@pytest.mark.parametrize(
    ("spans", "added"),
    [
        ([], []),
        ([(3, 5)], [2]),
        ([(0, 2), (2, 5), (7, 8)], [2, 3, 1]),
        ([(0, 4), (1, 6), (5, 9)], [4, 2, 3]),
        ([(0, 9), (2, 4), (8, 12)], [9, 0, 3]),
        ([(5, 9), (0, 4), (1, 6)], [3, 4, 2]),
        ([(1, 3), (1, 3)], [2, 0]),
        ([(1, 5), (1, 3)], [2, 2]),
    ],
    ids=["none", "one", "one after the other", "overlapping", "one inside another", "out of order", "equal", "equal starts"],
)
def test_what_each_span_adds(spans: list[tuple[float, float]], added: list[float]) -> None:
    assert added_times(spans) == added


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)).map(lambda pair: (pair[0], sum(pair))), max_size=12))
def test_together_spans_add_the_time_in_which_anything_ran(spans: list[tuple[int, int]]) -> None:
    added = added_times(spans)
    assert sum(added) == len({moment for start, end in spans for moment in range(start, end)})
    assert all(0 <= more <= end - start for more, (start, end) in zip(added, spans, strict=True))


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(256, 256), nn.Linear(256, 256)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.second(self.first(x))).sin()


@torch.no_grad()
def test_parts_of_a_model() -> None:
    model, x = Two(), torch.randn(256, 256)
    found = part_times(lambda: model(x), CPU, {"one": [model.first], "other": [model.second]}, repeats=3)
    assert list(found) == ["one", "other", REST]
    assert all(ms > 0 for ms in found.values()), "sin is the rest"
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@torch.no_grad()
def test_hooks_go_even_if_the_call_fails() -> None:
    model = Two()
    with pytest.raises(RuntimeError, match="shapes"):
        part_times(lambda: model(torch.zeros(1, 3)), CPU, {"one": [model.first]})
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
