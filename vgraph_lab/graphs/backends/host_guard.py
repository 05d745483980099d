"""Refuse what reaches host memory without an aten call, on the capturing thread only.

Most host accesses are aten calls and are caught by their tags. The functions below are not. They are replaced on the
class itself because the alternative, a ``TorchFunctionMode``, makes modules leave their fast paths: the captured work
would no longer be bit-equal to the eager one.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .rules import refuse

__all__ = ["host_access_refused"]

_HOST = "it waits for the device and reads its memory on the host"
_READ = "it reads the sizes from tensor data on the host, so a replay would use those of the capture"
_SEED = "a replay does not seed again, so it would draw other numbers than the eager call"


def _always(*args: Any, **kwargs: Any) -> bool:
    return True


def _to_cpu_by_name(*args: Any, **kwargs: Any) -> bool:
    """``x.to('cpu')``. ``x.to(other.device)`` looks the same as ``torch.device('cpu')`` on a CPU tensor, so only the name counts."""
    return any(isinstance(value, str) and value.startswith("cpu") for value in (*args[1:], kwargs.get("device")))


def _split_by_tensor(*args: Any, **kwargs: Any) -> bool:
    return any(isinstance(value, torch.Tensor) for value in (*args[1:], *(kwargs[key] for key in kwargs.keys() - {"input"})))


# owner, attribute, shown name, when it is refused, why
_REFUSED: tuple[tuple[Any, str, str, Callable[..., bool], str], ...] = (
    (torch.Tensor, "cpu", "Tensor.cpu()", _always, _HOST),
    (torch.Tensor, "to", "Tensor.to('cpu')", _to_cpu_by_name, _HOST),
    (torch.Tensor, "numpy", "Tensor.numpy()", _always, _HOST),
    (torch.Tensor, "tolist", "Tensor.tolist()", _always, _HOST),
    (torch.Tensor, "__array__", "Tensor.__array__()", _always, _HOST),
    (torch.Tensor, "__dlpack__", "Tensor.__dlpack__()", _always, _HOST),
    (torch.Tensor, "__repr__", "Tensor.__repr__()", _always, _HOST),
    (torch.Tensor, "__deepcopy__", "Tensor.__deepcopy__()", _always, _HOST),
    (torch.Tensor, "__reduce_ex__", "Tensor.__reduce_ex__()", _always, _HOST),
    (torch, "manual_seed", "torch.manual_seed()", _always, _SEED),
    (torch, "set_rng_state", "torch.set_rng_state()", _always, _SEED),
    (torch.random, "manual_seed", "torch.manual_seed()", _always, _SEED),
    (torch.random, "set_rng_state", "torch.set_rng_state()", _always, _SEED),
    (torch, "seed", "torch.seed()", _always, _SEED),
    (torch.random, "seed", "torch.seed()", _always, _SEED),
    (torch, "tensor_split", "torch.tensor_split()", _split_by_tensor, _READ),
    (torch.Tensor, "tensor_split", "Tensor.tensor_split()", _split_by_tensor, _READ),
    (torch, "_pad_packed_sequence", "pad_packed_sequence()", _always, _READ),
    (torch._VF, "_pad_packed_sequence", "pad_packed_sequence()", _always, _READ),
)

_lock = threading.Lock()
_guarded_threads: Counter[int] = Counter()
_saved: list[tuple[Any, str, bool, Any]] = []


@contextmanager
def host_access_refused() -> Iterator[None]:
    """Guard the calling thread. Other threads are not affected; nested and concurrent guards are counted.

    Calls made while no dispatch mode is active pass: that is how torch's own tools step out of a capture.
    """
    thread = threading.get_ident()
    with _lock:
        if not _guarded_threads:
            _install()
        _guarded_threads[thread] += 1
    try:
        yield
    finally:
        with _lock:
            _guarded_threads[thread] -= 1
            if not _guarded_threads[thread]:
                del _guarded_threads[thread]
            if not _guarded_threads:
                _uninstall()


def _install() -> None:
    for owner, attribute, shown, refuses, why in _REFUSED:
        original = getattr(owner, attribute)
        _saved.append((owner, attribute, attribute in vars(owner), original))
        setattr(owner, attribute, _guard(original, shown, refuses, why))


def _uninstall() -> None:
    while _saved:
        owner, attribute, own, original = _saved.pop()
        if own:
            setattr(owner, attribute, original)
        else:
            delattr(owner, attribute)  # it was inherited


def _guard(original: Callable[..., Any], shown: str, refuses: Callable[..., bool], why: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        capturing = threading.get_ident() in _guarded_threads and torch._C._len_torch_dispatch_stack() > 0
        if capturing and refuses(*args, **kwargs):
            refuse(shown, why, "move it out of the captured function")
        return original(*args, **kwargs)

    return guarded
