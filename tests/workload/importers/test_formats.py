"""Each format against excerpts whose content was worked out by hand."""

from __future__ import annotations

import json
from typing import Any

import pandas as pd
import pytest
from workload.importers.excerpts import API, ENGINE, NOISE, OTHER, WORKER, capture, runner_stats, segmented, startup, table

from vgraph_lab.errors import FallbackReason
from vgraph_lab.graphs.stats import CallKind, StatsSnapshot
from vgraph_lab.inspect.coverage import OUTCOMES, coverage_summary, coverage_table
from vgraph_lab.qwen3_tts.stream_routines import SuffixDescriptor
from vgraph_lab.workload import ImportedLog, read_log
from vgraph_lab.workload.importers import CALLS_COLUMNS, CAPTURES_COLUMNS, REPORTS_COLUMNS


def rows(log: ImportedLog, *columns: str) -> list[tuple[Any, ...]]:
    """Some columns of the calls as plain values; None for what is missing."""
    return [tuple(None if pd.isna(value) else value for value in row) for row in log.calls[list(columns)].itertuples(index=False)]


SHAPE = ("target", "batch_size", "frames", "outcome", "reason", "captured_batch_size", "captured_frames", "calls")


def test_segmented_statistics() -> None:
    """2 x 3 + 5 x 2 requests are hits, 4 x 1 + 1 x 3 fallbacks."""
    replays = [(("suffix_97", 2, 2), 5), (("icl_prefix", 4, 3), 2)]
    fallbacks = [(("xvec_prefix:shape", 1), 4), (("suffix_26:no_graph", 3), 1)]
    log = read_log([WORKER + segmented(replays, fallbacks)])
    assert rows(log, *SHAPE) == [
        ("qwen3_tts.icl_prefix", 3, None, "padded hit", "", 4, None, 2),
        ("qwen3_tts.suffix", 3, 26, "fallback", "no_graph", None, None, 1),
        ("qwen3_tts.suffix", 2, 97, "exact hit", "", 2, 97, 5),
        ("qwen3_tts.xvec_prefix", 1, None, "fallback", "shape_not_covered", None, None, 4),
    ]
    assert set(log.calls["process"]) == {"Worker pid=4242 Stage-1"}
    assert log.reports[["reports", "runs", "calls", "unlisted"]].to_numpy().tolist() == [[1, 1, 12, 0]]
    assert str(log).splitlines()[0].endswith("1 lines read: 1 recognised, 0 ignored, 0 malformed")


def test_what_the_list_of_the_most_frequent_leaves_out_is_told() -> None:
    """20 shapes of one request each are listed, the totals say 25."""
    listed = [((f"suffix_{100 - i}", 1, 1), 1) for i in range(20)]
    line = segmented(listed, []).replace("requests=20 hits=20", "requests=25 hits=25")
    log = read_log([line])
    assert log.reports["unlisted"].tolist() == [5]
    assert "5 more are not listed by shape" in str(log)


def test_batch_statistics_count_forwards() -> None:
    line = (
        "Code2Wav batch stats: forwards=9 groups=8 requests=11 avg_group_size=1.38 padded_frames=24 decoded_frames=300 pad_ratio=8.00% "
        "top_actual_frames=[(25, 8), (1, 3)] top_bucket_groups=[((1, 25), 5), ((2, 25), 3)]"
    )
    log = read_log([f"[Stage-1] INFO 09-21 10:00:00 [qwen3_tts_code2wav.py:200] {line}"])
    assert rows(log, "source", *SHAPE) == [
        ("vllm-omni batch stats", "qwen3_tts.code2wav", 1, 25, "observed", "", None, None, 5),
        ("vllm-omni batch stats", "qwen3_tts.code2wav", 2, 25, "observed", "", None, None, 3),
    ]
    assert log.calls["process"].unique().tolist() == ["Stage-1"]


