"""The workload model against a dense one without a cache, for any composition of batches; its experts; its metadata."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from dense_reference import dense_logits
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vgraph_lab.errors import ConfigError, InputError, LifecycleError
from vgraph_lab.vllm_v1 import (
    KVCache,
    UBatchSlice,
    WorkloadConfig,
    WorkloadModel,
    maybe_create_ubatch_slices,
    set_forward_context,
    split_attn_metadata,
)
from vgraph_lab.vllm_v1.input_batch import InputBatch, InputBuffers, RequestTable, ScheduledRequest
from vgraph_lab.vllm_v1.paged_kv import NULL_BLOCK, AttentionMetadata, BlockPool, unified_attention_with_output

CONFIG = WorkloadConfig(max_model_len=32)
EXPERTS = WorkloadConfig(max_model_len=32, num_experts=4)
MODELS = {config.num_experts: WorkloadModel(config) for config in (CONFIG, EXPERTS)}


class Bench:
    """A model on a cache with shuffled blocks, stepped by hand."""

    def __init__(self, model: WorkloadModel, *, block_size: int, seed: int, rubbish: bool = False) -> None:
        c, self.model = model.config, model
        num_blocks = 1 + 6 * -(-c.max_model_len // block_size)
        cpu = torch.device("cpu")
        self.cache = KVCache(c.num_layers, num_blocks, block_size, c.num_kv_heads, c.head_dim, device=cpu, dtype=torch.float32)
        if rubbish:  # what earlier requests have left
            self.cache.blocks[:, :, NULL_BLOCK + 1 :] = float("nan")
        pool = BlockPool(num_blocks)
        order = pool.get_new_blocks(num_blocks - 1)
        random.Random(seed).shuffle(order)
        pool.free_blocks(order)
        self.requests = RequestTable(pool, block_size=block_size, max_model_len=c.max_model_len, vocab_size=c.vocab_size)
        self.buffers = InputBuffers(96, 8, self.requests.max_blocks, cpu)
        model.bind_kv_cache(self.cache.layers())

    def prepare(self, step: dict[str, list[int]]) -> InputBatch:
        scheduled = [ScheduledRequest(req_id, tokens) for req_id, tokens in step.items()]
        return self.requests.prepare(scheduled, max_num_seqs=8, max_num_batched_tokens=96)

    def run(self, step: dict[str, list[int]], *, padding: tuple[int, int] | None) -> dict[str, Tensor]:
        """One step; with padding (tokens, requests), as a FULL graph sees it."""
        batch = self.prepare(step)
        if padding is None:
            self.buffers.fill(batch, batch.num_tokens, batch.num_reqs)
            size, metadata = batch.num_tokens, self.buffers.real_metadata(batch)
        else:
            size, reqs = batch.num_tokens + padding[0], batch.num_reqs + padding[1]
            self.buffers.fill(batch, size, reqs)
            metadata = self.buffers.padded_metadata(size, reqs, self.model.config.max_model_len)
        with set_forward_context(metadata), torch.no_grad():
            logits = self.model.compute_logits(self.model(*self.buffers.model_inputs(size)))
        self.requests.commit(batch)
        return dict(zip(step, logits[: batch.num_tokens].split(batch.num_scheduled_tokens.tolist()), strict=True))


@st.composite
def schedules(draw: st.DrawFn) -> tuple[dict[str, list[int]], list[dict[str, list[int]]]]:
    """Requests, and steps that run all their tokens: chunks of any size, any of the requests in each step."""
    requests = {
        f"r{n}": draw(st.lists(st.integers(0, CONFIG.vocab_size - 1), min_size=1, max_size=14)) for n in range(draw(st.integers(1, 4)))
    }
    left, steps = {req_id: list(tokens) for req_id, tokens in requests.items()}, []
    while left:
        step = {}
        for req_id in draw(st.permutations(sorted(left))):
            count = draw(st.sampled_from([0, 1, 1, 3, len(left[req_id])]))
            if count or not step:
                step[req_id], left[req_id] = left[req_id][: count or 1], left[req_id][count or 1 :]
        steps.append(step)
        left = {req_id: tokens for req_id, tokens in left.items() if tokens}
    return requests, steps


@settings(max_examples=25, deadline=None)
@given(schedules(), st.sampled_from([1, 3, 4, 16]), st.sampled_from([0, 4]), st.integers(0, 99), st.data())
def test_any_composition_equals_the_dense_model(
    schedule: tuple[dict[str, list[int]], list[dict[str, list[int]]]], block_size: int, num_experts: int, seed: int, data: st.DataObject
) -> None:
    requests, steps = schedule
    model = MODELS[num_experts]
    bench = Bench(model, block_size=block_size, seed=seed, rubbish=True)
    found: dict[str, list[Tensor]] = {req_id: [] for req_id in requests}
    for step in steps:
        padding = data.draw(st.one_of(st.none(), st.tuples(st.integers(0, 5), st.integers(0, 3))))
        for req_id, logits in bench.run(step, padding=padding).items():
            found[req_id].append(logits)
    weights = model.state_dict()
    for req_id, tokens in requests.items():
        expected = dense_logits(weights, model.config, tokens)
        assert torch.allclose(torch.cat(found[req_id]).double(), expected, atol=2e-4, rtol=1e-3)
    assert not bench.cache.blocks[:, :, NULL_BLOCK].any()  # padding left nothing behind


def test_block_tables_and_slots_of_the_drawing() -> None:
    """The example in the module's docstring."""
    bench = Bench(MODELS[0], block_size=4, seed=0)
    table = bench.requests
    table._pool = BlockPool(6)
    table._pool._free.clear()
    table._pool.free_blocks([4, 3, 1, 5, 2])  # what the drawing hands out, last one first
    batch = bench.prepare({"a": [0] * 4, "b": [0] * 8, "c": [0]})
    bench.requests.commit(batch)
    assert table.num_computed_tokens("b") == 8
    table._pool._free.clear()
    table._pool.free_blocks([3])
    batch = bench.prepare({"b": [0], "c": [0, 0]})
    assert batch.block_table[0, 2] == 3
    assert batch.slot_mapping[0] == 12
    assert batch.positions.tolist() == [8, 1, 2]
    assert batch.lens == ((1, 9), (2, 3))


