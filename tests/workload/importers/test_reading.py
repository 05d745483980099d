"""How logs are read: prefixes, repetition, damage, size and bad input."""

from __future__ import annotations

import gzip
import json
import re
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from workload.importers.excerpts import API, ENGINE, NOISE, OTHER, WORKER, capture, runner_stats, segmented, table

from vgraph_lab.errors import InputError
from vgraph_lab.qwen3_tts.settings import TARGET_IDS
from vgraph_lab.workload import read_log
from vgraph_lab.workload.importers.prefixes import split_prefix

Counts = dict[tuple[Any, ...], int]


@pytest.mark.parametrize(
    ("line", "process"),
    [
        ("message: a=1", ""),
        ("INFO 12-19 22:58:27 model_runner.py:1415] message: a=1", ""),
        ("INFO 08-14 12:59:46 [gpu_model_runner.py:2592]                         message: a=1", ""),
        ("(EngineCore_DP0 pid=997479) [Stage-2] WARNING 12-30 09:34:05 [vllm.py:608] message: a=1", "EngineCore_DP0 pid=997479 Stage-2"),
        ("(Worker pid=26) (Worker pid=26) [Stage-1] INFO 03-14 15:41:06 [a_b.py:94]   message: a=1", "Worker pid=26 Stage-1"),
        ("\x1b[0;36m(EngineCore pid=7)\x1b[0;0m INFO 03-14 15:41:06 [compilation/cuda_graph.py:108] message: a=1", "EngineCore pid=7"),
        ("pid=4711 message: a=1", "pid=4711"),
        ("[2026-08-26 10:00:00 TP0] message: a=1", "TP0"),
        ("[2026-08-26 10:00:00 DP1 TP0] message: a=1", "DP1 TP0"),
        ("worker-1  | (Worker pid=1) INFO 03-14 15:41:06 [a.py:1] message: a=1", "worker-1 Worker pid=1"),
        ("2026-09-01T12:00:00.123Z stdout F (Worker pid=1) message: a=1", "Worker pid=1"),
        ("2026-09-01 12:00:00,123 INFO message: a=1", ""),
        ("(Worker_TP0 pid=3) [vllm-rbln] INFO 2026-06-26 12:18:39,273 [metrics.py:181] message: a=1", "Worker_TP0 pid=3"),
    ],
)
def test_prefixes(line: str, process: str) -> None:
    assert split_prefix(line) == (process, "message: a=1")


# ------------------------------------------------------------------------------------------------ repetition


def reports_of(history: list[Counts]) -> list[str]:
    """Cumulative lines of one process after each step of its history."""
    total: Counter[tuple[Any, ...]] = Counter()
    lines = []
    for step in history:
        total.update(step)
        replays = [(key, n) for key, n in total.items() if len(key) == 3]
        fallbacks = [(key, n) for key, n in total.items() if len(key) == 2]
        lines.append(segmented(replays, fallbacks))
    return lines


keys = st.sampled_from([("suffix_97", 2, 2), ("suffix_97", 4, 3), ("icl_prefix", 1, 1), ("suffix_26:no_graph", 3)])
steps = st.dictionaries(keys, st.integers(1, 5), min_size=1, max_size=3)


@given(data=st.data(), lives=st.lists(st.lists(steps, min_size=1, max_size=4), min_size=1, max_size=3), other=st.lists(steps, max_size=4))
def test_cumulative_counters_of_processes_that_alternate_and_restart(
    data: st.DataObject, lives: list[list[Counts]], other: list[Counts]
) -> None:
    """The last report of each life counts. A life that begins nowhere below the last one looks like its continuation."""
    worker: list[str] = []
    expected: Counter[str] = Counter()
    before: Counter[Any] = Counter()
    for history in lives:
        first = Counter(history[0])
        if all(first[key] >= n for key, n in before.items()):
            expected.subtract({"suffix_97 or so": before.total()})
        total: Counter[Any] = Counter()
        for step in history:
            total.update(step)
        expected.update({"suffix_97 or so": total.total()})
        before = total
        worker += [WORKER + line for line in reports_of(history)]
    others = [OTHER + line for line in reports_of(other)]
    mixed: list[str] = []
    while worker or others:
        source = worker if not others or (worker and data.draw(st.booleans())) else others
        mixed += [source.pop(0), NOISE]
    log = read_log(mixed)
    by_process = log.calls.groupby("process")["calls"].sum().to_dict()
    assert by_process.pop("Worker pid=4242 Stage-1") == expected["suffix_97 or so"]
    assert sum(by_process.values()) == sum(sum(step.values()) for step in other)
    assert log.lines.malformed == 0


