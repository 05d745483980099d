"""When graphs may be captured. Counterpart of ``vllm.compilation.monitor`` (0.25.1).

The switch is one for the whole process and off at first (vLLM's is on until its first capture is over): the runner turns
it on for its capture and off again. A batch that would need a capture while requests are served is an error then, not a
pause of seconds and a growing pool.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from vgraph_lab.errors import LifecycleError

__all__ = ["cudagraph_capturing", "set_cudagraph_capturing_enabled", "validate_cudagraph_capturing_enabled"]

_enabled = False


def set_cudagraph_capturing_enabled(enabled: bool) -> None:
    """Allow captures, or forbid them."""
    global _enabled
    _enabled = enabled


@contextmanager
def cudagraph_capturing() -> Iterator[None]:
    """Allow captures for the block; afterwards it is as it was."""
    before = _enabled
    set_cudagraph_capturing_enabled(True)
    try:
        yield
    finally:
        set_cudagraph_capturing_enabled(before)


def validate_cudagraph_capturing_enabled(what: str = "a graph") -> None:
    """Call before a capture.

    Args:
        what: would be captured, for the message.

    Raises:
        LifecycleError: captures are not allowed now.
    """
    if not _enabled:
        raise LifecycleError(
            f"{what} would be captured now, while capturing is disabled: the dispatcher named a shape that start-up did not capture. "
            "Capture it at start-up, or dispatch by the captured sizes. set_cudagraph_capturing_enabled(True) allows captures."
        )
