"""Work that other threads do for a thread: under its conditions, and as part of the capture that it is in.

Gradient mode, autocast and dispatch modes belong to a thread, and a new thread has none of them. So does a CPU capture: the tape
that records it sees its own thread's calls only. A thread that has others do a part of its work therefore hands all of it over::

    conditions = thread_conditions()       # in the thread whose work it is
    ...
    with conditions():                     # in each of the others
        part()

On CUDA a capture is a matter of streams, not of threads: whoever launches on a captured stream launches into the graph. There, only
the modes (which an audited warm-up has, too) are handed over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from .audit import CheckedMode
from .cpu.session import is_capturing, joined_session
from .host_guard import host_access_refused
from .rules import no_refusal_swallowed

__all__ = ["thread_conditions"]

_DEVICE_TYPES = ("cpu", "cuda")


def thread_conditions() -> Callable[[], AbstractContextManager[None]]:
    """What holds in the calling thread, as a context for other threads, which may enter it while the caller's own one lasts.

    Handed over are gradient and inference mode, autocast, and the tape or audit of a capture with its rules. **Threads take turns**:
    while one of them runs operations, all others, the caller included, wait. A recording has one order, and nothing here makes one.

    A refused operation raises in the thread that runs it. That thread's context raises it once more at its end if it was caught
    inside; whoever waits for the thread has to pass the error on.
    """
    has_grad, is_inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    caches_casts = torch.is_autocast_cache_enabled()
    casts = [(kind, torch.get_autocast_dtype(kind)) for kind in _DEVICE_TYPES if torch.is_autocast_enabled(kind)]
    modes = [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, CheckedMode)]
    in_session = is_capturing()

    @contextmanager
    def conditions() -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(is_inference))
            stack.enter_context(torch.set_grad_enabled(has_grad))
            stack.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
            torch.set_autocast_cache_enabled(caches_casts)
            for kind, dtype in casts:
                stack.enter_context(torch.autocast(kind, dtype))
            if in_session:
                stack.enter_context(joined_session())
            if modes:
                stack.enter_context(no_refusal_swallowed())
                stack.enter_context(host_access_refused())
            for mode in modes:
                stack.enter_context(mode)
            yield

    return conditions
