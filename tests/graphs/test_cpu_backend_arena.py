"""The arena: no two live blocks overlap, free neighbours are one block, every byte is accounted for."""

from __future__ import annotations

import gc
from itertools import pairwise
from threading import Thread

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vgraph_lab.errors import CaptureError
from vgraph_lab.graphs.backends.base import PoolSegment
from vgraph_lab.graphs.backends.cpu import ArenaPool

KIB, MIB = 1 << 10, 1 << 20
SIZES = st.one_of(
    st.integers(1, 5 * KIB),
    st.integers(500 * KIB, 1100 * KIB),
    st.integers(1 * MIB, 12 * MIB),
    st.sampled_from([1, 511, 512, 513, MIB, MIB + 1, 10 * MIB - 512, 10 * MIB, 10 * MIB + 1, 20 * MIB, 21 * MIB]),
)


def check(pool: ArenaPool, live: dict[int, Tensor]) -> None:
    segments = pool.segments()
    blocks = [block for segment in segments for block in segment.blocks]
    assert pool.reserved_bytes == sum(segment.size_bytes for segment in segments) == sum(block.size_bytes for block in blocks)
    assert pool.live_bytes == sum(block.size_bytes for block in blocks if block.is_live)
    assert sum(block.is_live for block in blocks) == len(live)
    for segment in segments:
        assert segment.blocks[0].offset_bytes == 0
        for left, right in pairwise(segment.blocks):
            assert left.offset_bytes + left.size_bytes == right.offset_bytes, "blocks tile their segment"
            assert left.is_live or right.is_live, "free neighbours are one block"
    assert all(block.size_bytes % 512 == 0 for block in blocks)
    addresses = {segment.address + block.offset_bytes for segment in segments for block in segment.blocks if block.is_live}
    assert addresses == {tensor.data_ptr() for tensor in live.values()}
    spans = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.numel()) for tensor in live.values())
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    for stamp, tensor in live.items():
        assert tensor[0] == tensor[-1] == stamp, "nobody else wrote here"


def best_fit(segments: tuple[PoolSegment, ...], nbytes: int) -> int | None:
    """Address of the free block that best fit takes, found by looking at all of them."""
    wanted = -(-nbytes // 512) * 512
    fitting = [
        (block.size_bytes, number, block.offset_bytes, segment.address + block.offset_bytes)
        for number, segment in enumerate(segments)
        for block in segment.blocks
        if not block.is_live and block.size_bytes >= wanted and (segment.size_bytes == 2 * MIB) == (wanted <= MIB)
    ]
    return min(fitting)[-1] if fitting else None


@settings(max_examples=60)
@given(st.lists(st.one_of(SIZES, st.integers(-40, -1)), max_size=40))
def test_any_sequence_of_allocations_and_deaths(steps: list[int]) -> None:
    """A positive step allocates that many bytes; a negative one lets the tensor die that many places from the end."""
    pool = ArenaPool()
    lease, live = pool.lease(), {}
    for number, step in enumerate(steps):
        if step > 0:
            before = pool.segments()
            expected = best_fit(before, step)
            _, tensor = lease.allocate(step)
            if expected is not None:
                assert tensor.data_ptr() == expected
            else:
                assert len(pool.segments()) == len(before) + 1
            live[number % 251] = tensor.fill_(number % 251)
            assert tensor.numel() == step
            assert tensor.data_ptr() % 64 == 0
            del tensor
        elif len(live) >= -step:
            del live[list(live)[step]]
        check(pool, live)
    lease.close()
    reserved = pool.reserved_bytes
    live.clear()
    assert (pool.live_bytes, pool.reserved_bytes) == (0, reserved), "segments stay for the graph that was captured into them"
    lease.release()
    lease.release()
    assert pool.segments() == ()


@pytest.mark.parametrize(
    ("nbytes", "block", "segment"),
    [
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB, 12 * MIB),  # the rest of a large block is kept with it up to 1 MiB
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),
    ],
)
def test_sizes_are_those_of_cudas_allocator(nbytes: int, block: int, segment: int) -> None:
    pool = ArenaPool()
    _, tensor = pool.lease().allocate(nbytes)
    assert tensor.numel() == nbytes
    assert (pool.live_bytes, pool.reserved_bytes) == (block, segment)


def test_a_view_keeps_the_block_and_the_last_view_frees_it() -> None:
    pool = ArenaPool()
    lease = pool.lease()
    _, tensor = lease.allocate(4 * KIB)
    address, view = tensor.data_ptr(), tensor[100:200].view(torch.int32)
    del tensor
    _, other = lease.allocate(4 * KIB)
    assert other.data_ptr() != address
    assert pool.live_bytes == 8 * KIB
    del view
    assert pool.live_bytes == 4 * KIB
    _, third = lease.allocate(4 * KIB)
    assert third.data_ptr() == address


def test_bytes_outlive_a_pool_that_gave_them_back() -> None:
    pool = ArenaPool()
    lease = pool.lease()
    _, tensor = lease.allocate(3 * MIB)
    tensor.fill_(7)
    lease.roll_back()
    assert pool.segments() == ()
    assert bool((tensor == 7).all())
    del tensor, lease, pool
    gc.collect()


def test_a_death_that_is_reported_after_the_roll_back_frees_nothing() -> None:
    pool = ArenaPool()
    keeper = pool.lease()
    _, kept = keeper.allocate(KIB)
    keeper.close()
    failed = pool.lease()
    block, tensor = failed.allocate(KIB)
    ref = block.ref
    assert ref is not None
    failed.roll_back()
    again = pool.lease()
    _, other = again.allocate(KIB)
    layout = pool.segments()
    pool._dead.append(ref)  # as the finalizer of another thread does that had begun before the roll-back
    assert pool.segments() == layout
    check(pool, {1: kept.fill_(1), 2: other.fill_(2)})
    del tensor


def test_a_capture_does_not_reuse_what_others_free_meanwhile() -> None:
    pool = ArenaPool()
    first = pool.lease()
    _, old = first.allocate(KIB)
    address = old.data_ptr()
    first.close()
    second = pool.lease()
    del old
    _, new = second.allocate(KIB)
    assert new.data_ptr() != address, "its layout depends on its own allocations alone"
    assert pool.live_bytes == 2 * KIB
    second.close()
    assert pool.live_bytes == KIB


def test_one_lease_at_a_time() -> None:
    pool = ArenaPool()
    lease = pool.lease()
    with pytest.raises(CaptureError, match="already being captured into"):
        pool.lease()
    lease.roll_back()
    pool.lease()


def test_a_machine_without_memory_is_a_capture_error() -> None:
    lease = ArenaPool().lease()
    with pytest.raises(CaptureError, match="out of memory"):
        lease.allocate(1 << 60)


def test_storages_may_die_in_any_thread() -> None:
    pool = ArenaPool()
    lease = pool.lease()
    rounds, threads = 200, []

    def let_go(tensors: list[Tensor]) -> None:
        while tensors:
            tensors.pop()

    for _ in range(4):
        tensors = [lease.allocate(1 + 997 * i % 5000)[1] for i in range(rounds)]
        threads.append(Thread(target=let_go, args=(tensors,)))
        del tensors
        threads[-1].start()
        for i in range(rounds):
            lease.allocate(1 + 313 * i % 3000)
            pool.live_bytes  # noqa: B018  # reading settles what has died so far
    for thread in threads:
        thread.join()
    threads.clear()
    check(pool, {})
    assert pool.live_bytes == 0
