"""Every exception that this package raises on purpose, and the closed set of fallback reasons.

Errors carry plain data (strings and numbers), never tensors: a traceback that a notebook keeps alive must not keep
device memory alive with it.

    VGraphLabError
    ├── ConfigError            a setting is unknown, malformed or out of range
    ├── CheckpointError        a checkpoint folder cannot be read
    ├── CodesError             a file of codes cannot be read
    ├── InputError             one call's input is not acceptable; nothing was written
    ├── BackendError           this machine cannot run the requested graph backend
    ├── CaptureError           a graph could not be captured
    │   └── CaptureRefusedError    an operation inside the captured function cannot live in a graph
    ├── ReplayError            a captured graph cannot be replayed
    │   └── ForkedProcessError     the replaying process is a fork of the capturing one
    ├── BorrowedOutputError    a borrowed output was used after the call that invalidated it
    ├── RankLostError          data-parallel ranks did not take part in a step
    ├── UBatchError            micro-batches of a step cannot go on together
    ├── RequestError           one request of a batch cannot be served; the others are
    ├── LifecycleError         a step was asked for in a state that does not allow it
    ├── OutOfBudgetError       a graph does not fit into ``max_memory_bytes`` (strict mode)
    └── MissingExtraError      an optional dependency is not installed
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from enum import StrEnum

__all__ = [
    "BackendError",
    "BorrowedOutputError",
    "CaptureError",
    "CaptureRefusedError",
    "CheckpointError",
    "CodesError",
    "ConfigError",
    "FallbackReason",
    "ForkedProcessError",
    "FormError",
    "InputError",
    "LifecycleError",
    "MissingExtraError",
    "OutOfBudgetError",
    "RankLostError",
    "ReplayError",
    "RequestError",
    "RequestErrorKind",
    "UBatchError",
    "VGraphLabError",
    "did_you_mean",
    "install_command",
]


class FallbackReason(StrEnum):
    """Why a valid call ran eager. The set is closed: statistics, reports and colours rely on it."""

    NO_GRAPH = "no_graph"  # the Target has no graph at all and none is promised
    SHAPE_NOT_COVERED = "shape_not_covered"  # no Descriptor is large enough for this batch or these frames
    STATE_NOT_COVERED = "state_not_covered"  # no Descriptor exists for this request state
    DISABLED = "disabled"  # graphs are switched off for the Target or the stage
    FAILED_DESCRIPTOR = "failed_descriptor"  # the Descriptor's capture failed before; it is not tried again
    OVER_BUDGET = "over_budget"  # the Descriptor's graph did not fit into max_memory_bytes
    CAPACITY = "capacity"  # the cap on lazily captured graphs is reached
    DECLINED = "declined"  # the Routine declined to make a Descriptor for this runtime key
    NESTED_CAPTURE = "nested_capture"  # the calling stream is itself being captured
    NOT_READY = "not_ready"  # another thread is capturing lazily; graphs are not available to this call


class VGraphLabError(Exception):
    """Base of every deliberate error of this package."""


class ConfigError(VGraphLabError, ValueError):
    """A setting is unknown, malformed or out of range. The message names the path of the key."""


class CheckpointError(VGraphLabError, ValueError):
    """A checkpoint folder cannot be read: missing files, wrong tensors, or a format that is refused."""


class CodesError(VGraphLabError, ValueError):
    """A file of codec codes cannot be read, or its content is not codes."""


class FormError(VGraphLabError, RuntimeError):
    """A form of a step cannot run here; another one takes its place."""


class InputError(VGraphLabError, ValueError):
    """A call's input is not acceptable. Raised before anything is written, so all state stays valid."""


class BackendError(VGraphLabError, RuntimeError):
    """The requested graph backend cannot run on this machine."""


class CaptureError(VGraphLabError, RuntimeError):
    """A graph could not be captured. Pool, buffers and earlier graphs are as they were."""