def test_the_stateless_wrapper_and_its_captures() -> None:
    lines = [
        "  Captured CUDA Graph for size=150",
        "Captured stateless CUDA Graph for batch=2 size=325",
        "Captured combined suffix CUDA Graph for batch=4 size=97",
        "Captured ICL prefix CUDA Graph for batch=4",
        "Code2Wav CUDA Graph stats: total=7 hits=5 fallbacks=2 compiled_hits=0 stream_capture_fallbacks=0 hit_rate=71.43% "
        "top_requests=[((1, 98), 5)] top_compiled=[] top_hits=[((1, 98, 150), 4), ((2, 325, 325), 1)] top_fallbacks=[((8, 73, 73), 2)]",
    ]
    log = read_log([f"(Worker pid=5) INFO 03-14 15:41:06 [cuda_graph_decoder_wrapper.py:94] {line}" for line in lines])
    assert rows(log, *SHAPE, "padding_frames", "wasted_share") == [
        ("qwen3_tts.stateless", 8, 73, "fallback", "", None, None, 2, 0, 0.0),
        ("qwen3_tts.stateless", 1, 98, "padded hit", "", 1, 150, 4, 208, 52 / 150),
        ("qwen3_tts.stateless", 2, 325, "exact hit", "", 2, 325, 1, 0, 0.0),
    ]
    found = log.captures[["target", "batch_size", "frames"]].astype(object).where(log.captures["frames"].notna(), None)
    assert found["target"].tolist() == ["qwen3_tts.stateless", "qwen3_tts.stateless", "qwen3_tts.suffix", None]
    assert log.captures["batch_size"].tolist() == [1, 2, 4, 4]
    assert log.captures["frames"].tolist()[:3] == [150, 325, 97]
    assert log.captures["seconds"].isna().all()


def test_the_metrics_table_counts_by_interval() -> None:
    """Two tables between other lines: 3 tokens padded to 4 come 10 + 7 times, 600 tokens run eager."""
    first = table([(3, 4, "FULL", 10), (8, 8, "PIECEWISE", 2)])
    second = table([(600, 600, "NONE", 1), (3, 4, "CUDAGraphMode.FULL", 7)])
    log = read_log([*(API + line for line in first), NOISE, *(API + line for line in second)])
    assert rows(log, "phase", "unit", *SHAPE[1:]) == [
        ("FULL", "tokens", 1, 3, "padded hit", "", 1, 4, 17),
        ("NONE", "tokens", 1, 600, "fallback", "", None, None, 1),
        ("PIECEWISE", "tokens", 1, 8, "exact hit", "", 1, 8, 2),
    ]
    assert log.reports[["repetition", "reports", "runs"]].to_numpy().tolist() == [["interval", 2, 1]]
    assert log.lines.malformed == 0
    assert log.lines.recognised == 2 * (2 + 2 + 2) + 4, "settings, headers and rows; blank lines are ignored"


def test_a_table_without_its_beginning_and_one_without_prefixes() -> None:
    rows_alone = table([(1, 1, "FULL", 5), (2, 2, "FULL", 6)])[-3:]
    assert read_log([API + line for line in rows_alone]).calls["calls"].tolist() == [5, 6]
    assert read_log("\n".join(table([(1, 1, "FULL", 5)]))).calls["calls"].tolist() == [5]


def test_a_table_of_somebody_else_is_no_malformed_row() -> None:
    foreign = ["| Field | Value |", "+-------+-------+", "| e2e_requests | 4 |", "| 1 | 2 |"]
    log = read_log([*(API + line for line in table([(1, 1, "FULL", 5)])), *(API + line for line in foreign)])
    assert log.lines.malformed == 0
    assert log.calls["calls"].tolist() == [5]


def test_capture_lines_in_pairs_and_the_total() -> None:
    lines = [*capture(464, 0.057, 26.0), *capture(456, 0.062, 28.5), "Graph capturing finished in 14 secs, took 0.25 GiB"]
    log = read_log([ENGINE + line for line in lines])
    assert log.captures[["kind", "seconds", "mib"]].to_numpy().tolist() == [
        ["graph", 0.057, 26.0],
        ["graph", 0.062, 28.5],
        ["total", 14.0, 256.0],
    ]
    assert log.captures["frames"].tolist()[:2] == [464, 456]
    assert log.captures["unit"].unique().tolist() == ["tokens"]
    assert "2 captured graphs" in str(log)


def test_captures_of_two_processes_that_alternate() -> None:
    other = ENGINE.replace("88", "99")
    a, b = capture(464, 0.057, 26.0), capture(8, 0.01, 1.0)
    log = read_log([ENGINE + a[0], other + b[0], ENGINE + a[1], other + b[1]])
    assert log.captures[["process", "frames", "seconds"]].to_numpy().tolist() == [
        ["EngineCore_0 pid=88", 464, 0.057],
        ["EngineCore_0 pid=99", 8, 0.01],
    ]


