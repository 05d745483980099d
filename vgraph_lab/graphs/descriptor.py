"""The shape key of a graph, and of a call. One type and one ``__hash__`` serve capture, lookup and statistics alike."""

from __future__ import annotations

from dataclasses import dataclass, fields

from vgraph_lab.errors import InputError

__all__ = ["Descriptor"]


@dataclass(frozen=True, slots=True)
class Descriptor:
    """Shape key of one graph inside one Target; the runtime key of a call has the same type.

    A Routine that needs more than these fields subclasses it with further frozen, hashable fields.

    Attributes:
        batch_size: rows.
        frames: codec frames per row (or whatever unit the Routine counts in).
        state: the request state that the graph serves; empty if there is only one.
    """

    batch_size: int
    frames: int
    state: str = ""

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.frames < 1:
            raise InputError(f"a Descriptor needs batch_size ≥ 1 and frames ≥ 1, got {self.batch_size} and {self.frames}.")

    @property
    def work(self) -> int:
        """How large the graph is; captures run from the largest to the smallest, so that small graphs reuse its memory."""
        return self.batch_size * self.frames

    def __str__(self) -> str:
        extra = [str(getattr(self, f.name)) for f in fields(self)[2:] if getattr(self, f.name) != ""]
        return "·".join([f"B{self.batch_size}×T{self.frames}", *extra])
