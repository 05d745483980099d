"""What a capture achieved: one line per requested Descriptor, and totals that cannot hide a failure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from vgraph_lab.errors import FallbackReason

from .descriptor import Descriptor
from .entry import CaptureCost, Rejection
from .profile import MemoryProfile
from .progress import CaptureProgress
from .table import as_html, as_text, mib

__all__ = ["CaptureOutcome", "CaptureProgress", "CaptureReport"]

_HEADER = ("target", "descriptor", "status", "buffers MiB", "pool + MiB", "warm-up s", "capture s", "nodes", "why")
Status = Literal["captured", "failed", "skipped"]


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
        profile: what ``profile_memory`` had found before, if it was asked.
        notes: what the Routines say of their graphs, a line each.
    """

    device: str
    outcomes: Sequence[CaptureOutcome]
    eager_targets: dict[str, str]
    seconds: float
    static_buffer_bytes: int
    pool_reserved_bytes: int
    free_bytes: int
    profile: MemoryProfile | None = None
    notes: Sequence[str] = ()

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

    @property
    def profile_error(self) -> float | None:
        """By which share the profile was off: (estimated - measured) / measured. None without a profile of the same graphs."""
        if self.profile is None or not self.bytes or self.profile.graphs != self._graphs():
            return None
        return (self.profile.bytes - self.bytes) / self.bytes

    def _graphs(self) -> set[tuple[str, Descriptor]]:
        return {(o.target_id, o.descriptor) for o in self.outcomes if o.cost is not None}

    def headline(self) -> str:
        """One line with all totals."""
        state = "DEGRADED: " if self.is_degraded else ""
        return (
            f"{state}{self.captured} of {self.requested} graphs captured on {self.device} in {self.seconds:.2f} s "
            f"({self.failed} failed, {self.skipped} skipped); "
            f"{mib(self.static_buffer_bytes)} MiB static buffers + {mib(self.pool_reserved_bytes)} MiB pool" + self._comparison()
        )

    def _comparison(self) -> str:
        if self.profile is None:
            return ""
        error, graphs = self.profile_error, len(self.profile.graphs)
        told = f"for {graphs} graphs" if error is None else f"error {error:+.1%}"
        return f"; estimated {mib(self.profile.bytes)} MiB, measured {mib(self.bytes)} MiB ({told})"

    def _rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = [_HEADER]
        for o in self.outcomes:
            figures = ("", "", "", "", "")
            if o.cost:
                memory = (mib(o.cost.static_buffer_bytes), mib(o.cost.pool_delta_bytes))
                figures = (*memory, f"{o.cost.warmup_s:.3f}", f"{o.cost.capture_s:.3f}", str(sum(o.cost.node_counts.values())))
            why = f"{o.rejection.reason}: {o.rejection.detail}" if o.rejection else ""
            rows.append((o.target_id, str(o.descriptor), o.status, *figures, why))
        return rows if any(o.rejection for o in self.outcomes) else [row[:-1] for row in rows]

    _NOTE = "pool + is marginal in capture order: graphs of one pool share memory"

    def _more_lines(self) -> list[str]:
        return [*(f"{target} stays eager: {why}" for target, why in self.eager_targets.items()), *self.notes]

    def __str__(self) -> str:
        return as_text(self.headline(), self._rows(), f"({self._NOTE})", *self._more_lines())

    def _repr_html_(self) -> str:
        return as_html(self.headline(), self._rows(), self._NOTE, *self._more_lines())
