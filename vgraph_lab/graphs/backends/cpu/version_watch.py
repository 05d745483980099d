"""Finding in-place writes that the capture did not see, which are those of other threads."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from vgraph_lab.graphs.backends.call import Call, storage_id
from vgraph_lab.graphs.backends.rules import refuse

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

    def is_as_expected(self) -> bool:
        return self.expected <= self.version() <= self.expected + self.may_rise


class VersionWatch:
    """Compares the version counters of the graph's memory with the writes that the capture has made itself.

    A counter is shared by a tensor and its views, in every thread. Two kinds of write escape: through ``Tensor.data``
    of another thread, which counts on its own, and to inference tensors, which have no counter.
    """

    def __init__(self, outside: Iterable[Tensor]) -> None:
        self._watched: dict[int, _Watched] = {}
        self._written: set[_Watched] = set()  # by the last call
        self._wrapped_again: set[int] = set()  # storages whose tensor of the function has not been seen yet
        for tensor in {id(tensor): tensor for tensor in outside}.values():
            self._add(tensor, tensor)

    def add(self, tensor: Tensor, *, factory: bool) -> None:
        """Watch a tensor of the arena without keeping its memory.

        The function gets what a ``factory`` made (a call without tensors) as another tensor with a counter of its own,
        which begins at 0; that one is watched from where it first shows.
        """
        self._add(tensor, _counter(tensor))
        if factory:
            self._wrapped_again.add(storage_id(tensor))

    def _find(self, tensor: Tensor) -> _Watched | None:
        identity = storage_id(tensor)
        watched = self._watched.get(identity)
        if watched is not None and identity in self._wrapped_again:
            self._wrapped_again.discard(identity)
            watched.tensors.append(_counter(tensor))
        return watched

    def _add(self, tensor: Tensor, counter: Tensor) -> None:
        if not counter.is_inference():
            watched = self._watched.setdefault(storage_id(tensor), _Watched())
            watched.tensors.append(counter)
            watched.expected += counter._version

    def before(self, call: Call) -> None:
        """Refuse the capture if an argument of ``call`` was written by someone else since the capture's last own write.

        The counters of what the call writes rise by one for each time, or not at all: aten's when the call returns, a
        custom operator's before it gets here, those of foreach operations never.
        """
        if call.name == "aten::detach":
            return  # reads no memory, and is how a factory's result gets its other tensor
        writing = set()
        for tensor in call.written:
            watched = self._find(tensor)
            if watched is not None:
                watched.may_rise += len(watched.tensors)  # those that share a counter rise together
                writing.add(watched)
        for tensor in call.inputs:
            watched = self._find(tensor)
            if watched is not None and not watched.is_as_expected():
                self._refuse()
        for watched in self._written - writing:  # their call has returned: from here on they have to stay as they are
            if not watched.is_as_expected():
                self._refuse()
            watched.expected, watched.may_rise = watched.version(), 0
        self._written = writing

    def check_all(self, output: Iterable[Tensor], where: str) -> None:
        """Refuse the capture if anything, the tensors of its ``output`` included, was written by someone else."""
        for tensor in output:
            self._find(tensor)
        if not all(watched.is_as_expected() for watched in self._watched.values()):
            self._refuse(where)

    @staticmethod
    def _refuse(where: str | None = None) -> None:
        refuse(
            "an in-place write by another thread",
            "memory of the graph was written by an operation that the capture did not see",
            "keep other threads away from static inputs and model weights until the capture is over",
            where=where,
        )


def _counter(tensor: Tensor) -> Tensor:
    """A tensor that shares the version counter and nothing else."""
    # Inside a dispatch mode views do not share the counter unless this key is let in again.
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        counter = tensor.detach()
    counter.data = _NO_MEMORY
    return counter