def test_captures_that_are_cut() -> None:
    """A beginning without an end, an end without a beginning, a beginning at the end of the log."""
    begin, end = capture(464, 0.057, 26.0)
    log = read_log([ENGINE + line for line in (begin, begin, end, end, begin)])
    assert len(log.captures) == 1
    assert (log.lines.read, log.lines.recognised, log.lines.malformed) == (5, 2, 3)
    assert [(line.line, line.why.partition(" whose")[0]) for line in log.malformed] == [
        (1, "the beginning of a capture"),
        (4, "the end of a capture"),
        (5, "the beginning of a capture"),
    ]


def test_sglang_startup_statistics() -> None:
    log = read_log([startup(runner_stats())])
    assert log.calls.empty
    assert log.captures[["batch_size", "frames"]].to_numpy().tolist() == [[1, 10], [2, 35]]
    assert log.captures["mib"].iloc[1] == 3.0
    assert log.captures["process"].unique().tolist() == ["TP0"]


def test_sglang_counters_without_shapes() -> None:
    stats = runner_stats(graph_replays=90, replay_failures=1, fallback_counts={"key_miss": 7, "ineligible": 2})
    log = read_log([json.dumps(stats)])
    assert rows(log, "process", *SHAPE) == [
        ("pid=991", "qwen3_omni.code2wav", None, None, "exact hit", "", None, None, 90),
        ("pid=991", "qwen3_omni.code2wav", None, None, "fallback", "declined", None, None, 2),
        ("pid=991", "qwen3_omni.code2wav", None, None, "fallback", "shape_not_covered", None, None, 7),
        ("pid=991", "qwen3_omni.code2wav", None, None, "error", "", None, None, 1),
    ]


@pytest.mark.parametrize(
    "runtime",
    [
        {"replays": {"B1/T10": 5, "B2/T35": 3}, "fallbacks": {"b1t12": {"key_miss": 2}}},
        {"replays_by_shape": {"(1, 10)": 5, "(2, 35)": 3}, "fallbacks_by_shape": {"1x12": {"key_miss": 2}}},
        {
            "replays": [{"batch_size": 1, "frames": 10, "count": 5}, {"batch_size": 2, "frames": 35, "count": 3}],
            "fallbacks": [{"batch_size": 1, "frames": 12, "reason": "key_miss", "count": 2}],
        },
    ],
)
def test_sglang_counters_by_shape(runtime: dict[str, Any]) -> None:
    log = read_log([f"INFO code2wav graph telemetry {json.dumps(runtime)}"])
    assert rows(log, *SHAPE) == [
        ("qwen3_omni.code2wav", 1, 10, "exact hit", "", 1, 10, 5),
        ("qwen3_omni.code2wav", 1, 12, "fallback", "shape_not_covered", None, None, 2),
        ("qwen3_omni.code2wav", 2, 35, "exact hit", "", 2, 35, 3),
    ]


def test_sglang_runtime_snapshot_with_histograms() -> None:
    snapshot = {
        "initial_decode_batch_size_histogram": {"1": 4},
        "followup_decode_batch_size_histogram": {"1": 6, "4": 2},
        "overall_decode_batch_size_histogram": {"1": 10, "4": 2},
        "cuda_graph_stats": runner_stats(graph_replays=3),
    }
    log = read_log([json.dumps(snapshot)])
    batches = log.calls[log.calls["source"] == "sglang-omni decode batches"]
    assert batches[["phase", "batch_size", "calls"]].to_numpy().tolist() == [["followup", 1, 6], ["followup", 4, 2], ["initial", 1, 4]]
    assert len(log.captures) == 2
    assert "look at one of them at a time" in str(log)


def test_sglang_prefill_summary_over_many_lines() -> None:
    summary = {
        "scalar": {"total_count": 30, "replay_count": 28, "standard_eager_count": 2, "exact_replay_count": 8, "padded_replay_count": 20},
        "fallback_reasons": {"above_capture_cap": 2},
        "scheduled": {"count": 30, "top20": [[62, 20], [45, 10]], "full_histogram": {"45": 10, "62": 20}},
    }
    text = json.dumps(summary, indent=2)
    log = read_log(text)
    assert log.lines.recognised == log.lines.read == len(text.splitlines())
    prefill = log.of_source("sglang-omni prefill")
    assert dict(zip(prefill["outcome"].astype(str), prefill["calls"], strict=True)) == {"exact hit": 8, "padded hit": 20, "fallback": 2}
    tokens = log.of_source("sglang-omni prefill tokens")
    assert dict(zip(tokens["frames"], tokens["calls"], strict=True)) == {45: 10, 62: 20}


