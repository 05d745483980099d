"""What is compared: something that decodes streams chunk by chunk.

contender ─start(rows)─▶ streams ─prepare(codes)─▶ a call that decodes one chunk of each ─▶ samples by row
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from vgraph_lab.errors import VGraphLabError

__all__ = ["Contender", "NotRunError", "Streams"]


class NotRunError(VGraphLabError, RuntimeError):
    """A contender cannot be measured here; the message is the reason."""


class Streams(Protocol):
    """B streams that are decoded in step."""

    def prepare(self, codes: Tensor) -> Callable[[], Sequence[Tensor]]:
        """A call that decodes the next chunk of every stream.

        Args:
            codes: int64 [B, num_quantizers, n].

        Returns:
            Takes nothing, may be called more than once, and gives the samples of each row.
        """

    def close(self) -> None:
        """End the streams."""


class Contender(Protocol):
    """One way to decode streams, ready to be measured.

    Attributes:
        name: as in the record.
        what: in a few words.
        facts: capture, state and form, for the record.
    """

    name: str
    what: str
    facts: dict[str, Any]

    def start(self, rows: int) -> Streams:
        """Begin streams without a reference."""

    def close(self) -> None:
        """Release what it holds."""
