"""Finding in-place writes that the capture did not see, which are those of other threads."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ..call import storage_id
from ..rules import refuse

__all__ = ["VersionWatch"]


with torch.inference_mode(False):
    _NO_MEMORY = torch.empty(0, device="cpu")


class _Watched:
    """The version counters of one storage, and the sum that they should have."""

    __slots__ = ("expected", "may_rise", "tensors")

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.expected = 0
        self.may_rise = 0

    def version(self) -> int:
        return sum(tensor._version for tensor in self.tensors)


class VersionWatch:
    """Compares the version counters of the graph's memory with the writes that the capture has made itself.

    A counter is shared by a tensor and its views, in every thread. Two kinds of write escape: through ``Tensor.data``
    of another thread, which counts on its own, and to inference tensors, which have no counter.
    """

    def __init__(self, outside: Iterable[Tensor]) -> None:
        self._watched: dict[int, _Watched] = {}
        self._pending: list[_Watched] = []
        for tensor in {id(tensor): tensor for tensor in outside}.values():
            self._add(tensor, tensor)

    def add(self, tensor: Tensor) -> None:
        """Watch a tensor of the arena without keeping its memory."""
        # Inside a dispatch mode views do not share the counter unless this key is let in again.
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            counter = tensor.detach()
        counter.data = _NO_MEMORY
        self._add(tensor, counter)

    def _add(self, tensor: Tensor, counter: Tensor) -> None:
        if not counter.is_inference():
            watched = self._watched.setdefault(storage_id(tensor), _Watched())
            watched.tensors.append(counter)
            watched.expected += counter._version

    def check(self, tensors: Iterable[Tensor]) -> None:
        """Refuse the capture if one of ``tensors`` was written by someone else since the capture's last own write."""
        self._settle()
        for tensor in tensors:
            watched = self._watched.get(storage_id(tensor))
            if watched is not None and watched.version() != watched.expected:
                self._refuse()

    def check_all(self, where: str) -> None:
        """Refuse the capture if anything was written by someone else."""
        self._settle(where)
        if any(watched.version() != watched.expected for watched in self._watched.values()):
            self._refuse(where)

    def wrote(self, tensors: Iterable[Tensor]) -> None:
        """The capture itself is writing to ``tensors``: the counters rise when the call returns, by one each or not at all."""
        for tensor in tensors:
            watched = self._watched.get(storage_id(tensor))
            if watched is not None:
                watched.may_rise += len(watched.tensors)  # those that share a counter rise together
                self._pending.append(watched)

    def _settle(self, where: str | None = None) -> None:
        for watched in self._pending:
            version = watched.version()
            if not watched.expected <= version <= watched.expected + watched.may_rise:
                self._refuse(where)
            watched.expected, watched.may_rise = version, 0
        self._pending.clear()

    @staticmethod
    def _refuse(where: str | None = None) -> None:
        refuse(
            "an in-place write by another thread",
            "memory of the graph was written by an operation that the capture did not see",
            "keep other threads away from static inputs and model weights until the capture is over",
            where=where,
        )