def attention_of(bench: Bench, batch: InputBatch, parts: Sequence[tuple[slice, AttentionMetadata]]) -> Tensor:
    c, generator = bench.model.config, torch.Generator().manual_seed(3)
    query = torch.randn(batch.num_tokens, c.num_heads, c.head_dim, generator=generator)
    key, value = (torch.randn(batch.num_tokens, c.num_kv_heads, c.head_dim, generator=generator) for _ in range(2))
    output, cache = torch.full_like(query, torch.nan), bench.cache.layers()[0].clone()
    for where, metadata in parts:
        with set_forward_context(metadata):
            unified_attention_with_output(query[where], key[where], value[where], output[where], cache)
    return output


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(0, 6), st.integers(2, 3), st.integers(0, 9))
def test_micro_batches_attend_like_the_whole(lens: list[int], padding: int, parts: int, seed: int) -> None:
    """In order, since a request on a cut finds its first part in the cache."""
    bench = Bench(MODELS[0], block_size=3, seed=seed)
    bench.requests.commit(bench.prepare({f"r{n}": [0] * (n + 1) for n in range(len(lens))}))
    batch = bench.prepare({f"r{n}": [0] * count for n, count in enumerate(lens)})
    bench.buffers.fill(batch, batch.num_tokens, batch.num_reqs)
    whole = bench.buffers.real_metadata(batch)
    padded = batch.num_tokens + padding
    if padded // parts * (parts - 1) >= batch.num_tokens or padded < parts:
        return  # the rule of the empty last slice: such a batch is not split
    real, stretched = maybe_create_ubatch_slices(True, lens, padded, len(lens) + 1, parts)
    assert real is not None
    assert stretched is not None
    expected = attention_of(bench, batch, [(slice(None), whole)])
    for slices in (real, stretched):
        each = split_attn_metadata(slices, whole)
        assert [m.num_actual_tokens for m in each] == [s.num_tokens for s in real]
        assert sum(new for m in each for new, _ in m.lens or ()) == batch.num_tokens
        got = attention_of(bench, batch, [(s.token_slice, m) for s, m in zip(real, each, strict=True)])
        assert torch.allclose(got, expected, atol=1e-5)


