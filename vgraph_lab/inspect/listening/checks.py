"""Checks that audio sets and listening tests have in common. Numbers may be NumPy's, too; truth values are none."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any

from vgraph_lab.errors import InputError

__all__ = ["checked_names", "checked_seconds", "checked_whole", "is_name", "is_number", "is_text", "is_whole"]

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def is_text(given: object) -> bool:
    """Whether this is text that can be saved and printed; UTF-8 has no half characters (lone surrogates)."""
    return isinstance(given, str) and not _LONE_SURROGATE.search(given)


def is_name(given: object) -> bool:
    """Whether this is text with something to read in it."""
    return is_text(given) and bool(str(given).strip())


def is_whole(given: object) -> bool:
    """Whether this is a whole number."""
    return isinstance(given, Integral) and not isinstance(given, bool)


def is_number(given: object) -> bool:
    """Whether this is a real number; NaN and infinity are some."""
    return isinstance(given, Real) and not isinstance(given, bool)


def checked_names(what: str, names: Iterable[str]) -> tuple[str, ...]:
    """Names as a tuple.

    Raises:
        InputError: none, one of them twice, an empty one, half a character in one, or no sequence of names.
    """
    found = tuple(names) if isinstance(names, Iterable) and not isinstance(names, str) else None
    if found is None or not all(map(is_name, found)):
        raise InputError(f"{what} are {names!r}; a sequence of names is needed.")
    if not found or len(set(found)) < len(found):
        raise InputError(f"{what} are {list(found)}; at least one is needed, and none twice.")
    return found


def checked_whole(what: str, value: Any, least: int) -> int:
    """A whole number from ``least``.

    Raises:
        InputError: it is something else.
    """
    if not is_whole(value) or value < least:
        raise InputError(f"{what} is {value!r}; a whole number from {least} is needed.")
    return int(value)


def checked_seconds(seconds: Any) -> float | None:
    """A time, or None where none was measured.

    Raises:
        InputError: negative, NaN, infinite or no number.
    """
    if seconds is None:
        return None
    try:
        found = float(seconds) if is_number(seconds) else math.nan
    except OverflowError:  # whole numbers have no end
        found = math.inf
    if not 0 <= found < math.inf:
        raise InputError(f"seconds is {seconds!r}; a finite number from 0 is needed, or None where it was not measured.")
    return found
