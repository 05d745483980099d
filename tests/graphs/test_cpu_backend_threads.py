"""Other threads: their writes are found, their captures wait for their turn, their replays are serialised."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from vgraph_lab.errors import CaptureError, CaptureRefusedError
from vgraph_lab.graphs.backends.cpu import ArenaPool, CpuGraphBackend

Capture = Callable[..., tuple[Any, Any]]


def in_thread(function: Callable[[], Any]) -> None:
    thread = Thread(target=function)
    thread.start()
    thread.join()


class Setting:
    """A captured function with one point at which another thread may act."""

    def __init__(self) -> None:
        self.net = nn.Linear(4, 4)
        self.x = torch.ones(2, 4)
        self.made: list[Tensor] = []

    def run(self, act: Callable[[Setting], Any], *, last: bool) -> Tensor:
        y: Tensor = self.net(self.x)
        self.made.append(y)
        self.x.mul_(1.5)
        if not last:
            in_thread(lambda: act(self))
        z: Tensor = self.net(y + self.x) + self.net.weight[0]
        y.add_(1)
        if last:
            in_thread(lambda: act(self))
        return z


WRITES: dict[str, Callable[[Setting], Any]] = {
    "static_input": lambda s: s.x.add_(1),
    "static_input_through_a_view": lambda s: s.x[0].zero_(),
    "parameter": lambda s: torch.no_grad()(lambda: s.net.weight.mul_(2))(),
    "intermediate": lambda s: s.made[0].zero_(),
    "intermediate_through_a_view": lambda s: s.made[0][1:].fill_(3),
    "intermediate_through_detach": lambda s: s.made[0].detach().fill_(3),
}


@pytest.mark.parametrize("last", [False, True], ids=["midway", "at_the_end"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", WRITES)
def test_another_threads_write_is_refused(
    name: str, mode: type[torch.no_grad] | type[torch.inference_mode], last: bool, cpu_backend: CpuGraphBackend, cpu_pool: ArenaPool
) -> None:
    setting = Setting()
    owned = list(setting.net.parameters())
    with mode(), pytest.raises(CaptureRefusedError, match="another thread") as caught:
        cpu_backend.capture(lambda: setting.run(WRITES[name], last=last), cpu_pool, static_inputs=[setting.x], owned=owned)
    next_use, whole_function = "z: Tensor = self.net(y + self.x) + self.net.weight[0]", "cpu_backend.capture(lambda: "
    assert f"{__file__}:" in caught.value.where
    assert (whole_function if last else next_use) in caught.value.where
    assert cpu_pool.segments() == ()


FACTORIES: dict[str, Callable[[], Tensor]] = {
    "empty": lambda: torch.empty(3),
    "zeros": lambda: torch.zeros(3),
    "arange": lambda: torch.arange(3.0),
    "operator": lambda: torch.ops.aten.ones([3]),
}


@pytest.mark.parametrize("how", ["argument", "view", "output"])
@pytest.mark.parametrize("name", FACTORIES)
def test_another_threads_write_to_a_fresh_tensor_is_refused(name: str, how: str, cpu_capture: Capture) -> None:
    x = torch.ones(3)

    def function() -> Tensor:
        y = FACTORIES[name]()
        in_thread(lambda: torch.mul(x, 3, out=y))
        return y + 1 if how == "argument" else y[1:] * 2 if how == "view" else y

    with pytest.raises(CaptureRefusedError, match="another thread"):
        cpu_capture(function, x)


@pytest.mark.parametrize("last", [False, True], ids=["midway", "at_the_end"])
def test_another_threads_other_work_is_not(last: bool, cpu_capture: Capture) -> None:
    setting = Setting()
    expected = torch.no_grad()(lambda: setting.net(setting.net(setting.x) + setting.x * 1.5) + setting.net.weight[0])()

    def work(s: Setting) -> None:
        mine = torch.randn(100)
        mine.add_(s.x.sum()).mul_(2)
        assert mine.cpu().numpy().tolist(), "host access is only refused to the capturing thread"
        assert repr(mine)
        assert np.asarray(mine).size

    graph, output = cpu_capture(lambda: setting.run(work, last=last), setting.x, owned=setting.net.parameters())
    graph.replay()
    assert torch.equal(output, expected)


def test_many_own_writes_raise_no_false_alarm(cpu_capture: Capture) -> None:
    base = torch.zeros(8)
    parts = [base[:4], base[4:], base.view(2, 4)]

    def function() -> Tensor:
        y = torch.zeros(4)
        torch._foreach_add_([y, parts[0], parts[0]], 1.0)
        torch.add(y, 1, out=y)
        torch.max(torch.stack([y, y]), 0, out=(y, torch.empty(4, dtype=torch.int64)))
        y.data.mul_(2)
        y.detach().add_(1)
        y.squeeze_().unsqueeze_(0).transpose_(0, 1)
        torch.nn.functional.dropout(y, 0.0, training=True, inplace=True)
        parts[2][1].copy_(y[:, 0])
        y[0] = 3.0
        torch.nn.functional.relu(parts[1], inplace=True)
        return y + base[0]

    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            graph, output = cpu_capture(function, base, *parts)
        base.zero_()
        graph.replay()
        found, base_after = output.clone(), base.clone()
        base.zero_()
        assert torch.equal(function(), found)
        assert torch.equal(base, base_after)
        base.zero_()


def test_a_second_thread_cannot_capture_meanwhile(cpu_backend: CpuGraphBackend, cpu_pool: ArenaPool) -> None:
    x, errors, seen = torch.ones(2), [], []

    def other() -> None:
        seen.append(cpu_backend.is_capturing())
        try:
            cpu_backend.capture(lambda: x + 1, cpu_backend.create_pool(), static_inputs=[x], owned=[])
        except CaptureError as error:
            errors.append(str(error))

    def function() -> Tensor:
        in_thread(other)
        return x * 2

    graph, output = cpu_backend.capture(function, cpu_pool, static_inputs=[x], owned=[])
    assert seen == [False]
    assert len(errors) == 1
    assert "another thread is capturing" in errors[0]
    graph.replay()
    assert output.tolist() == [2, 2]
    in_thread(other)
    assert len(errors) == 1, "afterwards it may"


def test_concurrent_replays_of_one_pool_are_serialised(cpu_backend: CpuGraphBackend, cpu_pool: ArenaPool) -> None:
    def work(x: Tensor) -> Tensor:
        for _ in range(10):
            x = (x * 1.25).sin() + 1
        return x

    inputs = [torch.randn(3000) for _ in range(3)]
    graphs = [cpu_backend.capture(lambda x=x: work(x), cpu_pool, static_inputs=[x], owned=[]) for x in inputs]  # type: ignore[misc]  # default binds the loop variable

    def call(i: int) -> bool:
        value = torch.full((3000,), float(i))
        x, (graph, output) = inputs[i % 3], graphs[i % 3]
        with cpu_pool.exclusive():
            x.copy_(value)
            graph.replay()
            result = output.clone()
        return torch.equal(result, work(value))

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(call, range(60)))


def test_replay_waits_for_whoever_holds_the_pool(cpu_pool: ArenaPool, cpu_capture: Capture) -> None:
    x = torch.zeros(2)
    graph, output = cpu_capture(lambda: x + 1, x)
    replayed = Event()

    def replay() -> None:
        graph.replay()
        replayed.set()

    with cpu_pool.exclusive():
        thread = Thread(target=replay)
        thread.start()
        assert not replayed.wait(0.05)
        x.fill_(5)
        with cpu_pool.exclusive():
            graph.replay()
    thread.join()
    assert replayed.is_set()
    assert output.tolist() == [6, 6]
