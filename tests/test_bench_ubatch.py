"""The bench of micro-batches: two real ranks over gloo, what is in their record, and how it ends when something is wrong."""

from __future__ import annotations

import io
import json
import multiprocessing
import socket
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bench_ubatch_child
import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from typer.testing import CliRunner

from vgraph_lab.bench import ranks as ranks_module
from vgraph_lab.bench.ranks import Ranks, Watchdog, joined_ranks
from vgraph_lab.bench.record import MeasurementRecord
from vgraph_lab.bench.ubatch import (
    COMMAND,
    RECORD_COLUMNS,
    UBatchSizes,
    bench_ubatch,
    record_table,
    recorded_spans,
    recorded_ubatch,
    where_recorded,
)
from vgraph_lab.bench.ubatch_measure import is_host_bound
from vgraph_lab.bench.ubatch_table import ubatch_table
from vgraph_lab.cli import app, main
from vgraph_lab.commands import bench_shared
from vgraph_lab.errors import ConfigError, InputError, RankLostError
from vgraph_lab.inspect.v1_tables import ubatch_trace_table
from vgraph_lab.vllm_v1 import WorkloadConfig, overlap_s

SMALL = ["--device", "cpu", "--hidden", "16", "--prompts", "2", "--prompt-tokens", "6", "--decode-requests", "3", "--repeats", "2"]


def spawn(target: Any, *args: Any) -> Any:
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["vgraph_lab.vllm_v1"])  # imports torch once, not once per rank
    process = server.Process(target=target, args=args)
    process.start()
    return process


