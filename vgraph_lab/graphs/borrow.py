"""Borrowed outputs in debug mode: tensors that know when their time is over.

With ``clone_output=False`` a result is a window onto a graph's static output, valid until the next call on any graph
of the same Manager. In debug mode the window is a tensor subclass that raises as soon as it, or a view of it, is used
after that call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only

from vgraph_lab.errors import BorrowedOutputError

from .structure import map_tensors

__all__ = ["BorrowLedger", "BorrowedTensor"]


class BorrowLedger:
    """Counts the calls on one pool; a borrow is valid while the count has not moved on."""

    def __init__(self) -> None:
        self.call = 0

    def recall(self) -> None:
        """Take back everything lent so far: its memory is used again, or gone."""
        self.call += 1

    def lend(self, output: Any, lender: str) -> Any:
        """The same structure with every tensor wrapped for the current call."""
        return map_tensors(lambda t: BorrowedTensor.wrap(t, self, self.call, lender), output)


class BorrowedTensor(Tensor):
    """A tensor lent for one call. Every use is checked; results that do not share its memory are plain tensors."""

    _ledger: BorrowLedger
    _call: int
    _lender: str

    @staticmethod
    def wrap(tensor: Tensor, ledger: BorrowLedger, call: int, lender: str) -> BorrowedTensor:
        """Lend ``tensor`` for ``call``."""
        borrowed = tensor.as_subclass(BorrowedTensor)
        borrowed._ledger, borrowed._call, borrowed._lender = ledger, call, lender
        return borrowed

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        lent = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, BorrowedTensor)]
        for borrow in lent:
            if borrow._call != borrow._ledger.call:
                raise BorrowedOutputError(
                    f"a borrowed output of {borrow._lender} was used after a later call had taken its memory back. "
                    "Clone it before the next call, or declare the Target with clone_output=True."
                )
        with torch._C.DisableTorchFunctionSubclass():
            plain_args, plain_kwargs = tree_map_only(BorrowedTensor, lambda t: t.as_subclass(Tensor), (args, dict(kwargs or {})))
            result = func(*plain_args, **plain_kwargs)
            origin = {b.untyped_storage().data_ptr(): b for b in lent}

            def relend(tensor: Tensor) -> Tensor:
                source = origin.get(tensor.untyped_storage().data_ptr())
                return tensor if source is None else cls.wrap(tensor, source._ledger, source._call, source._lender)

            return tree_map_only(Tensor, relend, result)
