"""One aten call, taken apart once: what it reads, what it writes, and how it treats storages."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from linecache import getline
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves

__all__ = ["Call", "storage_id", "tensors_in", "user_line"]

# Operations that write to arguments which their schema does not mark: positions of those arguments, and of the flag
# that decides whether they are written.
_UNDECLARED_WRITES = {torch.ops.aten.native_batch_norm.default: ((3, 4), 5)}


def storage_id(tensor: Tensor) -> int:
    """Identity of the memory behind ``tensor``; views of one tensor share it. Unique while the storage is referenced."""
    return int(tensor.untyped_storage()._cdata)


def tensors_in(tree: Any) -> list[Tensor]:
    """Every tensor in a nested structure of tuples, lists and dictionaries, in order."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


@dataclass(frozen=True, slots=True)
class Call:
    """One call that reached the dispatcher, as :meth:`of` reads it.

    Attributes:
        op: the overload.
        args: positional arguments, as dispatched.
        kwargs: keyword arguments, as dispatched.
        leaves: all arguments, flattened.
        spec: how to put ``leaves`` back into ``(args, kwargs)``.
        inputs: the tensors among the arguments, written ones included.
        written: the tensors that the call writes to, each as often as it is written.
    """

    op: OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    leaves: list[Any]
    spec: TreeSpec
    inputs: list[Tensor]
    written: list[Tensor]

    @classmethod
    def of(cls, op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        """Take a dispatched call apart."""
        leaves, spec = tree_flatten((args, dict(kwargs)))
        inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        return cls(op, args, kwargs, leaves, spec, inputs, _written(op, args, kwargs))

    @property
    def name(self) -> str:
        """Qualified name without the overload, e.g. ``aten::copy_``."""
        return str(self.op._schema.name)

    @property
    def lifts_constant(self) -> bool:
        """Whether the call hands a constant, made from Python data below the dispatcher, to the function."""
        return self.name in {"aten::lift_fresh", "aten::lift_fresh_copy"}

    def accepts(self, keyword: str) -> bool:
        """Whether the overload has a keyword argument of that name."""
        return any(argument.name == keyword and argument.kwarg_only for argument in self.op._schema.arguments)

    def argument(self, name: str, default: Any = None) -> Any:
        """Value of the schema's argument ``name``, however it was passed."""
        for position, argument in enumerate(self.op._schema.arguments):
            if argument.name == name:
                return self.args[position] if position < len(self.args) else self.kwargs.get(name, default)
        return default


def _written(op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    written: list[Tensor] = []
    if op._schema.is_mutable:
        for position, argument in enumerate(op._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written += tensors_in(args[position] if position < len(args) else kwargs.get(argument.name))
    elif op in _UNDECLARED_WRITES:
        positions, flag = _UNDECLARED_WRITES[op]
        if args[flag]:
            written += tensors_in([args[position] for position in positions])
    return written


_TORCH = str(Path(torch.__file__).parent) + os.sep
_GRAPHS = str(Path(__file__).resolve().parent.parent) + os.sep
_STDLIB = sysconfig.get_path("stdlib") + os.sep


def user_line(function: Callable[..., Any] | None = None, *, frame: FrameType | None = None, beyond: str = "") -> str:
    """Where the user's code is: the line that is running, or the first line of ``function`` where that is the user's.

    Args:
        function: see above.
        frame: of another thread; by default the caller's.
        beyond: a file whose lines do not count as the user's either: the caller's own.

    Returns:
        ``file:line in function: source`` of the nearest frame that is neither torch's, nor the standard library's, nor
        that of this package's ``graphs`` folder.
    """
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    if code is not None and not _is_library(code.co_filename):
        return _line(code, code.co_firstlineno)
    frame = frame or sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename != beyond and not _is_library(frame.f_code.co_filename):
            return _line(frame.f_code, frame.f_lineno)
        frame = frame.f_back
    return "a line outside of Python"


def _is_library(file: str) -> bool:
    return file.startswith((_TORCH, _GRAPHS, "<frozen")) or (file.startswith(_STDLIB) and "site-packages" not in file)


def _line(code: CodeType, number: int) -> str:
    return f"{code.co_filename}:{number} in {code.co_qualname}: {getline(code.co_filename, number).strip()}"