def run(folder: Path, *options: str, size: int = 2, broken: str = "", as_torchrun: bool = False) -> tuple[list[int | None], list[str]]:
    """Exit codes, and what each rank printed. As torchrun does, the others may be ended when rank 0 has failed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [spawn(bench_ubatch_child.main, rank, size, port, folder, list(options), broken) for rank in range(size)]
    try:
        for process in processes:
            process.join(timeout=60)
            if as_torchrun and process.exitcode:
                break
    finally:
        for process in processes:
            process.kill()
    return [process.exitcode for process in processes], [(folder / f"rank-{rank}.txt").read_text() for rank in range(size)]


def test_two_ranks_measure_and_the_first_one_tells(tmp_path: Path) -> None:
    output = tmp_path / "new" / "ubatch.json"
    codes, (first, second) = run(tmp_path, *SMALL, "--output", str(output))
    assert codes == [0, 0], first + second
    record = json.loads(output.read_text())
    told = record["settings"]
    assert told["started_with"].startswith("torchrun --nproc-per-node 2 -m vgraph_lab.cli bench ubatch --device cpu")
    assert record["command"].startswith("vgraph-lab bench ubatch --device cpu")
    assert (told["ranks"], told["backend"], told["num_ubatches"], told["comm_sms"]) == (2, "gloo", 2, 0)
    assert told["exchange_alone_ms"] > 0
    rows = {(row["case"], row["variant"]): row for row in record["rows"]}
    assert list(rows) == [(case, variant) for case in ("prefill", "decode") for variant in ("eager", "eager_ubatch", "piecewise")]
    assert told["absent"] == {"decode full": "a graph cannot hold the exchange over gloo, where the host does that work"}
    for (case, variant), row in rows.items():
        eager = rows[case, "eager"]
        assert row["tokens_per_rank"] == (12 if case == "prefill" else 3)
        assert row["largest_difference"] < 1e-4
        assert row["is_split"] == (variant == "eager_ubatch")
        assert row["mode"] == ("PIECEWISE" if variant == "piecewise" else "NONE")
        assert row["graphs"] == (variant == "piecewise")
        assert (row["graph_hits"] >= 2 + 3 + 1) == (variant == "piecewise")
        assert row["wall_eager_over_this"] == pytest.approx(eager["wall_ms"] / row["wall_ms"])
        assert row["wall_p10_ms"] <= row["wall_ms"] <= row["wall_p90_ms"]
        assert "device_ms" not in row
        if variant == "eager_ubatch":
            assert row["comm_ms"] > 0
            assert row["hidden_percent"] == 0, "on a CPU nothing overlaps"
    assert "eager ubatch" in first
    assert "rank 1, prefill: 0.00 of" in first
    assert second == ""
    kept = recorded_ubatch(output)
    assert kept is not None
    for rank in range(2):
        spans = recorded_spans(kept, rank=rank)
        assert overlap_s(spans) == 0
        names = {name: [span.ubatch for span in spans if span.name == name] for name in ("all-to-all", "attention", "experts")}
        layers = told["model"]["num_layers"]
        assert sorted(names["all-to-all"]) == sorted([0, 1] * 2 * layers)
        assert set(names["attention"]) == set(names["experts"]) == {0, 1}
        assert set(ubatch_trace_table(spans)["hands_to"].dropna()) == {0, 1}
        first_layer = recorded_spans(kept, rank=rank, layers=1)
        assert [span.name for span in first_layer].count("all-to-all") == 2 * 2
        end_s = max(span.end_s for span in first_layer if span.name == "all-to-all")
        assert max(span.end_s for span in first_layer) == end_s
        assert [span.start_s for span in first_layer] == [span.start_s for span in spans if span.start_s < end_s]
        assert recorded_spans(kept, rank=rank, layers=layers) == spans
    with pytest.raises(InputError, match=r"no trace of rank 2\. It has: 0, 1\."):
        recorded_spans(kept, rank=2)
    with pytest.raises(InputError, match="It has: none"):
        recorded_spans(replace(kept, settings={}))
    assert where_recorded(kept).startswith("recorded, not measured here: 2 × CPU, 1 threads, gloo, 20")
    table = record_table(kept)
    assert list(table) == list(RECORD_COLUMNS)
    assert table["gain"].notna().tolist() == [False, True, False] * 2
    assert table["device_ms"].isna().all()


def test_full_graphs_hold_micro_batches_where_nothing_travels(tmp_path: Path) -> None:
    output = tmp_path / "ubatch.json"
    codes, told = run(tmp_path, *SMALL, "--experts", "0", "--ubatches", "3", "--output", str(output))
    assert codes == [0, 0], told
    rows = {row["variant"]: row for row in json.loads(output.read_text())["rows"] if row["case"] == "decode"}
    assert list(rows) == ["eager", "eager_ubatch", "full", "full_ubatch"]
    assert [row["mode"] for row in rows.values()] == ["NONE", "NONE", "FULL", "FULL"]
    assert [row["num_ubatches"] for row in rows.values()] == [1, 3, 1, 3]
    assert all(rows[name]["graph_hits"] >= 2 + 3 + 1 for name in ("full", "full_ubatch"))
    assert rows["full_ubatch"]["wall_whole_over_this"] == pytest.approx(rows["full"]["wall_ms"] / rows["full_ubatch"]["wall_ms"])
    assert all(row["largest_difference"] < 1e-4 for row in rows.values())


def test_a_variant_that_one_rank_cannot_make_is_left_out_by_all(tmp_path: Path) -> None:
    output = tmp_path / "ubatch.json"
    codes, (first, second) = run(tmp_path, *SMALL, "--experts", "0", "--output", str(output), broken="FULL_DECODE_ONLY")
    assert codes == [0, 0], first + second
    record = json.loads(output.read_text())
    why = "rank 1: RuntimeError: no room for graphs"
    assert record["settings"]["absent"] == {"decode full": why, "decode full_ubatch": why}
    assert [row["variant"] for row in record["rows"]] == ["eager", "eager_ubatch", "piecewise", "eager", "eager_ubatch"]
    assert f"no decode full: {why}" in first
    assert "rank 1 has no decode full: RuntimeError: no room for graphs" in second


def test_a_rank_that_cannot_run_at_all_ends_all_with_the_reason(tmp_path: Path) -> None:
    output = tmp_path / "ubatch.json"
    codes, (_, second) = run(tmp_path, *SMALL, "--output", str(output), broken="NONE")
    assert codes == [2, 2]
    assert not output.exists()
    assert "rank 1 has no prefill eager: RuntimeError: no room for graphs" in second


# ------------------------------------------------------------------------------------------------- without processes


def test_one_process_is_told_how_to_start_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr("sys.argv", ["cli.py", "bench", "ubatch", "--device", "cpu"])
    result = CliRunner().invoke(app, ["bench", "ubatch", "--device", "cpu"])
    assert isinstance(result.exception, InputError)
    assert str(result.exception).endswith("torchrun --nproc-per-node 2 -m vgraph_lab.cli bench ubatch --device cpu")


def test_a_record_that_is_there_is_found_before_the_work(tmp_path: Path) -> None:
    there = tmp_path / "there.json"
    there.write_text("{}")
    result = CliRunner().invoke(app, ["bench", "ubatch", "--output", str(there)])
    assert isinstance(result.exception, InputError)
    assert "is there already" in str(result.exception)
    assert there.read_text() == "{}"


BAD_ARGUMENTS = [
    (["--device", "tpu"], "--device tpu: each rank takes a GPU of its own. Accepted: auto, cpu, cuda."),
    (["--ubatches", "1"], "Invalid value for '--ubatches': Input should be greater than or equal to 2"),
    (["--devise", "cpu"], "No such option: --devise"),
]


class Rank:
    """A process that torchrun has started: it notes how long it waits, and for what torchrun's report is."""

    def __init__(self, number: int, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.report, self.waited = folder / "error.json", list[float]()
        for name, value in {"WORLD_SIZE": "2", "RANK": f"{number}", "LOCAL_RANK": f"{number}", "LOCAL_WORLD_SIZE": "2"}.items():
            patch.setenv(name, value)
        patch.setenv("TORCHELASTIC_RUN_ID", "none")  # torchrun's default
        patch.setenv("TORCHELASTIC_ERROR_FILE", str(self.report))
        patch.setattr(bench_shared.time, "sleep", self.waited.append)
        self._patch = patch

    def run(self, *options: str) -> object:
        """The exit code."""
        self._patch.setattr("sys.argv", ["vgraph-lab", "bench", "ubatch", *options])
        with pytest.raises(SystemExit) as stop:
            main()
        return stop.value.code


@pytest.mark.parametrize(("options", "message"), BAD_ARGUMENTS)
def test_rank_0_tells_at_once_what_is_wrong_with_arguments(
    options: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rank = Rank(0, tmp_path, monkeypatch)
    assert rank.run(*options) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert rank.waited == []
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file=str(rank.report))
    assert message in ChildFailedError("bench", {0: failure}).format_msg(), "torchrun's report repeats it"


@pytest.mark.parametrize(("options", "message"), BAD_ARGUMENTS)
def test_another_rank_waits_for_its_end_and_speaks_only_if_rank_0_has_found_nothing(
    options: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class EndedError(BaseException):
        """By torchrun's signal."""

    def end(_: float) -> None:
        raise EndedError

    rank = Rank(1, tmp_path, monkeypatch)
    assert rank.run(*options) == 2
    assert len(rank.waited) == 1
    assert message in " ".join(capsys.readouterr().err.split())
    monkeypatch.setattr(bench_shared.time, "sleep", end)
    with pytest.raises(EndedError):
        main()
    told = capsys.readouterr()
    assert told.out + told.err == ""
    assert not rank.report.exists()


def test_a_rank_that_torchrun_has_not_started_speaks_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rank = Rank(1, tmp_path, monkeypatch)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    assert rank.run("--devise", "cpu") == 2
    assert rank.waited == []
    assert "--devise" in capsys.readouterr().err


def test_a_report_that_cannot_be_written_hides_no_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rank = Rank(0, tmp_path, monkeypatch)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "nowhere" / "error.json"))
    assert rank.run("--devise", "cpu") == 2
    assert "--devise" in capsys.readouterr().err


