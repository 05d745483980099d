"""Python literals out of log lines: bounded, and never evaluated."""

from __future__ import annotations

import ast

from .records import MalformedError

__all__ = ["MAX_LITERAL_CHARS", "counter_entries"]

MAX_LITERAL_CHARS = 65_536


def counter_entries(name: str, text: str) -> list[tuple[object, int]]:
    """``Counter.most_common()`` as it prints: a list of (key, count).

    Args:
        name: what the list is called, for messages.
        text: the literal, alone.

    Raises:
        MalformedError: the text is cut, too long, or no such list.
    """
    if len(text) > MAX_LITERAL_CHARS:
        raise MalformedError(f"{name} is longer than {MAX_LITERAL_CHARS} characters")
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
        raise MalformedError(f"{name} is cut or damaged") from error
    if not isinstance(value, list) or not all(_is_entry(entry) for entry in value):
        raise MalformedError(f"{name} is not a list of (key, count)")
    keys = [key for key, _ in value]
    if len(set(map(repr, keys))) < len(keys):
        raise MalformedError(f"{name} names a key twice")
    return value


def _is_entry(entry: object) -> bool:
    return isinstance(entry, tuple) and len(entry) == 2 and type(entry[1]) is int and entry[1] >= 0
