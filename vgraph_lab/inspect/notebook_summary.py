"""What a notebook hands over at its end: a verdict in one line, figures in words, and plain data for the tour."""

from __future__ import annotations

import html
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any, ClassVar, Self

from vgraph_lab.errors import InputError

__all__ = ["NotebookSummary"]


class NotebookSummary(ABC):
    """Base of the summaries, which are dataclasses of plain data.

    Attributes:
        MIME: type under which a notebook's output carries the data.
        KIND: what is summed up, for errors.
    """

    MIME: ClassVar[str]
    KIND: ClassVar[str]

    @abstractmethod
    def verdict(self) -> str:
        """One deterministic line, the same on every device."""

    @abstractmethod
    def figures(self) -> dict[str, str]:
        """Name → figure in words."""

    def to_json(self) -> dict[str, Any]:
        """Plain data that :meth:`from_json` reads."""
        return asdict(self)  # type: ignore[call-overload, no-any-return]  # subclasses are dataclasses

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of :meth:`to_json`.

        Raises:
            InputError: keys are missing or unknown.
        """
        wanted = {field.name for field in fields(cls)}  # type: ignore[arg-type]  # subclasses are dataclasses
        if set(data) != wanted:
            raise InputError(f"not a {cls.KIND} summary: missing {sorted(wanted - set(data))}, unknown {sorted(set(data) - wanted)}.")
        return cls(**data)

    def __str__(self) -> str:
        width = max(map(len, self.figures()))
        return "\n".join([self.verdict(), *(f"{name.ljust(width)}  {words}" for name, words in self.figures().items())])

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, Any]:
        left = ' style="text-align: left"'
        cells = ((html.escape(name), html.escape(words)) for name, words in self.figures().items())
        rows = "".join(f"<tr><th{left}>{name}</th><td{left}>{words}</td></tr>" for name, words in cells)
        markup = f"<p><b>{html.escape(self.verdict())}</b></p><table><tbody>{rows}</tbody></table>"
        return {self.MIME: self.to_json(), "text/html": markup, "text/plain": str(self)}
