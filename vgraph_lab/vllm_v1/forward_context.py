"""What one forward pass carries besides its arguments: mode, descriptor, slices, attention metadata.

Counterpart of ``vllm.forward_context`` (0.25.1). vLLM keeps the context in a global that micro-batch threads swap when
they hand over; here each thread has its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

from vgraph_lab.errors import FallbackReason, InputError, LifecycleError

from .descriptor import BatchDescriptor
from .modes import CUDAGraphMode
from .ubatch import UBatchSlices

__all__ = ["ForwardContext", "get_forward_context", "is_forward_context_available", "override_forward_context", "set_forward_context"]


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """One forward pass, as wrappers and attention see it.

    Attributes:
        attn_metadata: of the whole batch, or a list with one item per micro-batch. Its tensors are real, not padded,
            where attention runs eagerly; in FULL mode a graph reads them, so they must be the same ones in each pass.
        cudagraph_runtime_mode: NONE, PIECEWISE or FULL.
        batch_descriptor: the padded batch, which names the graph; needed unless the mode is NONE.
        ubatch_slices: how the batch is split; None if it is not.
        num_tokens: real tokens of the batch; None if nobody counts (warm-up, capture).
        num_tokens_across_dp: tokens of each data-parallel rank, padding included.
        fallback_reason: why a batch without a graph has none; wrappers count it. None: a pass that is not to be counted.
        is_counted: whether statistics count the pass; not a dummy one, which serves nobody.
        additional_kwargs: anything else that a model wants to find.

    Raises:
        InputError: the mode is not a runtime mode, it lacks a descriptor, or the descriptor is too small for the batch.
    """

    attn_metadata: Any = None
    cudagraph_runtime_mode: CUDAGraphMode = CUDAGraphMode.NONE
    batch_descriptor: BatchDescriptor | None = None
    ubatch_slices: UBatchSlices | None = None
    num_tokens: int | None = None
    num_tokens_across_dp: tuple[int, ...] | None = None
    fallback_reason: FallbackReason | None = None
    is_counted: bool = True
    additional_kwargs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        mode, batch = self.cudagraph_runtime_mode, self.batch_descriptor
        if not mode.is_valid_runtime_mode():
            raise InputError(f"a forward pass runs in a runtime mode, not in the pair {mode}. Accepted: NONE, PIECEWISE, FULL.")
        if mode and batch is None:
            raise InputError(f"a forward pass in mode {mode} needs a batch_descriptor to find its graph. Pass what dispatch() returned.")
        if batch is not None and self.num_tokens is not None and not 1 <= self.num_tokens <= batch.num_tokens:
            raise InputError(f"a batch of {self.num_tokens} tokens does not fit into {batch}. Dispatch again for this batch.")

    @property
    def runtime_key(self) -> BatchDescriptor | None:
        """The batch without its padding, by which statistics are kept; None if neither size nor descriptor is known."""
        batch = self.batch_descriptor
        if self.num_tokens is None or (batch is not None and batch.num_tokens == self.num_tokens):
            return batch
        return BatchDescriptor(self.num_tokens) if batch is None else replace(batch, num_tokens=self.num_tokens, num_reqs=None)


_current: ContextVar[ForwardContext | None] = ContextVar("forward_context", default=None)


def get_forward_context() -> ForwardContext:
    """The context of the forward pass that this thread is in.

    Raises:
        LifecycleError: it is in none.
    """
    context = _current.get()
    if context is None:
        raise LifecycleError("no forward pass is under way in this thread. Call the model inside `with set_forward_context(...)`.")
    return context


def is_forward_context_available() -> bool:
    """Whether this thread is in a forward pass."""
    return _current.get() is not None


@contextmanager
def override_forward_context(forward_context: ForwardContext | None) -> Iterator[None]:
    """Be in that forward pass for the block, or in none; afterwards in the former one again."""
    token = _current.set(forward_context)
    try:
        yield
    finally:
        _current.reset(token)


@contextmanager
def set_forward_context(attn_metadata: Any = None, **fields: Any) -> Iterator[ForwardContext]:
    """Begin a forward pass for the block.

    Args:
        attn_metadata: see :class:`ForwardContext`, like the other fields.

    Raises:
        InputError: fields contradict each other.
    """
    context = ForwardContext(attn_metadata, **fields)
    with override_forward_context(context):
        yield context
