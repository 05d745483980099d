"""Lines as servers write them, written for these tests, and what stands before them."""

from __future__ import annotations

import json
from typing import Any

WORKER = "(Worker pid=4242) [Stage-1] WARNING 09-21 10:00:00 [segmented_graph_wrapper.py:291] "
OTHER = "(Worker pid=4343) [Stage-1] WARNING 09-21 10:00:01 [segmented_graph_wrapper.py:291] "
API = "(APIServer pid=77) INFO 09-21 10:00:02 [cuda_graph.py:117] "
ENGINE = "(EngineCore_0 pid=88) INFO 08-14 12:59:46 [gpu_model_runner.py:2592] "
NOISE = "(APIServer pid=77) INFO 09-21 10:00:03 [loggers.py:257] Engine 000: Avg prompt throughput: 3.1 tokens/s, Running: 4 reqs"


def segmented(replays: list[Any], fallbacks: list[Any]) -> str:
    """The line of the segmented wrapper, with totals that fit."""
    hits, misses = sum(key[2] * n for key, n in replays), sum(key[1] * n for key, n in fallbacks)
    rate = 100 * hits / max(1, hits + misses)
    return (
        f"Segmented Code2Wav CUDA Graph stats: requests={hits + misses} hits={hits} fallbacks={misses} hit_rate={rate:.2f}% "
        f"replays={replays} fallback_groups={fallbacks}"
    )


def table(rows: list[tuple[int, int, str, int]]) -> list[str]:
    """vLLM's metrics table: (unpadded, padded, mode, count)."""
    lines = ["**CUDAGraph Config Settings:**", "", "- Mode: FULL_AND_PIECEWISE", "- Capture sizes: [1, 2, 4, 8]", ""]
    lines += ["**CUDAGraph Stats:**", "", "| Unpadded Tokens | Padded Tokens | Num Paddings | Runtime Mode | Count |"]
    lines += ["|-----------------|---------------|--------------|--------------|-------|"]
    lines += [f"| {a:<15} | {b:<13} | {b - a:<12} | {mode:<12} | {n:<5} |" for a, b, mode, n in rows]
    return [*lines, ""]


def capture(tokens: int, seconds: float, mib: float) -> list[str]:
    """A pair of vLLM's per-size lines."""
    return [f"Graph capturing for {tokens} input tokens", f"                        finished in {seconds:.3f} secs, took {mib:.2f} MiB"]


def runner_stats(**runtime: Any) -> dict[str, Any]:
    """``Code2WavCudaGraphRunner.stats()`` with two keys."""
    keys = [{"batch_size": 1, "frames": 10}, {"batch_size": 2, "frames": 35}]
    return {
        "enabled": True,
        "disable_reason": None,
        "binding": {"device": "cuda:0", "num_quantizers": 16, "input_dtype": "torch.long", "owner_pid": 991},
        "graph_contract": {"keys": keys},
        "build": {"attempted_graph_count": 2, "published_graph_count": 2},
        "memory": {"total_gpu_memory_fraction": 0.02, "tier1": {"per_key_footprint_bytes": {"b2t35": 3 * 2**20}}},
        "runtime": {"graph_replays": 0, "replay_failures": 0, "fallback_counts": {}, **runtime},
    }


def startup(stats: dict[str, Any]) -> str:
    """As the scheduler logs it."""
    text = json.dumps(stats, sort_keys=True, separators=(",", ":"))
    return f"[2026-08-26 10:00:00 TP0] Code2Wav device graph startup stats={text}"
