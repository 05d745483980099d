"""Two GPUs that share the experts of a model: exchange over NCCL, whole and in micro-batches, eager and inside of graphs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from test_bench_ubatch import run

from vgraph_lab.bench.ubatch import recorded_spans, recorded_ubatch

SIZES = ["--hidden", "256", "--layers", "2", "--experts", "4", "--prompts", "4", "--prompt-tokens", "64", "--decode-requests", "8"]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("parts", [2, 3])
def test_micro_batches_over_nccl_equal_whole_batches(tmp_path: Path, parts: int) -> None:
    output = tmp_path / "ubatch.json"
    options = [*SIZES, "--dtype", "float32", "--repeats", "3", "--ubatches", str(parts), "--output", str(output)]
    codes, told = run(tmp_path, *options)
    assert codes == [0, 0], "\n".join(told)
    record = json.loads(output.read_text())
    assert record["settings"]["backend"] == "nccl"
    assert record["settings"]["absent"] == {}
    rows = {(row["case"], row["variant"]): row for row in record["rows"]}
    assert [variant for case, variant in rows if case == "prefill"] == ["eager", "eager_ubatch", "eager_ubatch_sms", "piecewise"]
    assert [variant for case, variant in rows if case == "decode"] == ["eager", "eager_ubatch", "full", "full_ubatch"]
    for (_, variant), row in rows.items():
        assert row["largest_difference"] < 1e-2
        assert row["is_split"] == ("ubatch" in variant)
        assert (row["graph_hits"] >= 2 * (3 + 3) + 1) == (variant in ("piecewise", "full", "full_ubatch"))
    kept = recorded_ubatch(output)
    assert kept is not None
    for rank in range(2):
        names = [span.name for span in recorded_spans(kept, rank=rank) if span.stream == "comm"]
        assert names.count("all-to-all") == 2 * 2 * parts