def test_metadata_that_cannot_be_split_fails() -> None:
    bench = Bench(MODELS[0], block_size=4, seed=0)
    batch = bench.prepare({"a": [1, 2, 3]})
    bench.buffers.fill(batch, 8, 2)
    slices = [UBatchSlice(slice(0, 1), slice(0, 4)), UBatchSlice(slice(0, 1), slice(4, 8))]
    with pytest.raises(InputError, match="only the device knows its sizes"):
        split_attn_metadata(slices, bench.buffers.padded_metadata(8, 2, 32))
    with pytest.raises(InputError, match=r"requests 0:1, tokens 4:8 is all padding: the batch has 3 tokens"):
        split_attn_metadata(slices, bench.buffers.real_metadata(batch))
    with set_forward_context([bench.buffers.real_metadata(batch)]), pytest.raises(InputError, match="one batch, got list"):
        bench.model(*bench.buffers.model_inputs(3))


def test_without_metadata_attention_gives_zero() -> None:
    bench = Bench(MODELS[0], block_size=4, seed=0)
    output, cache = torch.ones(2, 4, 8), bench.cache.layers()[0]
    with set_forward_context():
        unified_attention_with_output(torch.ones(2, 4, 8), torch.ones(2, 2, 8), torch.ones(2, 2, 8), output, cache)
    assert not output.any()
    assert not cache.any()


def test_rows_of_a_batch_do_not_touch_each_other() -> None:
    """A request alone, and beside others: the same logits."""
    alone = Bench(MODELS[4], block_size=4, seed=1).run({"a": [3, 1, 4]}, padding=None)["a"]
    beside = Bench(MODELS[4], block_size=4, seed=2, rubbish=True).run({"x": [9] * 20, "a": [3, 1, 4], "y": [7]}, padding=None)["a"]
    assert torch.allclose(alone, beside, atol=1e-5)


def test_weights_depend_on_the_configuration_alone() -> None:
    torch.manual_seed(1)
    one = WorkloadModel(EXPERTS).state_dict()
    state = torch.get_rng_state()
    other = WorkloadModel(EXPERTS).state_dict()
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    assert not torch.equal(one["layers.0.mlp.down"], one["layers.1.mlp.down"])
    changed = WorkloadModel(EXPERTS.model_copy(update={"seed": 5})).state_dict()
    assert not torch.equal(one["head.weight"], changed["head.weight"])


