"""The command line: what it prints, and the exit codes that scripts rely on."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from vgraph_lab.bench.own_contenders import OWN
from vgraph_lab.cli import app, main
from vgraph_lab.errors import InputError
from vgraph_lab.inspect import Recording, entries_table

runner = CliRunner()


def test_doctor_says_which_backend_and_why() -> None:
    result = runner.invoke(app, ["doctor", "--device", "cpu", "--json"])
    assert result.exit_code == 0, result.output
    checks = {check["name"]: check for check in json.loads(result.output)}
    assert checks["capture"]["is_ok"]
    assert checks["capture"]["finding"].startswith("cpu: replay equals eager")
    assert checks["bundled checkpoint"]["is_ok"]
    assert "torch" in json.loads(runner.invoke(app, ["doctor", "--json"]).output)[3]["finding"]


def test_doctor_fails_for_a_device_that_is_not_there() -> None:
    result = runner.invoke(app, ["doctor", "--device", "cuda:99", "--json"])
    assert result.exit_code == 1
    capture = next(check for check in json.loads(result.output) if check["name"] == "capture")
    assert capture["is_ok"] is False
    assert "cuda" in capture["finding"]


def test_a_device_of_no_known_kind_is_bad_input(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (
        ["doctor", "--device", "gpu"],
        ["doctor", "--device", "cpu:3"],
        ["voice", "--device", "gpu"],
        ["bench", "stateless", "--device", "gpu"],
        ["bench", "streaming", "--device", "gpu"],
        ["bench", "service", "--device", "gpu"],
    ):
        monkeypatch.setattr(sys, "argv", ["vgraph-lab", *command])
        with pytest.raises(SystemExit) as stop:
            main()
        assert stop.value.code == 2, command
        assert "Accepted: 'auto'" in " ".join(capsys.readouterr().err.split())


def test_report_that_cannot_be_written_is_bad_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(sys, "argv", ["vgraph-lab", "tour", "--output", str(tmp_path / "file" / "tour.html")])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert "cannot be written" in " ".join(capsys.readouterr().err.split())


def test_record_that_cannot_be_written_is_found_out_first(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("vgraph_lab.bench.stateless.bench_stateless", lambda *args, **kwargs: pytest.fail("the work was done"))
    arguments = ["bench", "stateless", "--checkpoint", str(tiny_folder), "--device", "cpu", "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["vgraph-lab", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert "cannot be written" in " ".join(capsys.readouterr().err.split())


SMALL = ["--chunk-frames", "16", "--context-frames", "16", "--repeats", "1"]
TINY_BENCHES = {
    "streaming": ["--frames", "18", "--batch-sizes", "1", "--modes", "xvec", *SMALL],
    "service": ["--requests", "1", "--concurrency", "1", "--kind", "xvec", "--algorithm", "incremental", "--form", "plain", *SMALL],
}


@pytest.mark.parametrize("bench", TINY_BENCHES)
def test_streaming_benches_print_and_write_a_record(tiny_folder: Path, tmp_path: Path, bench: str) -> None:
    output = tmp_path / "record.json"
    arguments = ["bench", bench, "--checkpoint", str(tiny_folder), "--device", "cpu", *TINY_BENCHES[bench], "--output", str(output)]
    result = runner.invoke(app, [*arguments, *(["--json"] if bench == "streaming" else [])])
    assert result.exit_code == 0, result.output
    record = json.loads(output.read_text())
    if bench == "streaming":
        assert json.loads(result.stdout) == record
    else:
        assert "mean ttfp ms" in result.stdout
    assert record["bench"] == bench
    assert record["settings"]["weights"] == str(tiny_folder)
    assert record["settings"]["dtype"] == "float32", "the default on a CPU"
    assert record["settings"]["connector"] == {
        "codec_chunk_frames": 16, "initial_codec_chunk_frames": 1, "codec_left_context_frames": 16, "codec_chunk_ramp": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["streaming", "--modes", "icl,vec"], "accepted are 'icl' and 'xvec'"),
        (["streaming", "--modes", ""], "modes are ['']; accepted are 'icl' and 'xvec'"),
        (["streaming", "--form", "fast"], "form 'fast' is one of incremental decoding"),
        (["service", "--form", "plain"], "form 'plain' is one of incremental decoding"),
        (["service", "--talker-frames-per-s", "0"], "talker_frames_per_s must be above 0"),
        (["service", "--checkpoint", "nowhere"], "nowhere"),
    ],
)
def test_benches_refuse_what_cannot_be_measured(
    tiny_folder: Path, arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--checkpoint", str(tiny_folder), "--concurrency", "1"] if arguments[0] == "service" else ["--checkpoint", str(tiny_folder)]
    monkeypatch.setattr(sys, "argv", ["vgraph-lab", "bench", arguments[0], "--device", "cpu", *given, *SMALL, *arguments[1:]])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


BENCHES = ["stateless", "streaming", "service", "compare", "v1", "ubatch", "planner"]


def test_benches_are_all_there() -> None:
    (group,) = [group for group in app.registered_groups if group.name == "bench"]
    assert group.typer_instance is not None
    assert [command.callback.__name__ for command in group.typer_instance.registered_commands if command.callback] == BENCHES


@pytest.mark.parametrize("bench", BENCHES)
def test_help_of_benches_cuts_nothing_at_eighty_columns(bench: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    result = runner.invoke(app, ["bench", bench, "--help"], color=False)
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "…" not in result.stdout
    if bench == "compare":
        words = set(result.stdout.replace(",", " ").replace(";", " ").replace(".", " ").split())
        assert {*OWN, "qwen-tts"} <= words


@pytest.mark.parametrize("option", ["--frames", "--repeats"])
def test_benches_refuse_numbers_below_one(option: str) -> None:
    assert runner.invoke(app, ["bench", "streaming", "--device", "cpu", option, "0"]).exit_code == 2


# ---------------------------------------------------------------------------------------------------- recordings

STAGE = """\
connector: {codec_chunk_frames: 5, initial_codec_chunk_frames: 2, codec_left_context_frames: 16}
max_num_seqs: 2
vocoder_cudagraph:
  capture_batch_sizes: [1]
  num_warmups: 1
  targets:
    qwen3_tts.suffix: {enabled: false}
