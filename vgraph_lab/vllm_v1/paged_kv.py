"""A paged KV cache, and attention over it for a flat batch of tokens.

All tokens of a batch lie in one row; requests follow each other, each with the tokens that it has now (a prefill, a chunk of
one, or one decoded token). The cache is cut into blocks, and a request's block table says which of them are its own::

    tokens            a a a a b c c         query_start_loc  0 4 5 7
    seq_lens          4 9 3                 with what the cache holds from before: b has 8 tokens there, c one
    block_table       [2 0 0]               block size 4; block 0 is the null block: all zeros, owned by nobody
                      [5 1 3]
                      [4 0 0]
    slot_mapping      8 9 10 11 12 17 18    where each token's keys and values go: block * block_size + offset

Field names are those of vLLM's attention metadata (0.25.1).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vgraph_lab.errors import ConfigError, InputError

from .breakable import eager_break_during_capture
from .forward_context import get_forward_context
from .ubatch import UBatchSlice

__all__ = [
    "NULL_BLOCK",
    "PAD_SLOT_ID",
    "AttentionMetadata",
    "BlockPool",
    "KVCache",
    "paged_attention",
    "split_attn_metadata",
    "unified_attention_with_output",
]

NULL_BLOCK = 0
"""The block that belongs to no request: unused places of a block table name it."""

PAD_SLOT_ID = -1
"""The slot of a padding token: its keys and values are not kept."""


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Which tokens attend to what. All tensors are int64, on the model's device.

    A graph reads the tensors and keeps the numbers. So for a FULL graph, tensors are padded to its shape and stay at their
    addresses, ``lens`` is None, and ``num_actual_tokens`` and ``max_seq_len`` are the largest possible. An eager pass, and the
    breaks of a breakable graph, get the real ones.

    Attributes:
        query_start_loc: where each request's tokens begin, and where the last one's end [num_reqs + 1]; padding requests
            have none.
        seq_lens: tokens of each request, with those in the cache [num_reqs].
        block_table: blocks of each request in order, NULL_BLOCK after them [num_reqs, max_blocks].
        slot_mapping: where keys and values of each token go, or PAD_SLOT_ID [num_actual_tokens].
        num_actual_tokens: tokens that attend; any after them are padding, whose output is zero.
        max_seq_len: the largest of ``seq_lens``, or a bound of it.
        lens: new tokens and ``seq_lens`` of each request, on the host; None where only the device knows them.
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    num_actual_tokens: int
    max_seq_len: int
    lens: tuple[tuple[int, int], ...] | None = None


def split_attn_metadata(ubatch_slices: Sequence[UBatchSlice], metadata: AttentionMetadata) -> list[AttentionMetadata]:
    """The metadata of each micro-batch (``vllm.v1.worker.ubatch_utils``, 0.25.1), without padding.

    A request on a cut is in both: its first part ends where the cut is, its second part sees the first one through the cache. So a
    layer of an earlier micro-batch must run before the same layer of a later one.

    Args:
        ubatch_slices: padded or not; padding belongs to nobody here.
        metadata: of the whole batch, real.

    Raises:
        InputError: the metadata is a graph's, whose sizes only the device knows; or a slice is all padding.
    """
    if metadata.lens is None:
        raise InputError("the metadata of a FULL graph cannot be split: only the device knows its sizes. Build it per micro-batch.")
    ends = [sum(new for new, _ in metadata.lens[:count]) for count in range(len(metadata.lens) + 1)]
    parts = []
    for each in ubatch_slices:
        first, last = each.request_slice.start, min(each.request_slice.stop, len(metadata.lens))
        start, stop = each.token_slice.start, min(each.token_slice.stop, metadata.num_actual_tokens)
        if start >= stop or first >= last:
            raise InputError(f"the micro-batch of {each} is all padding: the batch has {metadata.num_actual_tokens} tokens.")
        cuts = [min(max(end, start), stop) - start for end in ends[first : last + 1]]
        later = [max(end - stop, 0) for end in ends[first + 1 : last + 1]]  # tokens of the request that a later part has
        lens = tuple(
            (after - before, total - rest)
            for before, after, rest, (_, total) in zip(cuts[:-1], cuts[1:], later, metadata.lens[first:last], strict=True)
        )
        on_device = metadata.query_start_loc[first : last + 1]  # the same as `cuts` and `lens`, made there: nothing waits for a copy
        parts.append(
            AttentionMetadata(
                (on_device - start).clamp(0, stop - start),
                metadata.seq_lens[first:last] - (on_device[1:] - stop).clamp(min=0),
                metadata.block_table[first:last],
                metadata.slot_mapping[start:stop],
                stop - start,
                max(total for _, total in lens),
                lens,
            )
        )
    return parts


class KVCache(nn.Module):
    """Keys and values of all layers, allocated once.

    Args:
        num_layers: layers of the model.
        num_blocks: blocks, the null block included.
        block_size: tokens of a block.
        num_kv_heads: heads of keys and values.
        head_dim: size of each.
        device: where.
        dtype: of the elements.

    Raises:
        ConfigError: a size is below 1, or there is no block besides the null block.
    """

    blocks: Tensor  # [num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim]

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        if min(num_layers, block_size, num_kv_heads, head_dim) < 1 or num_blocks < 2:
            raise ConfigError(
                f"a KV cache needs sizes ≥ 1 and num_blocks ≥ 2 (one is the null block), got {num_layers} layers, "
                f"{num_blocks} blocks of {block_size} tokens, {num_kv_heads} heads of {head_dim}."
            )
        self.num_blocks, self.block_size = num_blocks, block_size
        shape = (num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim)
        self.register_buffer("blocks", torch.zeros(shape, device=device, dtype=dtype), persistent=False)

    def layers(self) -> list[Tensor]:
        """The cache of each layer, [2, num_blocks, block_size, num_kv_heads, head_dim]."""
        return list(self.blocks)


class BlockPool:
    """Which blocks of a cache are free. The one that is free for the longest goes first.

    Args:
        num_blocks: blocks of the cache, the null block included.
    """

    def __init__(self, num_blocks: int) -> None:
        self._free = deque(range(NULL_BLOCK + 1, num_blocks))

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody owns."""
        return len(self._free)

    def get_new_blocks(self, count: int) -> list[int]:
        """Take blocks.

        Raises:
            InputError: there are not so many; none is taken.
        """
        if count > len(self._free):
            raise InputError(f"{count} KV cache blocks are needed, {len(self._free)} are free. End requests, or configure more num_blocks.")
        return [self._free.popleft() for _ in range(count)]

    def free_blocks(self, blocks: Iterable[int]) -> None:
        """Give blocks back."""
        self._free.extend(blocks)


