"""One CPU capture at a time in the whole process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from vgraph_lab.errors import CaptureError

__all__ = ["capture_session", "is_capturing", "joined_session"]

_slot = threading.Lock()
_thread: int | None = None
_joined: set[int] = set()  # threads that do a part of the capture


def is_capturing() -> bool:
    """Whether the calling thread is capturing, by itself or for another one."""
    thread = threading.get_ident()
    return _thread == thread or thread in _joined


@contextmanager
def capture_session() -> Iterator[None]:
    """Hold the process's only capture slot.

    Raises:
        CaptureError: it is taken, by this thread (a nested capture) or by another one.
    """
    global _thread
    if not _slot.acquire(blocking=False):
        if is_capturing():
            raise CaptureError("a capture cannot begin inside another one; capture the inner function before or after the outer one")
        raise CaptureError("another thread is capturing; captures run one at a time, so try again when it is done")
    try:
        _thread = threading.get_ident()
        yield
    finally:
        _thread = None
        _slot.release()


@contextmanager
def joined_session() -> Iterator[None]:
    """Do a part of the capture that another thread has begun and that outlasts the block.

    Raises:
        CaptureError: no capture is under way; the thread that asked for the part has given it up.
    """
    if _thread is None:
        raise CaptureError("the capture that this thread was to take part in is over")
    thread = threading.get_ident()
    _joined.add(thread)
    try:
        yield
    finally:
        _joined.discard(thread)
