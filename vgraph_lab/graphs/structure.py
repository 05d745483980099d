"""Outputs and buffers are tensors in tuples, lists and dicts; these functions walk them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from typing import Any

import torch
from torch import Tensor

from vgraph_lab.errors import CaptureError

__all__ = ["clone", "is_like", "map_tensors", "nbytes", "signature", "tensors"]

_CONSTANTS = (type(None), bool, int, float, str)


def tensors(value: Any) -> Iterator[Tensor]:
    """All tensors of a structure, in order.

    Raises:
        CaptureError: a leaf is neither a tensor nor a plain constant.
    """
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors(item)
    elif not isinstance(value, _CONSTANTS):
        raise CaptureError(
            f"{type(value).__name__} cannot be part of a graph's buffers or output. "
            "Accepted: tensors and plain constants in tuples, named tuples, lists and dicts."
        )


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """The same structure with every tensor replaced by ``function(tensor)``."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        mapped = copy(value)  # of the same class, with whatever attributes it has
        for key, item in value.items():
            mapped[key] = map_tensors(function, item)
        return mapped
    if isinstance(value, tuple | list):
        items = [map_tensors(function, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def signature(value: Any, *, shapes: bool = True) -> str:
    """A comparable description of a structure: nesting, dtypes and (unless switched off) shapes and constants."""
    if isinstance(value, Tensor):
        kind = str(value.dtype).removeprefix("torch.")
        return f"{kind}{list(value.shape)}" if shapes else kind
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {signature(item, shapes=shapes)}" for key, item in value.items()) + "}"
    if isinstance(value, tuple | list):
        return f"{type(value).__name__}({', '.join(signature(item, shapes=shapes) for item in value)})"
    return repr(value) if shapes else type(value).__name__


def is_like(value: Any, other: Any) -> bool:
    """Whether two structures have the same nesting and dtypes: equal signatures without shapes, in a tenth of the time."""
    if isinstance(other, Tensor):
        return isinstance(value, Tensor) and value.dtype is other.dtype
    if type(value) is not type(other):
        return False
    if isinstance(other, dict):
        return value.keys() == other.keys() and all(is_like(value[key], item) for key, item in other.items())
    if isinstance(other, tuple | list):
        return len(value) == len(other) and all(map(is_like, value, other))
    return True


def nbytes(value: Any) -> int:
    """Bytes of the distinct storages behind a structure's tensors."""
    storages = {(t.device, t.untyped_storage().data_ptr()): t.untyped_storage().nbytes() for t in tensors(value)}
    return sum(storages.values())


def clone(value: Any) -> Any:
    """A copy of the structure that owns its memory."""
    return map_tensors(torch.clone, value)
