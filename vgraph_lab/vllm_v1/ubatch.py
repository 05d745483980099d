"""Micro-batches: which part of a batch each of them gets.

Counterpart of ``vllm.v1.worker.ubatch_utils`` (0.25.1). All micro-batches but the last have exactly
``num_tokens_padded // num_ubatches`` tokens; the last has the rest, padding included. A cut may go through a request,
which then belongs to both sides::

    requests        0 0 0 0 0 0 1 2 2 2          (6, 1 and 3 tokens; padded to 12, 2 micro-batches)
    micro-batch 0   0 0 0 0 0 0                  requests 0:1, tokens 0:6
    micro-batch 1               1 2 2 2 . .      requests 1:3, tokens 6:10; padded: tokens 6:12
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from vgraph_lab.errors import InputError

from .descriptor import BatchDescriptor
from .parallel import ParallelConfig

__all__ = [
    "UBatchSlice",
    "UBatchSlices",
    "check_ubatch_thresholds",
    "is_captured_in_ubatches",
    "is_last_ubatch_empty",
    "maybe_create_ubatch_slices",
]


@dataclass(frozen=True, slots=True)
class UBatchSlice:
    """The part of a batch that one micro-batch computes: requests and tokens, both as half-open ranges.

    A request that lies on a cut is in both micro-batches; its tokens are in one of them each.
    """

    request_slice: slice
    token_slice: slice

    def is_empty(self) -> bool:
        """Whether there is nothing to compute."""
        return bool(self.request_slice.start == self.request_slice.stop or self.token_slice.start == self.token_slice.stop)

    @property
    def num_tokens(self) -> int:
        """Tokens; negative if the batch ended before this part begins (see :func:`is_last_ubatch_empty`)."""
        return int(self.token_slice.stop - self.token_slice.start)

    @property
    def num_reqs(self) -> int:
        """Requests, whole or in part."""
        return int(self.request_slice.stop - self.request_slice.start)

    def __str__(self) -> str:
        requests, tokens = self.request_slice, self.token_slice
        return f"requests {requests.start}:{requests.stop}, tokens {tokens.start}:{tokens.stop}"


UBatchSlices: TypeAlias = list[UBatchSlice]


def check_ubatch_thresholds(config: ParallelConfig, num_tokens: int, uniform_decode: bool) -> bool:
    """Whether a batch of this kind is large enough to be split; a threshold itself is."""
    threshold = config.dbo_decode_token_threshold if uniform_decode else config.dbo_prefill_token_threshold
    return config.use_ubatching and num_tokens >= threshold


def is_captured_in_ubatches(config: ParallelConfig, shape: BatchDescriptor) -> bool:
    """Whether the FULL graph of a shape holds micro-batches. Each shape has one graph, so the other kind of batch runs eager there."""
    return shape.num_tokens >= config.num_ubatches and check_ubatch_thresholds(config, shape.num_tokens, shape.uniform)


def is_last_ubatch_empty(orig_num_tokens: int, padded_num_tokens: int, num_ubatches: int) -> bool:
    """Whether the last part would hold padding only: a batch split like that wastes a whole micro-batch, so it is not.

    Args:
        orig_num_tokens: real tokens of the batch; across ranks, of the smallest one.
        padded_num_tokens: tokens with padding; across ranks, of the largest one.
        num_ubatches: parts.
    """
    return (padded_num_tokens // num_ubatches) * (num_ubatches - 1) >= orig_num_tokens


def maybe_create_ubatch_slices(
    should_ubatch: bool,
    num_scheduled_tokens: NDArray[np.integer] | Sequence[int],
    num_tokens_padded: int,
    num_reqs_padded: int,
    num_ubatches: int,
    split_point: int | None = None,
) -> tuple[UBatchSlices | None, UBatchSlices | None]:
    """Cut a batch into micro-batches of equal padded size.

    As upstream, it does not refuse a batch whose last part is empty: callers ask :func:`is_last_ubatch_empty` first. Without
    that, parts reach beyond the last real token. Each but the last keeps its whole range of tokens and names one request after
    the last real one, so it does not count as empty even if it is all padding. The last part has no request; its real slice stops
    at the last real token, which is at its start or before it (``num_tokens`` is zero or negative).

    Args:
        should_ubatch: whether to cut at all.
        num_scheduled_tokens: tokens of each request, whole numbers from 1 [num_reqs].
        num_tokens_padded: tokens of the batch with padding.
        num_reqs_padded: requests of the batch with padding.
        num_ubatches: parts.
        split_point: tokens of each part but the last, by default ``num_tokens_padded // num_ubatches``.

    Returns:
        The real slices, and the same with the last one stretched to the padded batch; twice None without a cut.

    Raises:
        InputError: a count is out of range; the padded batch is smaller than the real one, or than its parts.
    """
    if not should_ubatch:
        return None, None
    tokens = np.asarray(num_scheduled_tokens)
    _check_batch(tokens, num_tokens_padded, num_reqs_padded, num_ubatches)
    step = num_tokens_padded // num_ubatches if split_point is None else split_point
    if step < 1 or step * (num_ubatches - 1) >= num_tokens_padded:
        raise InputError(
            f"{num_ubatches} micro-batches of {step} tokens each do not fit into {num_tokens_padded}, the last one would have none. "
            "Split into fewer parts, or do not split so small a batch."
        )
    ends = np.concatenate([[0], np.cumsum(tokens)])  # where each request begins, and where the last one ends
    num_tokens = int(ends[-1])
    cuts = [step * part for part in range(num_ubatches)] + [num_tokens]
    slices = [UBatchSlice(_requests_in(ends, start, stop), slice(start, stop)) for start, stop in pairwise(cuts)]
    last = UBatchSlice(slice(slices[-1].request_slice.start, num_reqs_padded), slice(cuts[-2], num_tokens_padded))
    return slices, [*slices[:-1], last]


def _requests_in(ends: NDArray[np.integer], start: int, stop: int) -> slice:
    """The requests with tokens in [start, stop): from the one that holds ``start`` to the one that holds ``stop - 1``."""
    first = np.searchsorted(ends, start, side="right") - 1
    after = np.searchsorted(ends, stop, side="left")
    return slice(int(first), int(after))


def _check_batch(tokens: NDArray[np.integer], num_tokens_padded: int, num_reqs_padded: int, num_ubatches: int) -> None:
    if num_ubatches < 2:
        raise InputError(f"num_ubatches={num_ubatches}: a batch is cut into two parts or more. Pass should_ubatch=False for one.")
    if tokens.ndim != 1 or not tokens.size or not np.issubdtype(tokens.dtype, np.integer) or tokens.min() < 1:
        raise InputError(f"num_scheduled_tokens must be whole numbers from 1, one per request, got {tokens.tolist()}.")
    if num_tokens_padded < tokens.sum() or num_reqs_padded < tokens.size:
        raise InputError(
            f"a batch of {tokens.size} requests and {tokens.sum()} tokens was padded to {num_reqs_padded} and {num_tokens_padded}: "
            "padding only adds."
        )
