"""How a CUDA pool reads the allocator. The allocator is faked, so this runs without a device."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from vgraph_lab.graphs.backends.base import PoolBlock
from vgraph_lab.graphs.backends.cuda import allocator_segments
from vgraph_lab.graphs.backends.cuda.pool import CudaPool, StreamOrderedLock

ROOT = Path(__file__).parents[2]
Handle = tuple[int, int]


def segment(address: int, owner: Handle, *blocks: tuple[int, str]) -> dict[str, Any]:
    return {
        "address": address,
        "total_size": sum(size for size, _ in blocks),
        "allocated_size": sum(size for size, state in blocks if state == "active_allocated"),
        "segment_pool_id": owner,
        "blocks": [{"size": size, "state": state} for size, state in blocks],
    }


class Allocator:
    """What ``torch._C._cuda_memorySnapshot`` would say, and what it was asked."""

    def __init__(self) -> None:
        self.segments: list[dict[str, Any]] = []
        self.asked: list[object] = []

    def snapshot(self, argument: object) -> dict[str, Any]:
        self.asked.append(argument)
        return {"segments": self.segments, "device_traces": []}


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    allocator, numbers = Allocator(), count(300)
    monkeypatch.setattr(torch._C, "_cuda_memorySnapshot", allocator.snapshot, raising=False)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, next(numbers)))
    return allocator


def test_segments_are_chosen_by_pool_and_no_tuple_is_passed(allocator: Allocator) -> None:
    allocator.segments = [
        segment(10, (0, 0), (512, "active_allocated")),
        segment(20, (0, 7), (512, "inactive")),
        segment(30, (7, 0), (512, "inactive")),
        segment(40, (0, 300), (512, "inactive")),
        segment(50, (0, 7), (1024, "inactive")),
    ]
    found = allocator_segments([(0, 300), (0, 7), (0, 8)])  # type: ignore[list-item]  # torch's NewType of such tuples
    assert {handle: [s["address"] for s in segments] for handle, segments in found.items()} == {
        (0, 300): [40],
        (0, 7): [20, 50],
        (0, 8): [],
    }
    assert list(found) == [(0, 300), (0, 7), (0, 8)]
    assert allocator.asked == [None]


def test_a_pool_reads_its_own_handles_in_order(allocator: Allocator) -> None:
    pool = CudaPool(torch.device("cuda", 0))
    assert pool.segments() == ()
    first = pool.acquire()
    allocator.segments = [
        segment(10, (0, 0), (512, "active_allocated")),
        segment(20, (0, 301), (2048, "active_allocated")),
        segment(30, first, (512, "active_allocated"), (1024, "inactive"), (512, "active_pending_free")),
        segment(40, first, (4096, "inactive")),
    ]
    pool.renew()
    second = pool.acquire()
    assert (first, second) == ((0, 300), (0, 301))
    assert [s.address for s in pool.segments()] == [30, 40, 20]  # handle by handle, each in the allocator's order
    assert pool.segments()[0].blocks == (PoolBlock(0, 512, True), PoolBlock(512, 1024, False), PoolBlock(1536, 512, True))
    assert (pool.reserved_bytes, pool.live_bytes) == (2048 + 4096 + 2048, 512 + 2048)

    held, allocator.segments = allocator.segments, allocator.segments[:2]
    assert [s.address for s in pool.segments()] == [20]
    allocator.segments = held  # a handle that holds nothing is gone for good: the number is nobody's now
    assert [s.address for s in pool.segments()] == [20]
    allocator.segments = []
    assert pool.reserved_bytes == 0
    allocator.segments = held  # but the present one may be empty in between
    assert pool.reserved_bytes == 2048
    assert set(allocator.asked) == {None}


def test_nobody_asks_torch_for_one_pool() -> None:
    """``torch.cuda.memory_snapshot`` passes a tuple, whatever it is given, and the process may die of it."""
    files = [*(ROOT / "vgraph_lab").rglob("*.py"), *(ROOT / "tests" / "gpu").rglob("*.py"), *(ROOT / "notebooks").rglob("*.ipynb")]
    asking = re.compile(r"\bmemory_snapshot\((?!\) passes)|_cuda_memorySnapshot\((?!None\))")
    assert len(files) > 100
    assert [str(path) for path in files if asking.search(path.read_text(encoding="utf-8"))] == []


def test_a_wait_that_fails_releases_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """No __exit__ follows an __enter__ that raised: the next holder would wait for ever."""
    lock = StreamOrderedLock(torch.device("cuda", 0))

    def lost(device: torch.device) -> torch.cuda.Stream:
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(torch.cuda, "current_stream", lost)
    with pytest.raises(RuntimeError, match="the device is lost"), lock:
        pass
    with ThreadPoolExecutor(1) as other:
        assert other.submit(lock._lock.acquire, timeout=5).result()
