"""Replaying an operation through its ``out=`` overload, which writes to the fixed place without a temporary and a copy."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tag, Tensor
from torch._ops import OpOverload

from vgraph_lab.graphs.backends.call import Call

from .geometry import same_bytes
from .record import step

__all__ = ["Moved", "OutVariants"]


class Moved(NamedTuple):
    """The bytes of a functional result, and of the block that it was moved to."""

    result: Tensor
    block: Tensor


class OutVariants:
    """The ``out=`` overloads that give the same bits as the functional ones; each use is proved on the data at hand."""

    def __init__(self) -> None:
        self._differs: set[OpOverload] = set()

    def step(self, call: Call, targets: list[Tensor], moved: list[Moved]) -> Callable[[], object] | None:
        """A step that runs ``call`` straight into ``targets``, or ``None`` if only the functional operation will do.

        Args:
            call: the call, its tensors replaced by the aliases that the recording works on.
            targets: aliases of the places of all its results.
            moved: the memory of those places and what it holds, and holds again afterwards.
        """
        variant = _out_variant(call.op)
        if variant is None or call.op in self._differs:
            return None
        op, names = variant
        run = step(op, call.args, {**call.kwargs, **dict(zip(names, targets, strict=True))})
        if _proved(run, targets, moved):
            return run
        self._differs.add(call.op)
        for memory in moved:
            memory.block.copy_(memory.result)
        return None


def _proved(run: Callable[[], object], targets: list[Tensor], moved: list[Moved]) -> bool:
    before = [_place(target) for target in targets]
    for memory in moved:  # every byte is wrong now: an overload that does not write a result cannot pass by luck
        torch.bitwise_not(memory.result, out=memory.block)
    try:
        with torch.inference_mode(False), torch.no_grad():
            run()
    except (RuntimeError, TypeError):  # the overload wants another place than the functional result's
        return False
    return before == [_place(target) for target in targets] and all(same_bytes(memory.result, memory.block) for memory in moved)


def _place(tensor: Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride()


@cache
def _out_variant(op: OpOverload) -> tuple[OpOverload, tuple[str, ...]] | None:
    """The overload with the same arguments that writes all results to keyword arguments, and the names of those."""
    if op.namespace != "aten" or op._schema.is_mutable or Tag.nondeterministic_seeded in op.tags:
        return None
    wanted = [(argument.name, str(argument.type)) for argument in op._schema.arguments]
    for name in op.overloadpacket.overloads():
        candidate = getattr(op.overloadpacket, name)
        arguments = candidate._schema.arguments
        outs = [argument for argument in arguments if argument.alias_info is not None and argument.alias_info.is_write]
        rest = [(argument.name, str(argument.type)) for argument in arguments if argument not in outs]
        single = all(argument.kwarg_only and str(argument.type) == "Tensor" for argument in outs)  # lists take a list of places
        if outs and single and len(outs) == len(op._schema.returns) and rest == wanted:
            return candidate, tuple(argument.name for argument in outs)
    return None