def test_help_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(1, tmp_path, monkeypatch)
    assert rank.run("--help") == 0
    assert rank.waited == []


def test_two_ranks_tell_once_of_experts_that_they_cannot_divide(tmp_path: Path) -> None:
    codes, told = run(tmp_path, *SMALL, "--experts", "3", as_torchrun=True)
    assert codes[0] == 2
    assert told == ["error: 3 experts cannot be divided among 2 ranks. Use a multiple of the ranks.\n", ""]


def test_devices_that_are_not_for_all_ranks_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with (
        pytest.raises(InputError, match=r"--device cuda:1: each rank takes a GPU of its own\. Accepted: auto, cpu, cuda"),
        joined_ranks("cuda:1"),
    ):
        pass
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="2 ranks on this host, and 1 GPUs"), joined_ranks("cuda"):
        pass


def test_a_rank_that_is_stuck_says_where_and_ends(tmp_path: Path) -> None:
    process = spawn(bench_ubatch_child.stuck, tmp_path)
    process.join(timeout=30)
    process.kill()
    assert process.exitcode == 3
    told = (tmp_path / "stuck.txt").read_text()
    assert "rank 1 has been in stage 'waiting for nobody' for 0.1 s and ends here" in told
    assert "in stuck" in told  # the place of its thread


@pytest.mark.parametrize("wait", [Ranks.barrier, lambda ranks: ranks.gather(1)])
def test_a_rank_that_waits_in_vain_says_so(monkeypatch: pytest.MonkeyPatch, wait: Any) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(dist, "barrier", fail)
    monkeypatch.setattr(dist, "all_gather_object", fail)
    group: Any = None
    ranks = Ranks(0, 2, torch.device("cpu"), group, None, Watchdog(0))
    with pytest.raises(RankLostError, match=r"rank 0 waits for another one that has ended, .*look at its messages. \(Connection closed"):
        wait(ranks)


