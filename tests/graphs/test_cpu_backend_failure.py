"""A failed capture leaves pool, earlier graphs and the caller's state as they were, even while its traceback lives."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vgraph_lab.errors import CaptureError, CaptureRefusedError
from vgraph_lab.graphs.backends.cpu import CpuGraphBackend, side_effects


class _UsersError(Exception):
    pass


def _raise(error: BaseException) -> Callable[[Tensor], Any]:
    def function(x: Tensor) -> Any:
        raise error

    return function


USERS_ERROR = _UsersError("mine")
FAILURES: dict[str, tuple[type[BaseException], Callable[[Tensor], Any]]] = {
    "refusal": (CaptureRefusedError, lambda x: x.nonzero()),
    "user": (_UsersError, _raise(USERS_ERROR)),
    "interrupt": (KeyboardInterrupt, _raise(KeyboardInterrupt())),
    "torch": (RuntimeError, lambda x: x @ x),
    "memory": (CaptureError, lambda x: torch.zeros(1 << 46)),
}


@pytest.mark.parametrize("name", FAILURES)
def test_nothing_is_left_behind(name: str, cpu_backend: CpuGraphBackend) -> None:
    expected, fail = FAILURES[name]
    pool, x = cpu_backend.create_pool(), torch.randn(700, 300)
    buffer = torch.zeros(4)
    graph, output = cpu_backend.capture(lambda: ((x + 1) * 2)[3:], pool, static_inputs=[x], owned=[])
    draws = torch.get_rng_state()
    layout, live, reserved = pool.segments(), pool.live_bytes, pool.reserved_bytes
    held: list[Tensor] = []

    def function() -> Any:
        buffer.add_(1)
        held.extend([x * i for i in range(30)])  # more than the free blocks hold
        noise = torch.rand_like(x)
        return fail(x) + noise

    with pytest.raises(expected) as caught:
        cpu_backend.capture(function, pool, static_inputs=[x], owned=[buffer])
    assert caught.value.__traceback__ is not None
    assert len(held) == 30, "the failed capture's tensors are still referenced"
    assert (pool.segments(), pool.live_bytes, pool.reserved_bytes) == (layout, live, reserved)
    assert not buffer.any()
    assert torch.equal(torch.get_rng_state(), draws)
    if name == "user":
        assert caught.value is USERS_ERROR
        assert caught.value.__cause__ is None

    x.normal_()
    graph.replay()
    assert torch.equal(output, ((x + 1) * 2)[3:])
    again, second = cpu_backend.capture(lambda: x.sin() + x.cos(), pool, static_inputs=[x], owned=[])
    held.clear()  # late deaths of the failed capture's storages must not free blocks that others now live in
    x.normal_()
    for this, tensor, truth in ((graph, output, ((x + 1) * 2)[3:]), (again, second, x.sin() + x.cos())):
        this.replay()
        assert torch.equal(tensor, truth)
    del output, second, tensor
    assert pool.live_bytes == 0


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("grows", [lambda s: s.addbmm_(torch.ones(5, 5, 5), torch.ones(5, 5, 10)), lambda s: torch.ones(9, out=s)])
def test_a_resized_static_input_is_put_back_with_all_the_rest(grows: Callable[[Tensor], Tensor], cpu_backend: CpuGraphBackend) -> None:
    resized, others, draws = torch.tensor([3.0]), [torch.zeros(3), torch.zeros(3)], torch.get_rng_state()

    def function() -> Tensor:
        others[0].add_(1)
        torch.rand(1)
        resized.mul_(2)
        others[1].add_(1)
        return grows(resized)

    with pytest.raises(CaptureRefusedError, match="resizes"):
        cpu_backend.capture(function, cpu_backend.create_pool(), static_inputs=[resized, *others], owned=[])
    assert (resized.tolist(), resized.untyped_storage().nbytes()) == ([3.0], 4)
    assert [other.tolist() for other in others] == [[0, 0, 0]] * 2
    assert torch.equal(torch.get_rng_state(), draws)


def test_one_restore_that_fails_keeps_no_other_from_happening(cpu_backend: CpuGraphBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    buffers, draws, failing = [torch.zeros(3), torch.zeros(3), torch.zeros(3)], torch.get_rng_state(), []
    restore = side_effects._restore

    def broken(storage: Any, saved: Any) -> None:
        failing.append(storage)
        if len(failing) == 2:
            raise MemoryError("no")
        restore(storage, saved)

    def function() -> Tensor:
        for buffer in buffers:
            buffer.add_(1)
        return torch.rand(3)

    pool = cpu_backend.create_pool()
    monkeypatch.setattr(side_effects, "_restore", broken)
    with pytest.raises(MemoryError):
        cpu_backend.capture(function, pool, static_inputs=[], owned=buffers)
    assert sorted(buffer.tolist() for buffer in buffers) == [[0, 0, 0], [0, 0, 0], [1, 1, 1]]
    assert torch.equal(torch.get_rng_state(), draws)
    assert pool.segments() == ()
    monkeypatch.undo()
    cpu_backend.capture(lambda: buffers[0] + 1, pool, static_inputs=[], owned=buffers)


def test_a_refusal_keeps_no_tensor_alive(cpu_backend: CpuGraphBackend) -> None:
    x = torch.ones(3)
    pool = cpu_backend.create_pool()

    def capture() -> CaptureRefusedError:
        with pytest.raises(CaptureRefusedError) as caught:
            cpu_backend.capture(lambda: x.sum().item(), pool, static_inputs=[x], owned=[])
        return caught.value

    error = capture()
    plain = (*error.args, error.operation, error.why, error.where, error.hint)
    assert all(isinstance(value, str) for value in plain)
    before = sys.getrefcount(x)
    error.__traceback__ = None
    del error
    assert sys.getrefcount(x) <= before


@settings(max_examples=25)
@given(
    sizes=st.lists(st.integers(1, 600_000), min_size=1, max_size=12),
    kept=st.sets(st.integers(0, 11)),
    good=st.integers(0, 3),
)
def test_roll_back_is_exact_for_any_allocations(sizes: list[int], kept: set[int], good: int) -> None:
    backend = CpuGraphBackend()
    pool, x, outputs = backend.create_pool(), torch.ones(1), []
    for i in range(good):
        size = 1000 * 4**i
        outputs.append(backend.capture(lambda: [torch.zeros(size) + x for _ in range(3)][1:], pool, static_inputs=[x], owned=[]))  # noqa: B023
    before = pool.segments(), pool.live_bytes, pool.reserved_bytes
    held: list[Tensor] = []

    def function() -> Tensor:
        for position, size in enumerate(sizes):
            made = torch.zeros(size)
            if position in kept:
                held.append(made)
        return x.nonzero()

    with pytest.raises(CaptureRefusedError):
        backend.capture(function, pool, static_inputs=[x], owned=[])
    assert (pool.segments(), pool.live_bytes, pool.reserved_bytes) == before
    held.clear()
    assert (pool.segments(), pool.live_bytes, pool.reserved_bytes) == before
