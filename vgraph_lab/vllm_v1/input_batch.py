"""From requests to one flat batch: their state, and input buffers at addresses that never change."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vgraph_lab.errors import InputError

from .paged_kv import NULL_BLOCK, PAD_SLOT_ID, AttentionMetadata, BlockPool

__all__ = ["InputBatch", "InputBuffers", "RequestTable", "ScheduledRequest"]


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """What one request runs in one step: a prefill, a chunk of one, or a decoded token.

    Attributes:
        req_id: the request; an id that is not live begins a new one.
        token_ids: its next tokens, at least one; whole numbers, of Python or NumPy.
    """

    req_id: str
    token_ids: Sequence[int]


def _is_whole(value: object) -> bool:
    return type(value) is int or isinstance(value, np.integer)


@dataclass(slots=True)
class _Request:
    num_computed_tokens: int = 0
    block_ids: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class InputBatch:
    """One step's tokens, request by request, on the host. Arrays are int64.

    Attributes:
        req_ids: in order.
        num_scheduled_tokens: new tokens of each request [num_reqs].
        seq_lens: its tokens, those in the cache included [num_reqs].
        token_ids: of all requests [num_tokens].
        positions: of each token in its request [num_tokens].
        slot_mapping: where each token's keys and values go [num_tokens].
        block_table: blocks of each request, NULL_BLOCK after them [num_reqs, max_blocks].
    """

    req_ids: tuple[str, ...]
    num_scheduled_tokens: NDArray[np.int64]
    seq_lens: NDArray[np.int64]
    token_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    slot_mapping: NDArray[np.int64]
    block_table: NDArray[np.int64]

    @property
    def num_tokens(self) -> int:
        """Of all requests."""
        return len(self.token_ids)

    @property
    def num_reqs(self) -> int:
        """Requests."""
        return len(self.num_scheduled_tokens)

    @property
    def lens(self) -> tuple[tuple[int, int], ...]:
        """New and all tokens of each request."""
        return tuple(zip(self.num_scheduled_tokens.tolist(), self.seq_lens.tolist(), strict=True))

    @classmethod
    def dummy(cls, num_scheduled_tokens: Sequence[int], max_blocks: int) -> InputBatch:
        """Requests of so many tokens each that leave nothing behind: their keys and values are not kept."""
        lens = np.asarray(num_scheduled_tokens, np.int64)
        positions = np.concatenate([np.arange(new) for new in lens])
        zeros = np.zeros_like(positions)
        table = np.full((len(lens), max_blocks), NULL_BLOCK, np.int64)
        return cls((), lens, lens, zeros, positions, np.full_like(positions, PAD_SLOT_ID), table)


class RequestTable:
    """Live requests: how far each has come, and which blocks of the KV cache it has.

    Args:
        pool: free blocks.
        block_size: tokens of a block.
        max_model_len: tokens of one request at most.
        vocab_size: token ids end before it.
    """

    def __init__(self, pool: BlockPool, *, block_size: int, max_model_len: int, vocab_size: int) -> None:
        self._pool, self._block_size, self._max_model_len, self._vocab_size = pool, block_size, max_model_len, vocab_size
        self.max_blocks = -(-max_model_len // block_size)
        self._requests: dict[str, _Request] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, req_id: str) -> bool:
        return req_id in self._requests

    def num_computed_tokens(self, req_id: str) -> int:
        """Tokens whose keys and values are in the cache; 0 for an id that is not live."""
        return self._requests[req_id].num_computed_tokens if req_id in self._requests else 0

    def prepare(self, scheduled: Sequence[ScheduledRequest], *, max_num_seqs: int, max_num_batched_tokens: int) -> InputBatch:
        """The batch of one step, with the blocks that it needs. Call :meth:`commit` once it has run, :meth:`give_up` if it failed.

        Raises:
            InputError: a request or the batch is not acceptable, or the cache is full. Nothing has changed then.
        """
        self._check(scheduled, max_num_seqs, max_num_batched_tokens)
        ends = [self.num_computed_tokens(request.req_id) + len(request.token_ids) for request in scheduled]
        missing = [-(-end // self._block_size) - self._num_blocks(request.req_id) for end, request in zip(ends, scheduled, strict=True)]
        new_blocks = self._pool.get_new_blocks(sum(missing))
        table = np.full((len(scheduled), self.max_blocks), NULL_BLOCK, np.int64)
        positions, slots = [], []
        for row, (request, end, count) in enumerate(zip(scheduled, ends, missing, strict=True)):
            state = self._requests.setdefault(request.req_id, _Request())
            state.block_ids += [new_blocks.pop() for _ in range(count)]
            table[row, : len(state.block_ids)] = state.block_ids
            where = np.arange(state.num_computed_tokens, end)
            positions.append(where)
            slots.append(table[row, where // self._block_size] * self._block_size + where % self._block_size)
        return InputBatch(
            tuple(request.req_id for request in scheduled),
            np.asarray([len(request.token_ids) for request in scheduled], np.int64),
            np.asarray(ends, np.int64),
            np.asarray([token for request in scheduled for token in request.token_ids], np.int64),
            np.concatenate(positions),
            np.concatenate(slots),
            table,
        )

    def commit(self, batch: InputBatch) -> None:
        """The batch has run: its tokens are in the cache."""
        for req_id, end in zip(batch.req_ids, batch.seq_lens.tolist(), strict=True):
            self._requests[req_id].num_computed_tokens = end

    def give_up(self, batch: InputBatch) -> None:
        """The batch has failed: its requests are as they were, new ones never began."""
        for req_id in batch.req_ids:
            state = self._requests[req_id]
            kept = -(-state.num_computed_tokens // self._block_size)
            self._pool.free_blocks(state.block_ids[kept:])
            del state.block_ids[kept:]
            if not state.num_computed_tokens:
                del self._requests[req_id]

    def finish(self, req_ids: Collection[str]) -> list[str]:
        """End requests and free their blocks; returns those that were live.

        Raises:
            InputError: something else than several ids; none is ended then.
        """
        if isinstance(req_ids, str):
            raise InputError(f"requests are ended by a list of ids, got the text {req_ids!r}. Write [{req_ids!r}].")
        if not isinstance(req_ids, Collection) or not all(isinstance(each, str) for each in req_ids):
            raise InputError(f"requests are ended by a list of ids, each a text; got {req_ids!r}.")
        live = [req_id for req_id in dict.fromkeys(req_ids) if req_id in self._requests]
        for req_id in live:
            self._pool.free_blocks(self._requests.pop(req_id).block_ids)
        return live

    def _num_blocks(self, req_id: str) -> int:
        return len(self._requests[req_id].block_ids) if req_id in self._requests else 0

    def _check(self, scheduled: Sequence[ScheduledRequest], max_num_seqs: int, max_num_batched_tokens: int) -> None:
        if not isinstance(scheduled, list | tuple) or not all(isinstance(each, ScheduledRequest) for each in scheduled):
            got = f"a {type(scheduled).__name__}"
            if isinstance(scheduled, list | tuple):
                got += f" with {next(each for each in scheduled if not isinstance(each, ScheduledRequest))!r}"
            raise InputError(f"a batch is a list of ScheduledRequest, got {got}. Write [ScheduledRequest('a', [1, 2, 3])].")
        ids = [request.req_id for request in scheduled]
        if odd := [req_id for req_id in ids if not isinstance(req_id, str)]:
            raise InputError(f"req_id: must be a text, got {odd[0]!r}.")
        if not ids or len(set(ids)) < len(ids):
            raise InputError(f"a batch has at least one request, each of them once; got {ids or 'none'}.")
        live = len(self._requests.keys() | set(ids))
        if live > max_num_seqs:
            raise InputError(f"{live} requests would be live, max_num_seqs is {max_num_seqs}. End some first.")
        for request in scheduled:
            self._check_tokens(request)
        tokens = sum(len(request.token_ids) for request in scheduled)
        if tokens > max_num_batched_tokens:
            raise InputError(
                f"the batch has {tokens} tokens, max_num_batched_tokens is {max_num_batched_tokens}. Schedule prefills in chunks."
            )

    def _check_tokens(self, request: ScheduledRequest) -> None:
        name, tokens = f"request {request.req_id!r}", request.token_ids
        given: Any = tokens
        is_row = given.ndim == 1 if isinstance(given, np.ndarray) else isinstance(given, Sequence) and not isinstance(given, str)
        if not is_row:
            raise InputError(f"{name}: token_ids must be a list of whole numbers, got {tokens!r}.")
        if not len(tokens):
            raise InputError(f"{name}: has no token to run. Leave it out of the batch.")
        wrong = next((t for t in tokens if not _is_whole(t) or not 0 <= t < self._vocab_size), None)
        if wrong is not None:
            raise InputError(f"{name}: tokens are whole numbers from 0 to {self._vocab_size - 1}, got {wrong!r}.")
        end = self.num_computed_tokens(request.req_id) + len(tokens)
        if end > self._max_model_len:
            raise InputError(f"{name}: would have {end} tokens, max_model_len is {self._max_model_len}.")


class InputBuffers:
    """The tensors that a model reads, at fixed addresses, all parts of one: a step is copied to the device in one go.

    Args:
        max_num_tokens: tokens of a batch at most, padding included.
        max_num_reqs: requests of a batch at most.
        max_blocks: blocks of a request at most.
        device: where.
    """

    def __init__(self, max_num_tokens: int, max_num_reqs: int, max_blocks: int, device: torch.device) -> None:
        sizes = (max_num_tokens, max_num_tokens, max_num_tokens, max_num_reqs + 1, max_num_reqs, max_num_reqs * max_blocks)
        self.packed = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        is_cuda = device.type == "cuda"
        self._staged = torch.zeros(sum(sizes), dtype=torch.int64, pin_memory=is_cuda)
        self._copied = torch.cuda.Event() if is_cuda else None
        self._max_blocks = max_blocks
        parts, host = self.packed.split(sizes), self._staged.numpy()
        self.input_ids, self.positions, self.slot_mapping, self.query_start_loc, self.seq_lens, table = parts
        self.block_table = table.view(max_num_reqs, max_blocks)
        ids, positions, slots, starts, lens, blocks = np.split(host, np.cumsum(sizes[:-1]))
        self._host = (ids, positions, slots, starts, lens, blocks.reshape(max_num_reqs, max_blocks))

    def fill(self, batch: InputBatch, num_tokens_padded: int, num_reqs_padded: int) -> None:
        """Write a batch and its padding: token 0 at position 0 that is not kept, and requests without tokens.

        Raises:
            InputError: the padded batch is smaller than the batch, or larger than the buffers.
        """
        ids, positions, slots, starts, lens, blocks = self._host
        if not batch.num_tokens <= num_tokens_padded <= len(ids) or not batch.num_reqs <= num_reqs_padded <= len(lens):
            raise InputError(
                f"{batch.num_reqs} requests with {batch.num_tokens} tokens do not fit into {num_reqs_padded} and {num_tokens_padded}, "
                f"or these not into buffers of {len(lens)} and {len(ids)}."
            )
        if self._copied is not None:
            self._copied.synchronize()  # the last step's copy reads what is written now
        for buffer, values, padding in (
            (ids, batch.token_ids, 0),
            (positions, batch.positions, 0),
            (slots, batch.slot_mapping, PAD_SLOT_ID),
        ):
            buffer[: batch.num_tokens] = values
            buffer[batch.num_tokens : num_tokens_padded] = padding
        starts[0] = 0
        starts[1 : batch.num_reqs + 1] = np.cumsum(batch.num_scheduled_tokens)
        starts[batch.num_reqs + 1 : num_reqs_padded + 1] = batch.num_tokens
        lens[: batch.num_reqs] = batch.seq_lens
        lens[batch.num_reqs : num_reqs_padded] = 0
        blocks[: batch.num_reqs] = batch.block_table
        blocks[batch.num_reqs : num_reqs_padded] = NULL_BLOCK
        used = len(self._staged) - (len(lens) - num_reqs_padded) * self._max_blocks
        self.packed[:used].copy_(self._staged[:used], non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self.packed.device))

    def real_metadata(self, batch: InputBatch) -> AttentionMetadata:
        """Of the batch that was filled in, without its padding: for attention that runs eagerly."""
        tokens, reqs = batch.num_tokens, batch.num_reqs
        return self._metadata(tokens, reqs, int(batch.seq_lens.max()), batch.lens)

    def padded_metadata(self, num_tokens_padded: int, num_reqs_padded: int, max_seq_len: int) -> AttentionMetadata:
        """With its padding: the same tensors and numbers for every batch of one FULL graph."""
        return self._metadata(num_tokens_padded, num_reqs_padded, max_seq_len, None)

    def model_inputs(self, num_tokens_padded: int) -> tuple[Tensor, Tensor]:
        """Token ids and positions of a padded batch."""
        return self.input_ids[:num_tokens_padded], self.positions[:num_tokens_padded]

    def last_token_indices(self, num_reqs: int) -> Tensor:
        """Where the last token of each request is [num_reqs]."""
        ends: Tensor = self.query_start_loc[1 : num_reqs + 1]
        return ends - 1

    def _metadata(self, tokens: int, reqs: int, max_seq_len: int, lens: tuple[tuple[int, int], ...] | None) -> AttentionMetadata:
        return AttentionMetadata(
            self.query_start_loc[: reqs + 1],
            self.seq_lens[:reqs],
            self.block_table[:reqs],
            self.slot_mapping[:tokens],
            tokens,
            max_seq_len,
            lens,
        )