def test_a_gpu_filling_model_is_only_larger() -> None:
    config = WorkloadConfig.gpu()
    model = WorkloadModel(config.model_copy(update={"num_layers": 1}), device="meta")
    layer = sum(p.numel() for p in model.layers.parameters())
    assert layer * config.num_layers > 1e9
    assert WorkloadConfig.gpu(num_experts=8).num_experts == 8


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_kv_heads": 3}, "num_kv_heads: 3 must divide num_heads, which is 4"),
        ({"head_dim": 7}, "head_dim: must be even"),
        ({"num_experts": 1}, "top_k: 2 experts per token, but there are 1"),
    ],
)
def test_sizes_that_do_not_fit_fail(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        WorkloadModel(WorkloadConfig(**fields))


def test_wrong_caches_fail() -> None:
    model = WorkloadModel(CONFIG)
    with pytest.raises(LifecycleError, match="no KV cache yet"), set_forward_context():
        model(torch.tensor([1]), torch.tensor([0]))
    with pytest.raises(ConfigError, match="1 KV caches for 2 layers"):
        model.bind_kv_cache([torch.empty(0)])
    with pytest.raises(ConfigError, match="num_blocks ≥ 2"):
        KVCache(1, 1, 4, 2, 8, device=torch.device("cpu"), dtype=torch.float32)
    with pytest.raises(InputError, match="3 KV cache blocks are needed, 2 are free"):
        BlockPool(3).get_new_blocks(3)


@pytest.mark.parametrize(
    ("step", "words"),
    [
        ({}, "at least one request"),
        ({"a": []}, "request 'a': has no token to run"),
        ({"a": [64]}, "request 'a': tokens are whole numbers from 0 to 63, got 64"),
        ({"a": [1.0]}, r"got 1\.0"),
        ({"a": [1] * 33}, "request 'a': would have 33 tokens, max_model_len is 32"),
        ({f"r{n}": [1] * 25 for n in range(4)}, "the batch has 100 tokens, max_num_batched_tokens is 96"),
        ({f"r{n}": [1] for n in range(9)}, "9 requests would be live, max_num_seqs is 8"),
        ({f"r{n}": [1] * 13 for n in range(7)}, "KV cache blocks are needed, 14 are free"),
    ],
)
def test_batches_that_cannot_be_fail_and_change_nothing(step: dict[str, Any], words: str) -> None:
    bench = Bench(MODELS[0], block_size=2, seed=0)
    bench.requests._pool.get_new_blocks(bench.requests._pool.num_free_blocks - 14)
    free = bench.requests._pool.num_free_blocks
    with pytest.raises(InputError, match=words):
        bench.prepare(step)
    assert (len(bench.requests), bench.requests._pool.num_free_blocks) == (0, free)


def test_a_request_twice_in_a_batch_fails() -> None:
    requests = Bench(MODELS[0], block_size=4, seed=0).requests
    with pytest.raises(InputError, match="each of them once"):
        requests.prepare([ScheduledRequest("a", [1]), ScheduledRequest("a", [2])], max_num_seqs=8, max_num_batched_tokens=9)


def test_a_batch_that_is_given_up_never_was() -> None:
    bench = Bench(MODELS[0], block_size=2, seed=0)
    bench.requests.commit(bench.prepare({"a": [1, 2, 3]}))
    free = bench.requests._pool.num_free_blocks
    bench.requests.give_up(bench.prepare({"a": [1] * 7, "b": [4]}))
    assert bench.requests._pool.num_free_blocks == free
    assert "b" not in bench.requests
    assert bench.requests.num_computed_tokens("a") == 3
    with pytest.raises(InputError, match=r"Write \['a'\]"):
        bench.requests.finish("a")
    assert bench.requests.finish(["a", "a", "zz"]) == ["a"]
    assert bench.requests._pool.num_free_blocks == free + 2


def test_buffers_refuse_what_does_not_fit() -> None:
    bench = Bench(MODELS[0], block_size=4, seed=0)
    batch = bench.prepare({"a": [1, 2, 3]})
    for tokens, reqs in ((2, 1), (97, 1), (3, 9)):
        with pytest.raises(InputError, match="do not fit into"):
            bench.buffers.fill(batch, tokens, reqs)


def test_padding_requests_have_nothing_of_a_larger_batch() -> None:
    """Buffers keep their values from step to step: what padding may read is written anew."""
    buffers = InputBuffers(8, 4, 3, torch.device("cpu"))
    larger = InputBatch.dummy([2, 2, 2, 2], 3)
    larger.block_table[:] = 7
    buffers.fill(larger, 8, 4)
    assert buffers.block_table.eq(7).all()
    smaller = InputBatch.dummy([1], 3)
    smaller.block_table[:] = 5
    buffers.fill(smaller, 4, 3)
    assert buffers.seq_lens.tolist() == [1, 0, 0, 2]
    assert buffers.block_table.tolist() == [[5] * 3, [NULL_BLOCK] * 3, [NULL_BLOCK] * 3, [7] * 3]
    assert buffers.query_start_loc.tolist() == [0, 1, 1, 1, 8]
    assert buffers.slot_mapping[:4].tolist() == [-1] * 4