def test_sglang_prefill_counters_by_bucket() -> None:
    info = {
        "prefill_cuda_graph": {"replay_count": 3, "standard_eager_count": 1, "custom_eager_count": 1, "replay_buckets": {"16": 2, "32": 1}}
    }
    log = read_log([json.dumps(info)])
    assert rows(log, "outcome", "captured_frames", "reason", "calls") == [
        ("hit", 16, "", 2),
        ("hit", 32, "", 1),
        ("fallback", None, "custom_eager", 1),
        ("fallback", None, "standard_eager", 1),
    ]


def test_csv_and_jsonl_are_the_same_table() -> None:
    csv = (
        "target;batch_size;frames;outcome;captured_batch_size;captured_frames;reason;calls;comment\n"
        "a.b;1;26;padded hit;2;26;;10;x\na.b;3;26;fallback;;;no_graph;2;\na.b;1;26;padded hit;2;26;;5;\n"
    )
    log = read_log(csv)
    assert rows(log, *SHAPE, "padding_frames") == [
        ("a.b", 1, 26, "padded hit", "", 2, 26, 15, 15 * 26),
        ("a.b", 3, 26, "fallback", "no_graph", None, None, 2, 0),
    ]
    header, *lines = csv.splitlines()
    objects = [{k: v for k, v in zip(header.split(";"), line.split(";"), strict=True) if v} for line in lines]
    again = read_log("".join(json.dumps(row) + "\n" for row in objects))
    pd.testing.assert_frame_equal(again.calls, log.calls)
    exported = read_log(log.calls.to_csv(index=False))
    pd.testing.assert_frame_equal(exported.calls.drop(columns="source"), log.calls.drop(columns="source"))


def test_a_saved_coverage_table_comes_back() -> None:
    """As pandas writes it, with the shapes of streaming steps and without what can be computed again."""
    key, graph = SuffixDescriptor(1, 51, "icl", 26), SuffixDescriptor(2, 51, "icl", 26)
    counts = {CallKind("qwen3_tts.suffix", key, descriptor=graph): 7, CallKind("qwen3_tts.suffix", key, reason=FallbackReason.DISABLED): 2}
    saved = coverage_table(StatsSnapshot(counts))
    log = read_log(saved.to_csv(index=False))
    assert log.lines.malformed == 0
    shared = [name for name in saved.columns if name in log.calls.columns and name not in ("requested", "captured", "outcome")]
    assert {"state", "source_frames", "padding_frames", "wasted_share"} <= set(shared)
    pd.testing.assert_frame_equal(log.calls[shared], saved[shared], check_dtype=False)
    assert log.calls["outcome"].tolist() == saved["outcome"].tolist()


def test_a_table_of_shapes_alone_and_one_of_captures() -> None:
    log = read_log("batch_size,frames\n1,26\n1,26\n2,51\n")
    assert rows(log, *SHAPE[1:4], "calls") == [(1, 26, "observed", 2), (2, 51, "observed", 1)]
    costs = read_log("target,batch_size,frames,seconds,mib\nqwen3_tts.suffix,4,97,0.5,31\n").captures
    assert costs[["target", "batch_size", "frames", "seconds", "mib"]].to_numpy().tolist() == [["qwen3_tts.suffix", 4, 97, 0.5, 31.0]]


def test_documented_columns_and_a_summary_that_adds_up() -> None:
    replays, fallbacks = [(("suffix_97", 2, 2), 5), (("suffix_97", 4, 3), 2)], [(("suffix_26:no_graph", 3), 4)]
    log = read_log([WORKER + segmented(replays, fallbacks), OTHER + segmented(replays, [])])
    assert list(log.calls) == list(CALLS_COLUMNS)
    assert list(log.captures) == list(CAPTURES_COLUMNS)
    assert list(log.reports) == list(REPORTS_COLUMNS)
    own = log.of_source("vllm-omni segmented")
    assert own["calls"].sum() == log.calls["calls"].sum() == 18
    assert set(own["outcome"]) <= set(OUTCOMES)
    own = own.assign(outcome=own["outcome"].cat.set_categories(list(OUTCOMES)))
    summary = coverage_summary(own)
    assert summary[["calls", "hits", "fallbacks", "errors"]].to_numpy().tolist() == [[18, 14, 4, 0]]
    assert summary["hit_frames"].tolist() == [97 * (2 * 10 + 3 * 4)]
    assert summary["padding_frames"].tolist() == [97 * 4]