@eager_break_during_capture
def unified_attention_with_output(query: Tensor, key: Tensor, value: Tensor, output: Tensor, kv_cache: Tensor) -> None:
    """Keep keys and values, attend, and write into ``output``: the operation at which breakable graphs break.

    Reads the attention metadata of the forward context. Without any (a pass that measures memory), ``output`` is zero.

    Args:
        query: [num_tokens, num_heads, head_dim], padding included.
        key: [num_tokens, num_kv_heads, head_dim].
        value: likewise.
        output: like ``query``; written.
        kv_cache: of this layer [2, num_blocks, block_size, num_kv_heads, head_dim]; written.

    Raises:
        InputError: the metadata is not one batch's.
    """
    metadata = get_forward_context().attn_metadata
    if metadata is None:
        output.zero_()
        return
    if not isinstance(metadata, AttentionMetadata):
        raise InputError(
            f"attention needs the AttentionMetadata of one batch, got {type(metadata).__name__}. "
            "A micro-batch runs in a forward context of its own, with its own metadata."
        )
    count = metadata.num_actual_tokens
    _keep(key[:count], value[:count], kv_cache, metadata.slot_mapping)
    paged_attention(query[:count], kv_cache, metadata, output[:count])
    output[count:].zero_()


def _keep(key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write keys and values to their slots. Padding writes back what the null block holds, so that it stays zero."""
    is_padding = (slot_mapping == PAD_SLOT_ID)[:, None, None]
    slots = slot_mapping.clamp(min=0)
    for cache, new in zip(kv_cache.flatten(1, 2), (key, value), strict=True):
        cache.index_copy_(0, slots, torch.where(is_padding, cache.index_select(0, slots), new))


def paged_attention(query: Tensor, kv_cache: Tensor, metadata: AttentionMetadata, output: Tensor) -> None:
    """Causal attention of each token to its own request, up to itself; ``num_heads`` is a multiple of ``num_kv_heads``.

    Prefill goes request by request, with sizes from the host. Decode, and all of a graph, is one batch of single tokens that
    is masked: it reads as many blocks per token as ``max_seq_len`` needs. What earlier requests left in them changes nothing.
    """
    if metadata.lens is None or all(new == 1 for new, _ in metadata.lens):
        _attend_by_token(query, kv_cache, metadata, output)
        return
    start = 0
    for request, (new, total) in enumerate(metadata.lens):
        keys, values = _gather(kv_cache, metadata.block_table[request : request + 1], total)
        rows = query[start : start + new].transpose(0, 1)[None]
        is_whole = new == total
        mask = None if is_whole else _sees(torch.arange(total - new, total, device=query.device), total)
        attended = _attend(rows, keys[:, :, :total], values[:, :, :total], mask, is_causal=is_whole)
        output[start : start + new].copy_(attended[0].transpose(0, 1))
        start += new


def _attend_by_token(query: Tensor, kv_cache: Tensor, metadata: AttentionMetadata, output: Tensor) -> None:
    ends = metadata.query_start_loc[1:]
    token = torch.arange(len(query), device=query.device)
    request = torch.searchsorted(ends, token, right=True).clamp(max=len(ends) - 1)  # padding tokens join the last one
    position = metadata.seq_lens[request] - ends[request] + token
    keys, values = _gather(kv_cache, metadata.block_table.index_select(0, request), metadata.max_seq_len)
    mask = _sees(position, keys.shape[2])
    for each in (keys, values):  # what no token sees may be an earlier request's, and NaN: a weight of zero does not remove that
        each.masked_fill_(~mask[:, None, :, None], 0)
    output.copy_(_attend(query[:, :, None], keys, values, mask[:, None, None])[:, :, 0])


def _gather(kv_cache: Tensor, block_table: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Copies of keys and values [rows, num_kv_heads, blocks * block_size, head_dim] of the blocks that hold ``length`` tokens."""
    _, _, block_size, *_ = kv_cache.shape
    blocks = block_table[:, : -(-length // block_size)]
    keys, values = (cache.index_select(0, blocks.flatten()).unflatten(0, blocks.shape).flatten(1, 2).transpose(1, 2) for cache in kv_cache)
    return keys, values


def _sees(positions: Tensor, length: int) -> Tensor:
    """Whether the token at each position sees each of the first ``length`` ones [rows, length]; all see the first."""
    return torch.arange(length, device=positions.device) <= positions[:, None].clamp(min=0)


def _attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, *, is_causal: bool = False) -> Tensor:
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, is_causal=is_causal, enable_gqa=True)