def test_a_restart_is_told() -> None:
    lines = [*reports_of([{("icl_prefix", 1, 1): 50}] * 2), *reports_of([{("icl_prefix", 1, 1): 7}] * 3)]
    log = read_log([WORKER + line for line in lines])
    assert log.calls["calls"].tolist() == [121]
    assert log.reports[["reports", "runs"]].to_numpy().tolist() == [[5, 2]]
    assert "5 cumulative reports in 2 runs, the last report of each run counts: 121 calls" in str(log)


def test_processes_without_names_are_told_apart_by_their_counters() -> None:
    one = reports_of([{("suffix_97", 2, 2): 10, ("icl_prefix", 1, 1): 1}] * 3)
    two = reports_of([{("suffix_97", 2, 2): 4, ("icl_prefix", 1, 1): 3}] * 3)
    log = read_log([line for pair in zip(one, two, strict=True) for line in pair])
    assert log.calls.set_index("phase")["calls"].to_dict() == {"suffix_97": 42, "icl_prefix": 12}
    assert log.reports["runs"].tolist() == [2]


def test_the_caller_may_know_better() -> None:
    lines = [WORKER + line for line in reports_of([{("icl_prefix", 1, 1): 5}] * 3)]
    assert read_log(lines).calls["calls"].sum() == 15
    assert read_log(lines, repetition="interval").calls["calls"].sum() == 5 + 10 + 15
    tables = [API + line for n in (5, 9) for line in table([(1, 1, "FULL", n)])]
    assert read_log(tables).calls["calls"].sum() == 14
    assert read_log(tables, repetition="cumulative").calls["calls"].sum() == 9


def test_a_shape_that_leaves_the_list_keeps_its_last_count() -> None:
    first = [((f"suffix_{100 - i}", 1, 1), 2) for i in range(20)]
    later = [((f"suffix_{200 - i}", 1, 1), 3) for i in range(20)]
    second = segmented(later, []).replace("requests=60 hits=60", "requests=105 hits=105")
    log = read_log([WORKER + segmented(first, []), WORKER + second])
    assert log.calls["calls"].sum() == 40 + 60
    assert log.reports[["runs", "unlisted"]].to_numpy().tolist() == [[1, 5]]


# ------------------------------------------------------------------------------------------------ damage

WHOLE = [
    WORKER + segmented([(("suffix_97", 2, 2), 5)], [(("suffix_26:no_graph", 3), 4)]),
    *(API + line for line in table([(3, 4, "FULL", 10), (8, 8, "PIECEWISE", 2)])),
    *(ENGINE + line for line in capture(464, 0.057, 26.0)),
    json.dumps(runner_stats(graph_replays=3)),
]


@given(line=st.integers(0, len(WHOLE) - 1), cut=st.integers(0, 400))
def test_a_cut_line_is_never_fatal_and_all_lines_add_up(line: int, cut: int) -> None:
    lines = list(WHOLE)
    lines[line] = lines[line][:cut]
    log = read_log(lines)
    counts = log.lines
    assert counts.read == counts.recognised + counts.ignored + counts.malformed == len(lines)
    assert counts.malformed >= len(log.malformed)
    assert log.calls["calls"].sum() <= read_log(WHOLE).calls["calls"].sum(), "damage invents no call"


