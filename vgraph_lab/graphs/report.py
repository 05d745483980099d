"""What a capture achieved: one line per requested Descriptor, and totals that cannot hide a failure."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from vgraph_lab.errors import FallbackReason

from .descriptor import Descriptor
from .entry import CaptureCost, Rejection

__all__ = ["CaptureOutcome", "CaptureProgress", "CaptureReport"]

_HEADER = ("target", "descriptor", "status", "buffers MiB", "pool + MiB", "warm-up s", "capture s", "nodes", "why")
Status = Literal["captured", "failed", "skipped"]


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


@dataclass(frozen=True, slots=True)
class CaptureOutcome:
    """What became of one requested Descriptor: a cost if it was captured, otherwise a rejection."""

    target_id: str
    descriptor: Descriptor
    cost: CaptureCost | None = None
    rejection: Rejection | None = None

    @property
    def status(self) -> Status:
        """``failed`` for errors, ``skipped`` for what policy left out."""
        if self.rejection is None:
            return "captured"
        return "failed" if self.rejection.reason is FallbackReason.FAILED_DESCRIPTOR else "skipped"


@dataclass(frozen=True)
class CaptureReport:
    """The result of one start-up capture.

    Attributes:
        device: where the graphs are; its type names the backend.
        outcomes: one per requested Descriptor, in capture order (largest first within a Target).
        eager_targets: Targets that stay eager, with the reason in words.
        seconds: wall time of the whole capture.
        static_buffer_bytes: static buffers of all graphs.
        pool_reserved_bytes: what the pool holds now.
        free_bytes: free device memory now.
    """

    device: str
    outcomes: Sequence[CaptureOutcome]
    eager_targets: dict[str, str]
    seconds: float
    static_buffer_bytes: int
    pool_reserved_bytes: int
    free_bytes: int

    def _count(self, status: Status) -> int:
        return sum(o.status == status for o in self.outcomes)

    @property
    def requested(self) -> int:
        """Descriptors declared by all Targets."""
        return len(self.outcomes)

    @property
    def captured(self) -> int:
        """Graphs that exist."""
        return self._count("captured")

    @property
    def failed(self) -> int:
        """Descriptors whose capture raised."""
        return self._count("failed")

    @property
    def skipped(self) -> int:
        """Descriptors that policy left out (switched off, over budget)."""
        return self._count("skipped")

    @property
    def is_degraded(self) -> bool:
        """Whether anything that was asked for is missing."""
        return self.failed > 0 or any(o.rejection and o.rejection.reason is FallbackReason.OVER_BUDGET for o in self.outcomes)

    @property
    def bytes(self) -> int:
        """What counts against ``max_memory_bytes``: static buffers plus pool."""
        return self.static_buffer_bytes + self.pool_reserved_bytes

    def headline(self) -> str:
        """One line with all totals."""
        state = "DEGRADED: " if self.is_degraded else ""
        return (
            f"{state}{self.captured} of {self.requested} graphs captured on {self.device} in {self.seconds:.2f} s "
            f"({self.failed} failed, {self.skipped} skipped); "
            f"{_mib(self.static_buffer_bytes)} MiB static buffers + {_mib(self.pool_reserved_bytes)} MiB pool"
        )

    def _rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = [_HEADER]
        for o in self.outcomes:
            figures = ("", "", "", "", "")
            if o.cost:
                memory = (_mib(o.cost.static_buffer_bytes), _mib(o.cost.pool_delta_bytes))
                figures = (*memory, f"{o.cost.warmup_s:.3f}", f"{o.cost.capture_s:.3f}", str(sum(o.cost.node_counts.values())))
            why = f"{o.rejection.reason}: {o.rejection.detail}" if o.rejection else ""
            rows.append((o.target_id, str(o.descriptor), o.status, *figures, why))
        return rows if any(o.rejection for o in self.outcomes) else [row[:-1] for row in rows]

    _NOTE = "pool + is marginal in capture order: graphs of one pool share memory"

    def __str__(self) -> str:
        rows = [[" ".join(cell.split()) for cell in row] for row in self._rows()]
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        eager = [f"{target} stays eager: {why}" for target, why in self.eager_targets.items()]
        return "\n".join([self.headline(), "", *lines, f"({self._NOTE})", *eager])

    def _repr_html_(self) -> str:
        def row(cells: tuple[str, ...], tag: str) -> str:
            return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

        header, *rows = self._rows()
        table = f"<thead>{row(header, 'th')}</thead><tbody>{''.join(row(r, 'td') for r in rows)}</tbody>"
        eager = "".join(f"<p>{html.escape(t)} stays eager: {html.escape(why)}</p>" for t, why in self.eager_targets.items())
        return f"<p><b>{html.escape(self.headline())}</b></p><table>{table}</table><p>{self._NOTE}</p>{eager}"


def _mib(count: int) -> str:
    return f"{count / 2**20:,.2f}"
