"""When graphs may be captured. Counterpart of ``vllm.compilation.monitor`` (0.25.1).

Off at first (vLLM's switch is on until its first capture is over): a runner allows captures for its start-up, to its own thread and
the threads of its micro-batches. A batch that would need a capture while requests are served is an error then, not a pause of seconds
and a growing pool; also while another runner starts in another thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from vgraph_lab.errors import LifecycleError

__all__ = ["cudagraph_capturing", "set_cudagraph_capturing_enabled", "validate_cudagraph_capturing_enabled"]

_enabled = False
_blocks: ContextVar[int] = ContextVar("cudagraph_capturing", default=0)  # that the caller is in; they may end in any order


def set_cudagraph_capturing_enabled(enabled: bool) -> None:
    """Allow captures in the whole process, or only inside of :func:`cudagraph_capturing`."""
    global _enabled
    _enabled = enabled


@contextmanager
def cudagraph_capturing() -> Iterator[None]:
    """Allow captures to the caller for the block. Its micro-batches inherit that; other threads do not."""
    _blocks.set(_blocks.get() + 1)
    try:
        yield
    finally:
        _blocks.set(_blocks.get() - 1)


def validate_cudagraph_capturing_enabled(what: str = "a graph") -> None:
    """Call before a capture.

    Args:
        what: would be captured, for the message.

    Raises:
        LifecycleError: captures are not allowed now.
    """
    if not _enabled and not _blocks.get():
        raise LifecycleError(
            f"{what} would be captured now, while capturing is disabled: the dispatcher named a shape that start-up did not capture. "
            "Capture it at start-up, or dispatch by the captured sizes. set_cudagraph_capturing_enabled(True) allows captures."
        )
