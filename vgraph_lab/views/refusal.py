"""Refusals of widgets: a browser reports several values at once, and one that is refused takes all of them back."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from traitlets import Bunch, TraitError

from vgraph_lab.errors import InputError

__all__ = ["RefusedError", "refusing"]

Value = TypeVar("Value")


class RefusedError(InputError, TraitError):
    """A value that a widget does not take. Of several changes at once traitlets takes back all, but for its own errors only."""


def refusing(check: Callable[[Any, Bunch], Value]) -> Callable[[Any, Bunch], Value]:
    """Turn the InputError of a validator into a RefusedError."""

    @wraps(check)
    def checked(widget: Any, proposal: Bunch) -> Value:
        try:
            return check(widget, proposal)
        except InputError as error:
            raise RefusedError(str(error)) from None

    return checked
