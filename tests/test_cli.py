"""The command line: what it prints, and the exit codes that scripts rely on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vgraph_lab.cli import app, main

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
    "service": ["--requests", "1", "--concurrency", "1", "--kind", "xvec", *SMALL],
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


@pytest.mark.parametrize("option", ["--frames", "--repeats"])
def test_benches_refuse_numbers_below_one(option: str) -> None:
    assert runner.invoke(app, ["bench", "streaming", "--device", "cpu", option, "0"]).exit_code == 2


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


@pytest.mark.parametrize("sizes", [",", "0", "1,1", "one", "1;2"])
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
    for name in ("tour", "doctor", "voice", "bench"):
        assert name in result.stdout