@given(st.lists(st.text(max_size=60) | st.sampled_from([line[i:] + line[:i] for line in WHOLE for i in (5, 90)]), max_size=8))
def test_any_text_is_read_or_refused(lines: list[str]) -> None:
    with suppress(InputError):  # the first line may open a JSON object that swallows the last one
        assert read_log([*lines, WHOLE[0]]).lines.read == len(lines) + 1


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (segmented([(("icl_prefix", 4, 3), 2)], [])[:-40], "the line is cut"),
        (segmented([(("icl_prefix", 4, 3), 2)], []).replace("hits=6", "hits=5"), "hits=5 and fallbacks=0 do not add up to requests=6"),
        (segmented([(("icl_prefix", 4, 3), 2)], []).replace("=6", "=9").replace("3), 2", "3), 2"), "replays lists 6, the total is 9"),
        (segmented([(("icl_prefix", 2, 3), 2)], []), "replays has a key of another kind"),
        (segmented([(("icl_prefix", 4, 3), 2)], []).replace("3), 2)", "3), 2), (('icl_prefix', 4, 3), 2)"), "replays names a key twice"),
        (segmented([], []).replace("replays=[]", "replays=[__import__('os').getcwd()]"), "replays is cut or damaged"),
        (segmented([], []).replace("replays=[]", "replays=[1]"), r"replays is not a list of \(key, count\)"),
        (segmented([], []).replace("replays=[]", f"replays=[{'(' * 3000}]"), "replays is cut or damaged"),
        (segmented([], []).replace("replays=[]", f"replays=[{'1,' * 40000}]"), "replays is longer than 65536 characters"),
        ('{"schema_version": 2, "graph_replays": 3, "fallback_counts": {}}', "telemetry of version 2; this release reads up to 1"),
        ('{"graph_replays": -3, "fallback_counts": {}}', "graph_replays must be whole numbers from 0, got -3"),
        ('{"graph_replays": 3, "fallback_counts": {"key_miss": 1}', "the JSON object is cut"),
        ('{"replays": {"ten": 3}, "fallbacks": {}}', "replays has a key that is no shape: 'ten'"),
        ('{"replay_count": 5, "replay_buckets": {"16": 2}}', "add up to 2, replay_count is 5"),
        ('{"replay_count": 5, "replay_buckets": {"wide": 2}}', "replay_buckets is no histogram"),
        ('{"batch_size": 1, "frames": 2.5}', "frames must be a whole number from 1, got 2.5"),
        ('{"batch_size": 1, "frames": null}', "but one is empty"),
        ('{"batch_size": 1, "frames": 2, "outcome": "maybe"}', "outcome is 'maybe'; accepted are exact hit"),
        ('{"batch_size": true, "frames": 2}', "batch_size must be a number, got True"),
        ("Graph capturing for many input tokens", "the line of a capture is cut"),
    ],
)
def test_malformed_lines_are_counted_and_shown(line: str, why: str) -> None:
    log = read_log([WHOLE[0], NOISE, line])
    assert (log.lines.recognised, log.lines.ignored, log.lines.malformed) == (1, 1, 1)
    (shown,) = log.malformed
    assert shown.line == 3
    assert shown.text.startswith(line[:150])
    assert len(shown.text) <= 201
    assert re.search(why, shown.why)
    assert f"line 3: {shown.why}" in str(log)


def test_rows_of_a_csv_that_are_none() -> None:
    log = read_log("batch_size,frames,calls\n1,26,4\n1,26\n\n0,26,4\n1,26,x\n")
    assert log.calls["calls"].tolist() == [4]
    assert [(line.line, line.why) for line in log.malformed] == [
        (3, "2 cells in a table of 3 columns"),
        (5, "batch_size must be a whole number from 1, got '0'"),
        (6, "calls must be a number, got 'x'"),
    ]
    assert (log.lines.read, log.lines.ignored) == (6, 1)


def test_only_the_first_malformed_lines_are_kept() -> None:
    log = read_log([WHOLE[0], *["Segmented Code2Wav CUDA Graph stats: requests="] * 500])
    assert log.lines.malformed == 500
    assert len(log.malformed) == 10


# ------------------------------------------------------------------------------------------------ size


