"""Two graphs side by side. Truth: nodes made by hand, and two graphs of a routine whose operations are known."""

from __future__ import annotations

from pathlib import Path

import pytest
from contracts.toy import ToyModel, ToyRoutine

from vgraph_lab.errors import InputError
from vgraph_lab.graphs import Descriptor, Target, VocoderCUDAGraphManager, create_backend
from vgraph_lab.graphs.backends.base import GraphNode
from vgraph_lab.inspect import Anatomy, record
from vgraph_lab.inspect.anatomy_diff import KERNEL_DIFF_COLUMNS, KIND_DIFF_COLUMNS, anatomy_diff, nodes_by_kind

SHAPE = Descriptor(1, 4)


def made(title: str, *names: str) -> Anatomy:
    return Anatomy(title, tuple(GraphNode(index, "kernel", name) for index, name in enumerate(names)))


A = made("first", "nhwcToNchwKernel", "fprop", "nchwToNhwcKernel", "elementwise_kernel")
B = made("second", "convolve", "elementwise_kernel", "elementwise_kernel")


def test_kinds() -> None:
    table = anatomy_diff(A, B).kinds
    assert list(table.columns) == list(KIND_DIFF_COLUMNS)
    rows = {row.pop("work"): tuple(row.values()) for row in table.to_dict("records")}
    assert rows == {
        "convolution": (1, 0, -1, 0.25, 0.0),
        "layout conversion": (2, 0, -2, 0.5, 0.0),
        "own kernels": (0, 1, 1, 0.0, pytest.approx(1 / 3)),
        "elementwise": (1, 2, 1, 0.25, pytest.approx(2 / 3)),
    }
    assert list(rows) == ["convolution", "layout conversion", "own kernels", "elementwise"], "in a fixed order"


def test_kernels_largest_difference_first() -> None:
    a = made("a", *["mul_elementwise"] * 5, "add_elementwise", "gemm")
    table = anatomy_diff(a, made("b", "add_elementwise", "gemm", "gemm")).kernels
    assert list(table.columns) == list(KERNEL_DIFF_COLUMNS)
    assert table[["name", "difference"]].to_numpy().tolist() == [["mul_elementwise", -5], ["gemm", 1], ["add_elementwise", 0]]


def test_text() -> None:
    lines = str(anatomy_diff(A, B)).splitlines()
    assert lines[0] == "a: first: 4 nodes (4 kernel)"
    assert lines[1] == "b: second: 3 nodes (3 kernel)"
    assert lines[2].split() == ["a", "b", "b", "−", "a"]
    assert [line.split() for line in lines[3:]][1:3] == [["layout", "conversion", "2", "0", "−2"], ["own", "kernels", "0", "1", "+1"]]
    assert str(anatomy_diff(A, A)).splitlines()[-1].split() == ["elementwise", "1", "1", "="]


def test_nameless_nodes_are_named_by_their_kind() -> None:
    found = Anatomy("x", (GraphNode(0, "memcpy"), GraphNode(1, "memset", "", (0,))))
    assert nodes_by_kind(found) == {"copy": 2}
    assert set(anatomy_diff(found, found).kernels["name"]) == {"memcpy", "memset"}


def test_live_graphs_and_recorded_ones_say_the_same(tmp_path: Path) -> None:
    routine = ToyRoutine(ToyModel(), [SHAPE])
    with VocoderCUDAGraphManager(create_backend("cpu"), [Target("toy", routine, [SHAPE])]) as manager:
        manager.capture()
        (entry,) = manager.entries()
        live = anatomy_diff(entry, entry)
        path = record(manager).save(tmp_path / "one.vgl")
        recorded = anatomy_diff(entry, path)
    assert (live.kinds["difference"] == 0).all()
    assert recorded.kinds.equals(live.kinds)
    assert len(live.kernels)


def test_a_file_of_several_graphs_fails(tmp_path: Path) -> None:
    shapes = [SHAPE, Descriptor(2, 4)]
    routine = ToyRoutine(ToyModel(), shapes)
    with VocoderCUDAGraphManager(create_backend("cpu"), [Target("toy", routine, shapes)]) as manager:
        manager.capture()
        path = record(manager).save(tmp_path / "two.vgl")
    with pytest.raises(InputError, match=r"holds 2 graphs \(toy B2×T4, toy B1×T4\).*Recording\.load"):
        anatomy_diff(path, A)
