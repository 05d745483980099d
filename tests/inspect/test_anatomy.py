"""What a graph is made of. Truth: nodes made by hand, and a model whose modules' operations are known."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from contracts.toy import ToyRoutine
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from vgraph_lab.errors import FallbackReason, InputError
from vgraph_lab.graphs import Descriptor, Target, VocoderCUDAGraphManager, create_backend
from vgraph_lab.graphs.backends.base import GraphNode
from vgraph_lab.graphs.entry import Rejection
from vgraph_lab.inspect import Anatomy, anatomy, record
from vgraph_lab.inspect.anatomy import KERNEL_COLUMNS, MODULE_COLUMNS, readable_name
from vgraph_lab.inspect.modules import launching_modules
from vgraph_lab.inspect.records import GraphRecord

SHAPE = Descriptor(1, 4)
DEMANGLED = "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, std::array<char*, 1ul> >"
MANGLED = "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_11FillFunctorIfEESt5arrayIPcLm1EEEEviT0_T1_"

CHAIN = (
    GraphNode(0, "memset"),
    GraphNode(1, "kernel", "add", (0,)),
    GraphNode(2, "kernel", "add", (1,)),
    GraphNode(3, "kernel", "add", (2,)),
    GraphNode(4, "kernel", "mul", (1, 3)),
)


class Layered(nn.Module):
    """Two inner modules, the second used twice, and one operation of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Tanh()
        self.register_buffer("count", torch.zeros(1))
        self.writes = False

    def forward(self, x: Tensor) -> Tensor:
        if self.writes:
            self.count.add_(1)
        return self.second(self.second(self.first(x)) + 1)


class LayeredRoutine(ToyRoutine):
    """A ToyRoutine over :class:`Layered`, with noise outside of it if asked."""

    noise = False

    def forward_for_capture(self, descriptor: Descriptor, buffers: Any) -> Any:
        y = super().forward_for_capture(descriptor, buffers)
        return y + torch.rand_like(y) if self.noise else y

    def allocate_buffers(self, descriptor: Descriptor) -> dict[str, Tensor]:
        return {"x": torch.zeros(descriptor.batch_size, descriptor.frames, 8)}


Layers = tuple[VocoderCUDAGraphManager, LayeredRoutine]


@pytest.fixture
def layers() -> Iterator[Layers]:
    routine = LayeredRoutine(Layered(), [SHAPE])  # type: ignore[arg-type]  # any module will do
    manager = VocoderCUDAGraphManager(create_backend("cpu"), [Target("toy.layers", routine, [SHAPE])])
    manager.capture()
    yield manager, routine
    manager.clear()


def test_kernels_are_counted_by_name():
    found = Anatomy("t", CHAIN)
    assert found.counts == {"kernel": 4, "memset": 1}
    assert list(found.kernels.columns) == list(KERNEL_COLUMNS)
    assert found.kernels.to_numpy().tolist() == [["kernel", "add", 3, 0.6], ["kernel", "mul", 1, 0.2], ["memset", "", 1, 0.2]]
    assert str(found) == "t: 5 nodes (4 kernel, 1 memset)"


def test_names_of_kernels_are_demangled():
    assert readable_name(MANGLED).startswith(DEMANGLED)
    assert readable_name("aten.add.Tensor") == "aten.add.Tensor"
    text = Anatomy("t", (GraphNode(0, "kernel", MANGLED),)).dot()
    assert 'label="at::native::vectorized_elementwise_kernel"' in text


def test_dot_is_the_graph():
    text = Anatomy("t", CHAIN).dot()
    assert text == Anatomy("t", CHAIN).dot()
    assert re.findall(r"n\d -> n\d", text) == ["n0 -> n1", "n1 -> n2", "n2 -> n3", "n1 -> n4", "n3 -> n4"]
    assert re.findall(r'n\d \[label="(.*?)"', text) == ["memset", "add", "add", "add", "mul"]


def test_dot_collapses_what_is_a_run():
    """Node 1 is waited for twice, so that it stays a box of its own."""
    text = Anatomy("t", CHAIN).dot(collapse=True)
    assert re.findall(r'n\d \[label="(.*?)"', text) == ["memset", "add", r"add\n2 nodes", "mul"]
    assert re.findall(r"n\d -> n\d", text) == ["n0 -> n1", "n1 -> n2", "n1 -> n3", "n2 -> n3"]


def test_dot_collapses_modules_where_they_are_known():
    text = Anatomy("t", CHAIN, ("", "M.a", "M.a", "M.a", "M.b")).dot(collapse=True)
    assert re.findall(r'n\d \[label="(.*?)"', text) == ["memset", r"M.a\n3 nodes", r"M.b\nmul"]
    assert re.findall(r"n\d -> n\d", text) == ["n0 -> n1", "n1 -> n2"]


