"""Tensors and constants of a call by name, so that a check can say which argument it means."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor, nn

__all__ = ["Arguments", "named_leaves"]

_CONSTANTS = (type(None), bool, int, float, str)


def named_leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Tensors and plain constants in tuples, lists, dicts and dataclasses, with the expression that reaches each.

    Anything else is passed over: what it holds cannot be seen from here.
    """
    if isinstance(value, (Tensor, *_CONSTANTS)):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from named_leaves(f"{name}[{key!r}]", item)
    elif isinstance(value, tuple | list):
        for index, item in enumerate(value):
            yield from named_leaves(f"{name}[{index}]", item)
    elif is_dataclass(value) and not isinstance(value, type):
        for each in fields(value):
            yield from named_leaves(f"{name}.{each.name}", getattr(value, each.name))


class Arguments:
    """Names the arguments of one callable as its signature does."""

    def __init__(self, runnable: Callable[..., Any]) -> None:
        try:
            self._signature: inspect.Signature | None = inspect.signature(runnable.forward if isinstance(runnable, nn.Module) else runnable)
        except (TypeError, ValueError):  # builtins have none
            self._signature = None

    def leaves(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Tensors and constants of one call by name; ``args[0]`` where the signature has no name.

        Raises:
            TypeError: the arguments do not fit the signature; the same that the call would raise.
        """
        found: dict[str, Any] = {}
        if self._signature is None:
            bound: dict[str, Any] = {"args": args, **kwargs}
        else:
            found_by_signature = self._signature.bind(*args, **kwargs)
            found_by_signature.apply_defaults()  # a default that is left out is the same argument as one that is given
            bound = found_by_signature.arguments
        for name, value in bound.items():
            found |= named_leaves(name, value)
        return found