"""


def stopped(arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[object, str]:
    """Exit code and error output of the installed command's entry point."""
    monkeypatch.setattr(sys, "argv", ["vgraph-lab", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    return stop.value.code, " ".join(capsys.readouterr().err.split())


@pytest.fixture(scope="module")
def recorded(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A recording that the command wrote, and the JSON that it printed."""
    folder = tmp_path_factory.mktemp("capture")
    (folder / "stage.yaml").write_text(STAGE)
    output = folder / "one.vgl"
    arguments = ["capture", "--config", str(folder / "stage.yaml"), "--checkpoint", str(tiny_folder), "--device", "cpu"]
    result = runner.invoke(app, [*arguments, "--profile", "--modules", "--requests", "1", "--output", str(output), "--json"])
    assert result.exit_code == 0, result.output
    return output, json.loads(result.stdout)


def test_capture_writes_what_it_prints(recorded: tuple[Path, dict[str, Any]]) -> None:
    output, printed = recorded
    loaded = Recording.load(output)
    assert printed["output"] == str(output)
    assert (printed["capture"]["captured"], printed["capture"]["skipped"]) == (2, 8)
    assert [row["descriptor"] for row in printed["entries"]] == entries_table(loaded)["descriptor"].tolist()
    assert printed["calls"] == loaded.stats.calls() > 0
    assert printed["estimates"][-1]["error_mib"] == 0
    assert loaded.memory_before is not None
    assert loaded.memory_before.pool_bytes == 0
    assert all(graph.modules for graph in loaded.graphs if graph.cost)


def test_capture_says_what_is_missing_by_its_exit_code(tiny_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "stage.yaml").write_text("async_chunk: false\nvocoder_cudagraph: {capture_batch_sizes: [1], max_memory_bytes: 10}\n")
    arguments = ["capture", "--config", str(tmp_path / "stage.yaml"), "--checkpoint", str(tiny_folder), "--device", "cpu"]
    result = runner.invoke(app, [*arguments, "--requests", "1"])
    assert result.exit_code == 1, result.output
    assert "DEGRADED: 0 of 2 graphs captured" in result.stdout
    assert "(over_budget" in result.stdout


def test_coverage_of_a_recording(recorded: tuple[Path, dict[str, Any]]) -> None:
    output, printed = recorded
    result = runner.invoke(app, ["coverage", str(output), "--against", str(output), "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["calls"] == printed["calls"] == sum(row["calls"] for row in found["coverage"])
    assert {row["reason"] for row in found["uncovered"]} == {"disabled"}
    assert found["drift"]["distance"] == 0
    assert found["hit_rate"] == sum(row["hits"] for row in found["summary"]) / found["calls"]
    assert runner.invoke(app, ["coverage", str(output), "--min-hit-rate", "0.99"]).exit_code == 1
    told = runner.invoke(app, ["coverage", str(output)])
    assert told.exit_code == 0
    assert "not covered" in told.stdout
    assert "disabled" in told.stdout


def test_inspect_shows_graphs_memory_and_one_graph(recorded: tuple[Path, dict[str, Any]]) -> None:
    output, printed = recorded
    found = json.loads(runner.invoke(app, ["inspect", str(output), "--json"]).stdout)
    assert found["entries"] == printed["entries"]
    sizes = {row["part"]: row["now_mib"] for row in found["ledger"]}
    assert sum(size for part, size in sizes.items() if part != "total") == sizes["total"]
    one = json.loads(runner.invoke(app, ["inspect", str(output), "--entry", "qwen3_tts.icl_prefix B1×T2", "--json"]).stdout)
    assert one["entry"] == "qwen3_tts.icl_prefix B1×T2"
    assert sum(one["kinds"].values()) == one["nodes"] == sum(row["nodes"] for row in one["modules"]) == printed["entries"][0]["nodes"]
    dot = runner.invoke(app, ["inspect", str(output), "--entry", "1", "--dot", "--no-collapse"]).stdout
    assert dot.startswith('digraph "qwen3_tts.icl_prefix B1×T2" {')
    assert dot.count("[label=") == one["nodes"]


@pytest.mark.parametrize("arguments", [["inspect"], ["inspect", "--entry", "1"], ["coverage"]])
def test_tables_fit_eighty_columns(recorded: tuple[Path, dict[str, Any]], arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    result = runner.invoke(app, [arguments[0], str(recorded[0]), *arguments[1:]])
    assert result.exit_code == 0, result.output
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "…" not in result.stdout


def test_recordings_are_not_written_over(
    recorded: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output, _ = recorded
    before = output.read_bytes()
    monkeypatch.setattr("vgraph_lab.qwen3_tts.checkpoint.load_decoder", lambda *args: pytest.fail("the work was done"))
    code, message = stopped(["capture", "--device", "cpu", "--output", str(output)], monkeypatch, capsys)
    assert code == 2
    assert "nothing is written over" in message
    assert output.read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["coverage", "NEW"], "cannot be read"),
        (["inspect", "EMPTY"], "is empty"),
        (["coverage", "QUIET"], "counts no calls"),
        (["coverage", "RECORDED", "--against", "QUIET"], "the planned histogram has no calls"),
        (["inspect", "RECORDED", "--entry", "99"], "there is no entry 99"),
        (["inspect", "RECORDED", "--entry", "B9×T9"], "no entries are 'B9×T9'"),
        (["inspect", "RECORDED", "--entry", "3"], "has no graph (disabled"),
        (["inspect", "RECORDED", "--dot"], "--entry"),
        (["capture", "--device", "cpu", "--config", "NEW"], "NEW"),
        (["capture", "--device", "cpu", "--checkpoint", "NEW"], "NEW"),
    ],
)
def test_what_cannot_be_read_is_bad_input(
    recorded: tuple[Path, dict[str, Any]],
    tmp_path: Path,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "EMPTY").write_bytes(b"")
    replace(Recording.load(recorded[0]), calls=()).save(tmp_path / "QUIET")
    places = {name: str(tmp_path / name) for name in ("NEW", "EMPTY", "QUIET")} | {"RECORDED": str(recorded[0])}
    code, told = stopped([places.get(argument, argument) for argument in arguments], monkeypatch, capsys)
    assert code == 2
    assert message.replace(" ", "") in told.replace(" ", "")
    assert not (tmp_path / "NEW").exists()


def test_version() -> None:
    import vgraph_lab

    assert runner.invoke(app, ["--version"]).output.strip() == vgraph_lab.__version__


def test_bench_prints_a_table_and_writes_a_record(tiny_folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "record.json"
    arguments = [
        "bench",
        "stateless",
        "--checkpoint",
        str(tiny_folder),
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "--frames",
        "3",
        "--batch-sizes",
        "1",
    ]
    result = runner.invoke(app, [*arguments, "--repeats", "2", "--output", str(output)])
    assert result.exit_code == 0, result.output
    assert "eager ÷ handle" in result.output
    assert json.loads(output.read_text())["rows"][0]["frames"] == 3


def test_the_planner_s_bench_prints_a_table_and_writes_a_record(tmp_path: Path) -> None:
    output = tmp_path / "planner.json"
    result = runner.invoke(app, ["bench", "planner", "--calls", "50", "--repeats", "1", "--output", str(output)])
    assert result.exit_code == 0, result.output
    assert "50 calls" in result.stdout
    assert "streamed calls" in result.stdout
    assert [row["calls"] for row in json.loads(output.read_text())["rows"]] == [50, 50, 50]
    again = runner.invoke(app, ["bench", "planner", "--calls", "50", "--repeats", "1", "--output", str(output)])
    assert isinstance(again.exception, InputError)
    assert "nothing is written over" in str(again.exception)
    assert json.loads(output.read_text())["rows"]
    anew = runner.invoke(app, ["bench", "planner", "--calls", "60", "--repeats", "1", "--output", str(output), "--overwrite"])
    assert anew.exit_code == 0, anew.output
    assert json.loads(output.read_text())["rows"][0]["calls"] == 60
    printed = runner.invoke(app, ["bench", "planner", "--calls", "50", "--repeats", "1", "--json"])
    assert json.loads(printed.stdout)["bench"] == "planner"
    assert runner.invoke(app, ["bench", "planner", "--calls", "0"]).exit_code == 2


@pytest.mark.parametrize("sizes", ["", ",", "0", "1,1", "one", "1;2"])
def test_bench_refuses_sizes_that_are_none(tiny_folder: Path, sizes: str) -> None:
    result = runner.invoke(app, ["bench", "stateless", "--checkpoint", str(tiny_folder), "--device", "cpu", "--frames", sizes])
    assert result.exit_code == 2
    assert "distinct whole numbers" in result.output


def test_expected_errors_are_one_message_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["vgraph-lab", "bench", "stateless", "--device", "cpu", "--checkpoint", str(tmp_path)])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    printed = capsys.readouterr().err
    assert "error:" in printed
    assert "config.json" in printed
    assert "Traceback" not in printed


def test_the_installed_command_runs() -> None:
    command = Path(sys.executable).with_name("vgraph-lab")
    result = subprocess.run([str(command), "--help"], capture_output=True, text=True, check=True)
    for name in ("tour", "doctor", "voice", "bench", "capture", "coverage", "inspect"):
        assert name in result.stdout
