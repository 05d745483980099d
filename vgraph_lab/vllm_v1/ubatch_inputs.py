"""What each micro-batch gets of a batch, and how their results become the batch's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from vgraph_lab.errors import InputError

from .forward_context import ForwardContext
from .modes import CUDAGraphMode
from .paged_kv import AttentionMetadata, split_attn_metadata
from .ubatch import UBatchSlice, UBatchSlices

__all__ = ["concatenated", "sliced_forward_contexts", "sliced_inputs"]


def sliced_inputs(slices: UBatchSlices, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Arguments of each micro-batch: views of the batch's tensors, along tokens; anything else as it is.

    Tokens are the first dimension, or the last one (positions of several axes). A tensor without dimensions is a constant.

    Raises:
        InputError: a tensor has neither, or slices do not cover the batch from its first token to its last.
    """
    num_tokens = slices[-1].token_slice.stop
    cuts = [0, *(each.token_slice.stop for each in slices)]
    if any(
        (each.token_slice.start, each.token_slice.stop) != cut or each.num_tokens < 1
        for each, cut in zip(slices, pairwise(cuts), strict=True)
    ):
        told = "; ".join(map(str, slices))
        raise InputError(f"micro-batches must follow each other from token 0 and have tokens, got {told}. See is_last_ubatch_empty().")

    def part(value: Any, tokens: slice) -> Any:
        if not isinstance(value, Tensor) or not value.dim():
            return value
        if value.shape[0] == num_tokens:
            return value[tokens]
        if value.shape[-1] == num_tokens:
            return value[..., tokens]
        raise InputError(
            f"a tensor of shape {list(value.shape)} cannot be cut along {num_tokens} tokens: neither its first nor its last dimension "
            "counts them. Pass the model's inputs padded to the slices, and other tensors as its parameters or buffers."
        )

    found: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    for each in slices:
        tokens = each.token_slice
        found.append(tree_map(lambda value, tokens=tokens: part(value, tokens), (args, dict(kwargs))))
    return found


def sliced_forward_contexts(context: ForwardContext) -> list[ForwardContext]:
    """The forward context of each micro-batch: its own metadata, mode NONE (a graph holds all of them or none), sizes of its own.

    Raises:
        InputError: metadata is missing for one, a slice holds padding only, or the ranks run other sizes.
    """
    slices, across = context.ubatch_slices or [], context.num_tokens_across_dp
    if across is None or len(across) < 2 or len(set(across)) != 1 or across[0] != slices[-1].token_slice.stop:
        raise InputError(
            f"micro-batches of {slices[-1].token_slice.stop} tokens with num_tokens_across_dp={across}: they hide the exchange between two "
            "data-parallel ranks or more, all padded to one size. Run batches as determine_batch_execution_and_padding() says."
        )
    metadata = context.attn_metadata
    parts = metadata if isinstance(metadata, list) else _split(slices, metadata)
    if len(parts) != len(slices):
        raise InputError(f"attn_metadata has {len(parts)} items for {len(slices)} micro-batches; each has its own.")
    return [
        replace(
            context,
            attn_metadata=part,
            cudagraph_runtime_mode=CUDAGraphMode.NONE,
            batch_descriptor=None,
            ubatch_slices=None,
            num_tokens=None,
            num_tokens_across_dp=(each.num_tokens,) * len(across),
            fallback_reason=None,
            additional_kwargs=dict(context.additional_kwargs),
        )
        for each, part in zip(slices, parts, strict=True)
    ]


def concatenated(slices: UBatchSlices, outputs: Sequence[Any]) -> Any:
    """The batch's result: tensors put together along tokens, their first dimension.

    Raises:
        InputError: a tensor does not have its micro-batch's tokens there, or the results are built differently.
    """
    flat = [tree_flatten(output) for output in outputs]
    spec = flat[0][1]
    if any(other != spec for _, other in flat):
        raise InputError(f"micro-batches returned different structures, {spec} first. A model's result has one structure.")
    return tree_unflatten([_put_together(slices, column) for column in zip(*(items for items, _ in flat), strict=True)], spec)


def _put_together(slices: UBatchSlices, values: tuple[Any, ...]) -> Any:
    if all(isinstance(value, Tensor) for value in values):
        if any(not value.dim() or value.shape[0] != each.num_tokens for value, each in zip(values, slices, strict=True)):
            shapes = ", ".join(str(list(value.shape)) for value in values)
            raise InputError(
                f"micro-batches of {', '.join(str(each.num_tokens) for each in slices)} tokens returned tensors of shapes {shapes}: "
                "they are put together along tokens, the first dimension. Leave sums over tokens to the caller."
            )
        return torch.cat(values)
    if any(value != values[0] for value in values):
        raise InputError(f"micro-batches returned different constants, {values}: the batch would have several.")
    return values[0]


def _split(slices: Sequence[UBatchSlice], metadata: Any) -> list[Any]:
    if metadata is None:
        return [None] * len(slices)
    if not isinstance(metadata, AttentionMetadata):
        raise InputError(
            f"attn_metadata of type {type(metadata).__name__} cannot be split. Accepted: AttentionMetadata of the whole batch, a list with "
            "an item per micro-batch, or None."
        )
    if metadata.lens is not None:
        return list(split_attn_metadata(slices, metadata))
    return [_split_on_device(each, metadata) for each in slices]


def _split_on_device(part: UBatchSlice, metadata: AttentionMetadata) -> AttentionMetadata:
    """One micro-batch of metadata that a graph reads: sizes are the device's to know.

    Every micro-batch gets all requests; those outside of it have no tokens there. So shapes do not depend on where the cuts lie between
    requests, a graph may hold the splitting, and serves whatever batch has its number of tokens and requests.
    """
    start, stop = part.token_slice.start, part.token_slice.stop
    ends = metadata.query_start_loc
    return AttentionMetadata(
        (ends - start).clamp(0, stop - start),
        metadata.seq_lens - (ends[1:] - stop).clamp(min=0),  # without the tokens that later micro-batches have
        metadata.block_table,
        metadata.slot_mapping[start:stop],
        stop - start,
        metadata.max_seq_len,
        None,
    )
