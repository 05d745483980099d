"""One capture with parts in other threads, against the same work in one thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from vgraph_lab.errors import CaptureError, CaptureRefusedError
from vgraph_lab.graphs.backends.cpu import CpuGraphBackend
from vgraph_lab.graphs.backends.cpu.session import joined_session
from vgraph_lab.graphs.backends.threads import thread_conditions

BACKEND = CpuGraphBackend()


def elsewhere(call: Callable[[], Any], conditions: Callable[[], AbstractContextManager[None]]) -> Any:
    """Do it in another thread while this one waits; errors come back."""
    found: list[Any] = []

    def target() -> None:
        try:
            with conditions():
                result = call()
            found.append(result)
        except Exception as error:  # noqa: BLE001 - raised below
            found.append(error)

    thread = threading.Thread(target=target)
    thread.start()
    thread.join(30)
    (result,) = found
    if isinstance(result, Exception):
        raise result
    return result


def capture(function: Callable[[], Tensor], *static: Tensor) -> tuple[Any, Tensor]:
    return BACKEND.capture(function, BACKEND.create_pool(), static_inputs=static, owned=())


def test_parts_in_other_threads_are_recorded_in_their_order() -> None:
    x, state = torch.ones(4), torch.zeros(4)

    def work() -> Tensor:
        conditions = thread_conditions()
        a = x * 2
        b = elsewhere(lambda: a + state, conditions)
        elsewhere(lambda: state.add_(1), conditions)
        c = elsewhere(lambda: (b * state).sum(0, keepdim=True), conditions)
        return torch.cat([b, c])

    graph, output = capture(work, x, state)
    assert [node.name for node in graph.nodes()] == [
        f"aten.{name}" for name in ("mul.Tensor", "add.Tensor", "add_.Tensor", "mul.Tensor", "sum.dim_IntList", "cat.default")
    ]
    assert torch.equal(state, torch.zeros(4))  # what the capture did is undone, whoever did it
    for step in range(3):
        x.fill_(step)
        graph.replay()
        b = torch.full((4,), 2.0 * step + step)
        assert torch.equal(output, torch.cat([b, (b * (step + 1)).sum(0, keepdim=True)]))


def test_they_draw_as_one_thread_would() -> None:
    def parts() -> Tensor:
        conditions = thread_conditions()
        return torch.cat([torch.rand(3), elsewhere(lambda: torch.rand(3), conditions), torch.rand(2)])

    graph, output = capture(parts)
    torch.manual_seed(5)
    graph.replay()
    first = output.clone()
    graph.replay()
    second = output.clone()
    torch.manual_seed(5)
    assert torch.equal(first, parts())
    assert torch.equal(second, parts())


def test_a_part_is_in_the_capture_and_nothing_else_is() -> None:
    seen: list[bool] = []

    def work() -> Tensor:
        conditions = thread_conditions()
        elsewhere(lambda: seen.append(BACKEND.is_capturing()), conditions)
        stranger = threading.Thread(target=lambda: seen.append(BACKEND.is_capturing()))
        stranger.start()
        stranger.join(30)
        seen.append(BACKEND.is_capturing())
        return torch.ones(1)

    capture(work)
    assert seen == [True, False, True]
    assert not BACKEND.is_capturing()
    elsewhere(lambda: seen.append(BACKEND.is_capturing()), thread_conditions())
    assert seen[3:] == [False]


@pytest.mark.parametrize("audit", [False, True])
def test_the_rules_hold_in_a_part(audit: bool) -> None:
    def refused() -> float:
        return float(torch.ones(2).sum())

    def swallowed() -> None:
        try:
            refused()
        except CaptureRefusedError:
            return

    for part in (refused, swallowed, lambda: torch.ones(2).numpy()):

        def work(part: Callable[[], Any] = part) -> Tensor:
            elsewhere(part, thread_conditions())
            return torch.ones(1)

        runs: Callable[[], Any] = (
            partial(BACKEND.warm_up, work, static_inputs=(), owned=(), audit=True) if audit else partial(capture, work)
        )
        with pytest.raises(CaptureRefusedError, match=r"Tensor\.(item|numpy)\(\)"):
            runs()
    assert elsewhere(refused, thread_conditions()) == 2.0


def test_the_rules_end_with_the_part() -> None:
    free: list[float] = []

    def work() -> Tensor:
        elsewhere(lambda: torch.ones(1), thread_conditions())
        stranger = threading.Thread(target=lambda: free.append(float(torch.ones(2).sum())))
        stranger.start()
        stranger.join(30)
        return torch.ones(1)

    capture(work)
    assert free == [2.0]


def test_who_comes_too_late_is_refused() -> None:
    kept: list[Any] = []

    def work() -> Tensor:
        kept.append(thread_conditions())
        return torch.ones(1)

    capture(work)
    with pytest.raises(CaptureError, match="the capture that this thread was to take part in is over"):
        elsewhere(lambda: torch.ones(1), kept[0])
    with pytest.raises(CaptureError, match="is over"), joined_session():
        raise AssertionError


def test_a_part_cannot_begin_a_capture_or_replay() -> None:
    graph, _ = capture(lambda: torch.ones(1))

    def nested() -> Tensor:
        elsewhere(lambda: capture(lambda: torch.ones(1)), thread_conditions())
        return torch.ones(1)

    def replaying() -> Tensor:
        elsewhere(graph.replay, thread_conditions())
        return torch.ones(1)

    with pytest.raises(CaptureError, match="cannot begin inside another one"):
        capture(nested)
    with pytest.raises(Exception, match="a replay inside a capture"):
        capture(replaying)