def test_without_a_record_it_is_said_how_to_make_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert recorded_ubatch(tmp_path / "none.json") is None
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert where_recorded(None) == f"no recording is at hand. Measure on the 2 GPUs of this machine: {COMMAND}"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert "has not got two GPUs" in where_recorded(None)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is no record of a bench"),
        ('{"bench": "ubatch"}', "is no record of a bench"),
        ('{"bench": "v1", "settings": {}, "rows": [], "machine": {}}', "is a record of 'vgraph-lab bench v1'"),
    ],
)
def test_other_files_are_no_records(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(content)
    with pytest.raises(InputError, match=words):
        recorded_ubatch(path)


@pytest.mark.parametrize(
    ("sizes", "arguments", "words"),
    [
        ({"prompts": 0}, {}, "at least 1, and 2 repeats"),
        ({}, {"repeats": 1}, "and 1; at least 1, and 2 repeats"),
        ({}, {"num_ubatches": 1}, "there must be two or more micro-batches, and at least one token for each"),
        ({"decode_requests": 2}, {"num_ubatches": 3}, "3 micro-batches of a step of 2 decoded requests"),
        ({"model": WorkloadConfig(num_experts=3)}, {}, "3 experts cannot be divided among 2 ranks"),
    ],
)
def test_sizes_that_are_refused(sizes: dict[str, Any], arguments: dict[str, int], words: str) -> None:
    two: Any = SimpleNamespace(size=2)
    with pytest.raises(InputError, match=words):
        bench_ubatch(two, replace(UBatchSizes.cpu(), **sizes), **arguments)


def test_settings_of_one_host_leave_those_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert ranks_module._is_one_host(2)
    assert not ranks_module._is_one_host(4)


def test_the_table_of_a_gpu_says_device_times_and_what_was_hidden() -> None:
    spread = {f"{kind}_{key}": 2.0 for kind in ("wall", "host", "device") for key in ("ms", "p10_ms", "p90_ms")}
    rows = [
        {"case": "prefill", "variant": "eager", **spread},
        {
            "case": "prefill",
            "variant": "eager_ubatch_sms",
            **spread,
            "device_whole_over_this": 1.125,
            "comm_ms": 8.0,
            "hidden_percent": 75.0,
        },
    ]
    trace = {"rank": 0, "case": "prefill", "overlap_ms": 6.0, "comm_ms": 8.0, "hidden_percent": 75.0}
    settings = {"ranks": 2, "backend": "nccl", "dtype": "bfloat16", "model": {"num_experts": 8}, "repeats": 20, "exchange_alone_ms": 7.5}
    settings |= {"traces": [trace], "absent": {"decode full": "rank 0: CaptureError: [no] room"}}
    record = MeasurementRecord("ubatch", settings, rows, {"card": "NVIDIA H200", "cuda": "13.0"})
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(ubatch_table(record))
    shown = console.export_text()
    for words in ("2 × NVIDIA H200, nccl", "device", "1.12", "75 %", "6.00 of 8.00 ms of communication", "[no] room", "alone: 7.50 ms"):
        assert words in shown


def test_a_step_that_waits_for_the_host_tells_nothing_of_overlap() -> None:
    """Spans of a trace include the device's waits for the host: more communication than the whole step takes."""
    times = {"wall_ms": 45.6, "wall_p10_ms": 45.0, "wall_p90_ms": 46.0, "device_ms": 4.2, "host_ms": 45.5}
    split = {"variant": "eager_ubatch", "comm_ms": 6.45, "overlap_ms": 0.0, "hidden_percent": 12.0}
    rows = [
        {"case": "decode", **times, **split},
        {"case": "prefill", **times, **split, "device_ms": 76.0, "comm_ms": 9.0, "hidden_percent": 90.0},
    ]
    settings = {"ranks": 2, "backend": "nccl", "dtype": "bfloat16", "model": {"num_experts": 8}, "repeats": 20, "exchange_alone_ms": 7.5}
    record = MeasurementRecord("ubatch", settings | {"traces": [], "absent": {}}, rows, {"card": "NVIDIA H200", "cuda": "13.0"})
    table = record_table(record)
    assert table[["comm_ms", "hidden_percent"]].isna().all(axis=1).tolist() == [True, False]
    assert table.loc[1, ["comm_ms", "hidden_percent"]].tolist() == [9.0, 90.0]
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(ubatch_table(record))
    shown = console.export_text()
    assert "90 %" in shown
    assert "12 %" not in shown
    assert not is_host_bound({"host_ms": 2.0, "wall_ms": 1.0}), "on a CPU no device waits"


def test_the_record_of_two_gpus_tells_of_overlap_in_prefill_only() -> None:
    record = recorded_ubatch()
    assert record is not None
    table = record_table(record)
    assert table.groupby("case")["hidden_percent"].count().to_dict() == {"decode": 0, "prefill": 2}