def test_a_long_log_is_not_held_in_memory() -> None:
    """Lines come one by one: at most one is ahead of what was taken, and memory does not grow with them."""
    count, alive = 30_000, 0
    peaks: list[int] = []

    class Line(str):
        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    def log() -> Iterator[str]:
        nonlocal alive
        for i in range(count):
            alive += 1
            if i % (count // 10) == 0:
                peaks.append(tracemalloc.get_traced_memory()[0])
                assert alive <= 3
            yield Line(WORKER + segmented([(("suffix_97", 2, 2), i + 1)], []) if i % 10 == 0 else f"{NOISE} {i}")

    tracemalloc.start()
    try:
        result = read_log(log())
    finally:
        tracemalloc.stop()
    assert result.lines.read == count
    assert result.reports["reports"].tolist() == [count // 10]
    assert result.calls["calls"].tolist() == [count - 9]
    assert peaks[-1] < 1_000_000, f"{count} lines are {count * 130:,} bytes"


def test_a_line_without_end_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_bytes(b"x" * 3_000_000 + b"\n" + WHOLE[0].encode() + b"\n")
    assert read_log(path).lines.read == 2


# ------------------------------------------------------------------------------------------------ sources and bad input


def test_a_path_a_text_and_lines_are_the_same(tmp_path: Path) -> None:
    text = "\n".join(WHOLE) + "\n"
    plain, packed = tmp_path / "server.log", tmp_path / "server.log.gz"
    plain.write_text(text)
    packed.write_bytes(gzip.compress(text.encode()))
    expected = read_log(text)
    for source in (plain, str(plain), packed, text.splitlines(), iter(text.splitlines(keepends=True)), text.replace("\n", "\r\n")):
        log = read_log(source)
        assert log.calls.equals(expected.calls)
        assert log.lines == expected.lines
    assert read_log(plain).name == str(plain)
    assert read_log(plain, name="mine").name == "mine"


def test_bytes_that_are_no_text_spoil_only_their_line(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_bytes(b"caf\xe9 \xff\n" + WHOLE[0].encode())
    assert read_log(path).lines.recognised == 1


def test_logs_that_are_none(tmp_path: Path) -> None:
    empty, binary, other = tmp_path / "empty.log", tmp_path / "model.bin", tmp_path / "other.log"
    empty.write_text("")
    binary.write_bytes(b"\x7fELF\0\0\0")
    other.write_text(f"{NOISE}\nSegmented Code2Wav CUDA Graph stats: requests=\n")
    with pytest.raises(InputError, match=r"empty\.log is empty"):
        read_log(empty)
    with pytest.raises(InputError, match="the log is empty"):
        read_log("")
    with pytest.raises(InputError, match=r"model\.bin is binary \(or UTF-16\), not a log"):
        read_log(binary)
    with pytest.raises(InputError, match=r"no usable line \(2 lines read: 0 recognised, 1 ignored, 1 malformed\)") as caught:
        read_log(other)
    assert "--cudagraph-metrics" in str(caught.value)
    assert "line 2: the line is cut or mixed with another" in str(caught.value)
    for missing in (tmp_path / "none.log", str(tmp_path / "none.log"), "none.log", tmp_path):
        with pytest.raises(InputError, match="cannot be read"):
            read_log(missing)
    (tmp_path / "cut.gz").write_bytes(gzip.compress(WHOLE[0].encode())[:20])
    with pytest.raises(InputError, match="cannot be read"):
        read_log(tmp_path / "cut.gz")
    with pytest.raises(InputError, match="lines must be text, got bytes"):
        read_log([b"bytes"])  # type: ignore[list-item]
    with pytest.raises(InputError, match="repetition is 'twice'; accepted are 'auto', 'cumulative', 'interval'"):
        read_log(WHOLE, repetition="twice")  # type: ignore[arg-type]


def test_a_newer_telemetry_alone_says_so() -> None:
    with pytest.raises(InputError, match="telemetry of version 7; this release reads up to 1"):
        read_log(json.dumps({**runner_stats(), "schema_version": 7}))


def test_unknown_targets_and_sources() -> None:
    log = read_log([segmented([(("icl_prefix", 1, 1), 2), (("icl_prefixes", 1, 1), 1)], [])])
    with pytest.raises(InputError, match=r"unknown Targets: 'qwen3_tts\.icl_prefixes' Did you mean 'qwen3_tts\.icl_prefix'"):
        log.check_targets(TARGET_IDS)
    read_log(WHOLE[:1]).check_targets(TARGET_IDS)
    with pytest.raises(InputError, match=r"no calls of source 'segmented'.* It has: vllm-omni segmented"):
        log.of_source("segmented")