class CaptureRefusedError(CaptureError):
    """An operation inside the captured function cannot live in a graph.

    Attributes:
        operation: the operation as the user would recognise it, e.g. ``aten.nonzero.default`` or ``Tensor.item()``.
        why: the rule it breaks.
        where: ``file:line in function: source`` of the user's line.
    """

    def __init__(self, operation: str, why: str, where: str, hint: str = "") -> None:
        self.operation, self.why, self.where, self.hint = operation, why, where, hint
        super().__init__(f"{operation} cannot be captured: {why}.\n  at {where}" + (f"\n  try: {hint}" if hint else ""))


class ReplayError(VGraphLabError, RuntimeError):
    """A captured graph cannot be replayed, or its result is not what was captured (another structure or shape)."""


class ForkedProcessError(ReplayError):
    """A forked child asked for a replay. Device contexts do not survive a fork; capture again in the child."""


class BorrowedOutputError(VGraphLabError, RuntimeError):
    """A borrowed output (``clone_output=False``) was used after a later call had overwritten it."""


class RankLostError(VGraphLabError, RuntimeError):
    """Data-parallel ranks did not take part in a step, so that the others cannot run it.

    Attributes:
        ranks: those that are missing, within the group; empty if all answered and the exchange failed nevertheless.
    """

    def __init__(self, ranks: Iterable[int], message: str) -> None:
        self.ranks = tuple(ranks)
        super().__init__(message)


class UBatchError(VGraphLabError, RuntimeError):
    """The micro-batches of a step cannot go on together: one has failed, or keeps its turn for too long.

    Attributes:
        ubatch: the one at fault; None if it is the step's caller.
    """

    def __init__(self, ubatch: int | None, message: str) -> None:
        self.ubatch = ubatch
        super().__init__(message)


class RequestErrorKind(StrEnum):
    """Why one request of a batch was not served."""

    INVALID_INPUT = "invalid_input"  # its chunk is not acceptable; the request has failed
    DUPLICATE = "duplicate"  # two chunks of one request came in one batch; the request has failed
    NO_FREE_SLOT = "no_free_slot"  # max_num_seqs requests are live already; the request has failed
    UNKNOWN = "unknown"  # an end came for a request that never began
    FINISHED = "finished"  # a chunk came after the last one
    ABORTED = "aborted"  # a chunk came after the request was aborted
    FAILED_BEFORE = "failed_before"  # an earlier chunk failed; the message repeats why


class RequestError(VGraphLabError, ValueError):
    """One request of a batch cannot be served. It stands in the result in place of samples and is not raised.

    Attributes:
        request_id: the request.
        kind: why, as a closed set.
    """

    def __init__(self, request_id: str, kind: RequestErrorKind, message: str) -> None:
        self.request_id, self.kind = request_id, kind
        super().__init__(f"request {request_id!r}: {message}")


class LifecycleError(VGraphLabError, RuntimeError):
    """A step was asked for in a state that does not allow it. The message names the state and the next legal step."""


class OutOfBudgetError(VGraphLabError, RuntimeError):
    """A graph does not fit into ``max_memory_bytes``; raised in strict mode only, otherwise counted as a reason."""


class MissingExtraError(VGraphLabError, ImportError):
    """An optional dependency is missing. The message is the command that installs it."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs {package}, which is not installed. In a checkout of vgraph_lab: {install_command(extra)}")


def install_command(extra: str) -> str:
    """The command that installs an extra from a checkout."""
    return f"pip install -e '.[{extra}]'"


def did_you_mean(given: str, accepted: Iterable[str], *, count: int = 1) -> str:
    """`` Did you mean 'x'?`` for the nearest accepted names, or an empty string if none is near."""
    near = difflib.get_close_matches(given, list(accepted), n=count, cutoff=0.6)
    return f" Did you mean {' or '.join(repr(n) for n in near)}?" if near else ""