@given(st.text(), st.text(min_size=1))
def test_any_text_is_one_dot_string(title, name):
    """Read back by the rules of DOT: only ``\\"`` and ``\\\\`` and ``\\n`` stand in a string."""
    text = Anatomy(title, (GraphNode(0, "kernel", name),)).dot()
    strings = re.findall(r'"((?:[^"\\]|\\.)*)"', text, flags=re.DOTALL)
    read = [re.sub(r"\\(.)", lambda m: {"n": "\n"}.get(m[1], m[1]), s, flags=re.DOTALL) for s in strings]
    assert read[:2] == [title, title]
    outside = re.sub(r'"(?:[^"\\]|\\.)*"', "", text, flags=re.DOTALL)
    assert '"' not in outside
    assert len(outside.strip().splitlines()) == 5


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sets(st.integers(0, 20), max_size=3)), min_size=1, max_size=12), st.booleans())
def test_collapsing_makes_no_cycle_and_loses_no_node(rows, with_modules):
    nodes = tuple(GraphNode(i, "kernel", name, tuple(sorted(d for d in before if d < i))) for i, (name, before) in enumerate(rows))
    text = Anatomy("t", nodes, tuple(name for name, _ in rows) if with_modules else None).dot(collapse=True)
    labels = re.findall(r'n\d+ \[label="(.*?)"', text)
    assert sum(int(re.search(r"(\d+) nodes", label)[1]) if "nodes" in label else 1 for label in labels) == len(nodes)
    assert all(int(source) < int(target) for source, target in re.findall(r"n(\d+) -> n(\d+)", text))


# ------------------------------------------------------------------------------------------------------------- modules


def test_each_node_has_the_module_that_launched_it(layers):
    manager, _ = layers
    entry = manager.entries()[0]
    assert [(node.name, module) for node, module in zip(entry.graph.nodes(), launching_modules(manager, entry), strict=True)] == [
        ("aten.addmm.default", "Layered.first"),
        ("aten.tanh.default", "Layered.second"),
        ("aten.add.Tensor", "Layered"),
        ("aten.tanh.default", "Layered.second"),
    ]
    found = anatomy(entry, manager)
    assert list(found.by_module.columns) == list(MODULE_COLUMNS)
    assert found.by_module.to_numpy().tolist() == [["Layered.first", 1, 0.25], ["Layered.second", 2, 0.5], ["Layered", 1, 0.25]]
    with pytest.raises(InputError, match="not known"):
        _ = anatomy(entry).by_module
    assert anatomy(record(manager, modules=True).graphs[0]) == found
    assert anatomy(record(manager).graphs[0]).modules is None


def test_asking_leaves_no_trace(layers):
    manager, routine = layers
    expected = manager.targets["toy.layers"](torch.ones(1, 4, 8))
    state = torch.get_rng_state()
    launching_modules(manager, manager.entries()[0])
    assert all(not m._forward_pre_hooks and not m._forward_hooks for m in routine.model.modules())
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(manager.targets["toy.layers"](torch.ones(1, 4, 8)), expected)


def test_a_function_that_does_something_else_now_is_told(layers):
    manager, routine = layers
    routine.noise = True
    with pytest.raises(InputError, match="has changed since"):
        launching_modules(manager, manager.entries()[0])


def test_a_function_that_writes_into_the_model_is_not_run_again(layers):
    manager, routine = layers
    routine.model.writes = True  # type: ignore[assignment]
    with pytest.raises(InputError, match="writes into the model"):
        launching_modules(manager, manager.entries()[0])
    assert routine.model.count == 0
    assert all(not m._forward_pre_hooks for m in routine.model.modules())


def test_kernels_of_a_gpu_have_no_single_module(layers, monkeypatch):
    manager, _ = layers
    monkeypatch.setattr(manager.backend, "name", "cuda")
    with pytest.raises(InputError, match="cpu backend only"):
        anatomy(manager.entries()[0], manager)


# -------------------------------------------------------------------------------------------------------------- misuse


def test_what_has_no_nodes_cannot_be_taken_apart(layers):
    manager, _ = layers
    entry = manager.entries()[0]
    with pytest.raises(InputError, match="nodes=True"):
        anatomy(record(manager, nodes=False).graphs[0])
    manager.clear()
    with pytest.raises(InputError, match="was reset"):
        anatomy(entry)
    with pytest.raises(InputError, match="was reset"):
        launching_modules(manager, entry)
    with pytest.raises(InputError, match="over_budget: too large"):
        anatomy(GraphRecord("t", SHAPE, rejection=Rejection(FallbackReason.OVER_BUDGET, "too large")))
