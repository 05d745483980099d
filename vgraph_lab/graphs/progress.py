"""Where a capture stands."""

from __future__ import annotations

from dataclasses import dataclass

from .descriptor import Descriptor

__all__ = ["CaptureProgress"]


@dataclass(frozen=True, slots=True)
class CaptureProgress:
    """Where a capture stands, given to the progress callback before each Descriptor and once at the end.

    At the end ``done == total`` and there is no current Descriptor.
    """

    done: int
    total: int
    target_id: str | None
    descriptor: Descriptor | None

    def __str__(self) -> str:
        return f"{self.done}/{self.total}" + (f" {self.target_id} {self.descriptor}" if self.descriptor else " done")
