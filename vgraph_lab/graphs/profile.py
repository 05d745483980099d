"""What a capture will take, measured in a throwaway pool before anything is promised."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from vgraph_lab.config import VocoderGraphSettings
from vgraph_lab.errors import LifecycleError

from .backends.base import GraphBackend
from .descriptor import Descriptor
from .entry import CaptureCost, Rejection
from .progress import CaptureProgress
from .store import GraphStore
from .table import as_html, as_text, mib
from .target import Target

__all__ = ["MemoryProfile", "ProfileLine", "measure"]

logger = logging.getLogger(__name__)

_HEADER = ("target", "descriptor", "buffers MiB", "pool + MiB", "total MiB", "failure")
_NOTE = "in capture order: pool + is marginal, graphs of one pool share memory"


@dataclass(frozen=True, slots=True)
class ProfileLine:
    """What one Descriptor took in the throwaway pool; or why it could not be captured there.

    Attributes:
        target_id: its Target.
        descriptor: the shape.
        static_buffer_bytes: its static buffers, without what earlier Descriptors had brought.
        pool_delta_bytes: by how much the pool grew for it.
        failure: why there is no figure; empty if there is one.
    """

    target_id: str
    descriptor: Descriptor
    static_buffer_bytes: int = 0
    pool_delta_bytes: int = 0
    failure: str = ""

    @property
    def bytes(self) -> int:
        """What the Manager will count against ``max_memory_bytes`` for it."""
        return self.static_buffer_bytes + self.pool_delta_bytes


@dataclass(frozen=True)
class MemoryProfile:
    """What start-up capture will take.

    Attributes:
        device: where it was measured.
        lines: one per Descriptor of every enabled Target, in capture order.
        max_memory_bytes: the limit of the settings; it did not limit the profile.
        seconds: wall time of profiling.
    """

    device: str
    lines: Sequence[ProfileLine]
    max_memory_bytes: int | None
    seconds: float

    @property
    def graphs(self) -> set[tuple[str, Descriptor]]:
        """Target ids and Descriptors that were captured."""
        return {(line.target_id, line.descriptor) for line in self.lines if not line.failure}

    @property
    def static_buffer_bytes(self) -> int:
        """Static buffers of all graphs; what several share is counted once."""
        return sum(line.static_buffer_bytes for line in self.lines)

    @property
    def pool_reserved_bytes(self) -> int:
        """What the pool held once every graph was captured."""
        return sum(line.pool_delta_bytes for line in self.lines)

    @property
    def bytes(self) -> int:
        """What will count against ``max_memory_bytes``: static buffers plus pool."""
        return self.static_buffer_bytes + self.pool_reserved_bytes

    @property
    def fits(self) -> bool | None:
        """Whether everything fits into ``max_memory_bytes``; None without a limit."""
        return None if self.max_memory_bytes is None else self.bytes <= self.max_memory_bytes

    def headline(self) -> str:
        """One line with the totals and the verdict."""
        failed = len(self.lines) - len(self.graphs)
        verdict = "no limit is set"
        if self.max_memory_bytes is not None:
            verdict = f"max_memory_bytes is {mib(self.max_memory_bytes)} MiB: "
            verdict += "fits" if self.fits else f"{mib(self.bytes - self.max_memory_bytes)} MiB too little"
        return (
            f"{len(self.graphs)} of {len(self.lines)} graphs profiled on {self.device} in {self.seconds:.2f} s ({failed} failed): "
            f"{mib(self.static_buffer_bytes)} MiB static buffers + {mib(self.pool_reserved_bytes)} MiB pool; {verdict}"
        )

    def _rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = [_HEADER]
        total = 0
        for line in self.lines:
            total += line.bytes
            figures = ("", "", "") if line.failure else (mib(line.static_buffer_bytes), mib(line.pool_delta_bytes), mib(total))
            rows.append((line.target_id, str(line.descriptor), *figures, line.failure))
        return rows if any(line.failure for line in self.lines) else [row[:-1] for row in rows]

    def __str__(self) -> str:
        return as_text(self.headline(), self._rows(), f"({_NOTE})")

    def _repr_html_(self) -> str:
        return as_html(self.headline(), self._rows(), _NOTE)


def measure(
    backend: GraphBackend,
    settings: VocoderGraphSettings,
    plan: Sequence[tuple[Target[Any], Descriptor]],
    progress: Callable[[CaptureProgress], None] | None = None,
) -> MemoryProfile:
    """Capture a plan into a throwaway pool, read what it took, and release all of it.

    Buffers and graphs are those of a capture, kept until the last one is there; only the warm-ups are fewer, which changes
    no figure.

    Raises:
        LifecycleError: a graph could not be reset afterwards.
        VGraphLabError: in strict mode, the first failure.
    """
    start = perf_counter()
    store = GraphStore(backend, settings.model_copy(update={"max_memory_bytes": None, "num_warmups": 1}))
    for target, _ in plan:
        store.add_target(target.target_id)
    lines: list[ProfileLine] = []
    errors: list[Exception] = []
    try:
        for done, (target, descriptor) in enumerate(plan):
            if progress:
                progress(CaptureProgress(done, len(plan), target.target_id, descriptor))
            result = store.try_capture(target, descriptor, lazy=False, strict=settings.strict)
            lines.append(_line(target.target_id, descriptor, result if isinstance(result, Rejection) else result.cost))
            del result
    finally:
        errors += store.retire()
        for error in errors:
            logger.warning("a profiled graph could not be reset: %s", error)
    if errors:
        raise LifecycleError(f"{len(errors)} profiled graphs could not be reset. First: {errors[0]}") from errors[0]
    if progress:
        progress(CaptureProgress(len(plan), len(plan), None, None))
    return MemoryProfile(str(backend.device), tuple(lines), settings.max_memory_bytes, perf_counter() - start)


def _line(target_id: str, descriptor: Descriptor, found: CaptureCost | Rejection) -> ProfileLine:
    if isinstance(found, Rejection):
        return ProfileLine(target_id, descriptor, failure=found.detail)
    return ProfileLine(target_id, descriptor, found.static_buffer_bytes, found.pool_delta_bytes)
