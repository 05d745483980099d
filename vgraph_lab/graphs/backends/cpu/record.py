"""One step of a recording: how to run it again, and what memory it touches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from vgraph_lab.errors import ReplayError
from vgraph_lab.graphs.backends.base import NodeKind
from vgraph_lab.graphs.backends.call import Call

__all__ = ["Record", "copying_step", "node_kind", "step"]

_COPIES = {"copy_", "copy", "clone", "_to_copy", "contiguous", "lift_fresh", "lift_fresh_copy", "view_copy", "expand_copy", "detach_copy"}
_FILLS = {
    *("fill_", "fill", "zero_", "zero", "zeros", "ones", "full", "new_zeros", "new_ones", "new_full"),
    *("zeros_like", "ones_like", "full_like", "_foreach_zero_"),
}


@dataclass(frozen=True, slots=True)
class Record:
    """One recorded operation.

    Attributes:
        name: aten overload as it was called.
        kind: what a CUDA graph would call the node.
        run: does the work again on the same memory.
        reads: aliases of the tensors that are read.
        writes: aliases of the tensors that are written.
        generator: the random generator that the operation drew from, if any.
    """

    name: str
    kind: NodeKind
    run: Callable[[], object]
    reads: tuple[Tensor, ...]
    writes: tuple[Tensor, ...]
    generator: torch.Generator | None = None


def node_kind(call: Call, results: list[Tensor]) -> NodeKind:
    """Kind of node for ``call``: a copy that converts its elements is a kernel."""
    name = call.name.removeprefix("aten::")
    if name in _FILLS:
        return "memset"
    same_dtype = len({tensor.dtype for tensor in (*call.inputs, *results)}) == 1
    return "memcpy" if name in _COPIES and same_dtype else "kernel"


def step(op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[[], object]:
    """Run ``op`` again. ``_op`` is the overload without its Python front."""
    return partial(op._op, *args, **kwargs)


def copying_step(run: Callable[[], Any], targets: list[tuple[int, Tensor]]) -> Callable[[], object]:
    """Run a functional operation again and copy its results, by position among the flattened ones, to their fixed places.

    The step raises :class:`~vgraph_lab.errors.ReplayError` if a result has another shape than its place.
    """
    if targets[0][0] == 0 and len(targets) == 1:
        target = targets[0][1]

        def copy_one() -> None:
            result = run()
            _copy(target, result if isinstance(result, Tensor) else tree_leaves(result)[0])

        return copy_one

    def copy_all() -> None:
        results = tree_leaves(run())
        for position, target in targets:
            _copy(target, results[position])

    return copy_all


def _copy(target: Tensor, result: Tensor) -> None:
    if result.shape != target.shape:  # copy_ would broadcast in silence
        raise ReplayError(
            f"an operation gave {tuple(result.shape)} where it had given {tuple(target.shape)} when it was captured: the shape of its "
            "output depends on tensor data, which a graph cannot follow; keep the operation out of the captured function"
        )
    target.copy_(result)
