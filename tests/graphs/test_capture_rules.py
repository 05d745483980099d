"""Rules that only show on an accelerator, for which the meta device stands in, and the guard's reach."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event, Thread
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from vgraph_lab.errors import CaptureRefusedError
from vgraph_lab.graphs.backends.audit import CaptureAudit, run_checked
from vgraph_lab.graphs.backends.call import user_line
from vgraph_lab.graphs.backends.host_guard import host_access_refused

Function = Callable[[Tensor, Tensor, Tensor], Any]


def audit(function: Callable[[], Any], *static: Tensor, owned: tuple[Tensor, ...] = ()) -> Any:
    with torch.no_grad():
        return run_checked(function, CaptureAudit(static, owned))


REFUSED: dict[str, tuple[str, Function]] = {
    "to_host": ("from meta to cpu", lambda device, host, number: device.to(torch.device("cpu"))),
    "from_host": ("from cpu to meta", lambda device, host, number: host.to(device.device)),
    "forgotten_device": ("host memory", lambda device, host, number: device + torch.zeros(3)),
    "copy_from_host": ("host memory", lambda device, host, number: device.copy_(host)),
    "copy_to_host": ("host memory", lambda device, host, number: number.copy_(device.sum())),
    "host_index": ("host memory", lambda device, host, number: device[torch.arange(2)]),
    "static_host_number": ("by value", lambda device, host, number: device * host[0]),
    "constant_on_device": ("torch.tensor", lambda device, host, number: device + torch.tensor(1.0, device="meta")),
    "device_value_into_a_mask": ("boolean mask", lambda device, host, number: device.index_put_((device > 0,), device.sum())),
}
ALLOWED: dict[str, Function] = {
    "python_number": lambda device, host, number: device * 2 + torch.tensor(3.0),
    "owned_host_number": lambda device, host, number: device * number,
    "number_computed_on_the_host": lambda device, host, number: device * torch.ones(()).mul(2),
    "device_factory": lambda device, host, number: device + torch.ones(3, device="meta"),
    "conversion": lambda device, host, number: device.to(torch.float16),
    "host_value_into_a_mask": lambda device, host, number: device.index_put_((device > 0,), torch.tensor(1.0)),
    "host_only": lambda device, host, number: (device + 1, host + 1),
}


@pytest.mark.parametrize("name", REFUSED)
def test_host_memory_takes_no_part_on_an_accelerator(name: str) -> None:
    why, function = REFUSED[name]
    device, host, number = torch.zeros(3, device="meta"), torch.ones(3), torch.tensor(2.0)
    with pytest.raises(CaptureRefusedError, match=why):
        audit(lambda: function(device, host, number), device, host, owned=(number,))


@pytest.mark.parametrize("name", ALLOWED)
def test_host_numbers_do(name: str) -> None:
    device, host, number = torch.zeros(3, device="meta"), torch.ones(3), torch.tensor(2.0)
    output = audit(lambda: ALLOWED[name](device, host, number), device, host, owned=(number,))
    results = output if isinstance(output, tuple) else (output,)
    assert [(result.device.type, tuple(result.shape)) for result in results] == [("meta", (3,)), ("cpu", (3,))][: len(results)]


def test_the_audit_keeps_no_result_alive() -> None:
    x, refs = torch.ones(1), []

    def function() -> Tensor:
        for _ in range(3):
            big = x.expand(1_000_000).clone()
            refs.append(StorageWeakRef(big.untyped_storage()))
            del big
        assert all(ref.expired() for ref in refs)
        return x + 1

    audit(function, x)
    assert len(refs) == 3


def test_identities_are_not_recycled_during_the_audit() -> None:
    x = torch.ones(4)

    def function() -> None:
        for _ in range(50):
            made = x + 1
            del made
            outside = torch.frombuffer(bytearray(16), dtype=torch.float32)  # may get the dead storage's address
            with pytest.raises(CaptureRefusedError, match="outside"):
                _ = outside + 1

    with pytest.raises(CaptureRefusedError, match="outside"):
        audit(function, x)


def test_the_guard_is_for_one_thread_and_may_nest() -> None:
    x = torch.ones(2)
    inside, done, results = Event(), Event(), []

    def bystander() -> None:
        inside.wait()
        results.append(x.tolist())
        done.set()

    thread = Thread(target=bystander)
    thread.start()

    def function() -> Tensor:
        with host_access_refused():
            pass
        inside.set()
        done.wait()
        return x.cpu()

    with pytest.raises(CaptureRefusedError, match="cpu"):
        audit(function, x)
    thread.join()
    assert results == [[1.0, 1.0]]
    assert x.cpu() is x


def test_without_a_dispatch_mode_the_guard_lets_pass() -> None:
    x = torch.ones(2)
    with host_access_refused():
        assert x.tolist() == [1, 1]


def test_user_line_names_this_line_and_a_functions_first() -> None:
    here = user_line()  # this one
    assert here.startswith(f"{__file__}:")
    assert here.endswith(f"in {test_user_line_names_this_line_and_a_functions_first.__name__}: here = user_line()  # this one")

    def function() -> None: ...

    line = user_line(function)
    assert f"{__file__}:{function.__code__.co_firstlineno} in " in line
    assert line.endswith("def function() -> None: ...")
    assert "test_user_line" in user_line(torch.nn.Identity().forward), "torch's own code is never the user's"
