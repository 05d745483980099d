"""``vgraph-lab plan`` and ``import``: what they print, what they write, and the exit codes that scripts rely on."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from vgraph_lab.cli import app, main
from vgraph_lab.config import StageConfig
from vgraph_lab.errors import FallbackReason
from vgraph_lab.graphs.entry import Rejection
from vgraph_lab.inspect import Recording, coverage_table
from vgraph_lab.inspect.planner import StatelessGrid, replay_traffic, traffic_of
from vgraph_lab.qwen3_tts.code2wav import Qwen3TTSCode2Wav
from vgraph_lab.qwen3_tts.decoder import Code2WavDecoder
from vgraph_lab.qwen3_tts.transitions import TransitionTable

runner = CliRunner()

STREAMING = """\
connector: {codec_chunk_frames: 15, initial_codec_chunk_frames: 2, codec_left_context_frames: 16}
max_num_seqs: 2
vocoder_cudagraph: {capture_batch_sizes: [1, 2], num_warmups: 1}
"""
STATELESS = """\
async_chunk: false
vocoder_cudagraph: {capture_batch_sizes: [1, 2], num_warmups: 1, decode_chunk_frames: 20, decode_left_context_frames: 4}
"""


def recorded(stage: str, folder: Path, checkpoint: Path) -> Path:
    (folder / "stage.yaml").write_text(stage)
    output = folder / "recording.vgl"
    arguments = ["capture", "--config", str(folder / "stage.yaml"), "--checkpoint", str(checkpoint), "--device", "cpu"]
    result = runner.invoke(app, [*arguments, "--requests", "3", "--concurrency", "2", "--output", str(output)])
    assert result.exit_code == 0, result.output
    return output


@pytest.fixture(scope="module")
def streaming(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded(STREAMING, tmp_path_factory.mktemp("streaming"), tiny_folder)


@pytest.fixture(scope="module")
def stateless(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded(STATELESS, tmp_path_factory.mktemp("stateless"), tiny_folder)


def planned(recording: Path, *arguments: str, exit_code: int = 0) -> dict[str, Any]:
    result = runner.invoke(app, ["plan", str(recording), *arguments, "--json"])
    assert result.exit_code == exit_code, result.output
    return json.loads(result.stdout)  # type: ignore[no-any-return]


def stopped(arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[object, str]:
    """Exit code and error output of the installed command's entry point."""
    monkeypatch.setattr(sys, "argv", ["vgraph-lab", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    return stop.value.code, " ".join(capsys.readouterr().err.split())


def costs_file(folder: Path, *, graphs_help: bool) -> Path:
    lines = ["target,state,batch_size,frames,charge_bytes,capture_s,replay_ms,eager_ms"]
    for target in ("icl_prefix", "xvec_prefix", "suffix"):
        for rows, frames in ((1, 18), (2, 21)):
            eager = rows * frames
            state = "xvec 16" if target == "suffix" else ""
            lines.append(f"qwen3_tts.{target},{state},{rows},{frames},{1000 * eager},0.5,{eager * (0.5 if graphs_help else 3)},{eager}")
    (folder / "costs.csv").write_text("\n".join(lines) + "\n")
    return folder / "costs.csv"


# ------------------------------------------------------------------------------------------------------------- plan


def test_a_written_plan_serves_what_it_promises(streaming: Path, tiny_decoder: Code2WavDecoder, tmp_path: Path) -> None:
    """Against the real Targets of the configuration that was written, call by call."""
    told = planned(streaming, "--min-coverage", "0.5", "--output", str(tmp_path / "stage.yaml"))
    cfg = StageConfig.from_yaml(tmp_path / "stage.yaml")
    assert cfg.to_dict() == StageConfig.from_dict(told["stage"]).to_dict()
    traffic = traffic_of(Recording.load(streaming).stats, TransitionTable.from_connector(cfg.connector, 16))
    replayed = replay_traffic(traffic, Qwen3TTSCode2Wav(tiny_decoder, cfg).get_vocoder_cudagraph_targets(), cfg.graph_settings)
    assert replayed.hits() == told["recommended"]["calls"] > 0
    assert replayed.calls() == told["calls"]
    assert "saved" not in (tmp_path / "stage.yaml").read_text(), "no times are known"


def test_the_present_configuration_is_told_as_it_was_recorded(streaming: Path) -> None:
    told, found = planned(streaming), Recording.load(streaming)
    assert told["current"]["graphs"] == len(found.graphs)
    assert told["current"]["batch_sizes"] == [1, 2]
    assert told["current"]["calls"] == found.stats.hits()
    assert found.capture is not None
    assert told["current"]["charge_bytes"] >= sum(g.cost.charge_bytes for g in found.graphs if g.cost), "an upper bound, never less"


def test_without_times_nothing_is_said_to_be_saved(streaming: Path) -> None:
    told = planned(streaming)
    assert told["times_known"] is False
    assert {row["saved_s"] for row in [*told["front"], told["recommended"], told["current"]]} == {None}
    assert "no times of calls" in told["explanation"][-1]
    assert told["recommended"]["coverage"] == max(row["coverage"] for row in told["front"])


def test_limits_are_kept(streaming: Path) -> None:
    whole = planned(streaming)
    sizes = sorted(row["charge_bytes"] for row in whole["front"] if row["graphs"])
    assert sizes[0] < whole["recommended"]["charge_bytes"]
    small = planned(streaming, "--budget-mib", str((sizes[0] + 1) / 2**20))
    assert small["recommended"]["charge_bytes"] == sizes[0]
    quick = min(row["capture_s"] for row in whole["front"] if row["graphs"])
    assert planned(streaming, "--max-capture-s", str(quick))["recommended"]["capture_s"] == quick


def test_no_limit_can_be_said_in_words(streaming: Path) -> None:
    assert planned(streaming, "--budget-mib", "inf")["recommended"] == planned(streaming)["recommended"]


def test_costs_of_elsewhere_decide(streaming: Path, tmp_path: Path) -> None:
    """Graphs that help are recommended; of graphs that are slower than eager, none are, which the exit code says."""
    helpful = planned(streaming, "--costs", str(costs_file(tmp_path, graphs_help=True)))
    assert helpful["times_known"]
    assert helpful["recommended"]["saved_s"] > 0
    slow = planned(streaming, "--costs", str(costs_file(tmp_path, graphs_help=False)), exit_code=1)
    assert slow["recommended"]["graphs"] == 0
    assert slow["stage"]["vocoder_cudagraph"] == {"enforce_eager": True}


def test_costs_are_measured_with_a_checkpoint(streaming: Path, tiny_folder: Path) -> None:
    told = planned(streaming, "--checkpoint", str(tiny_folder), "--device", "cpu", "--min-coverage", "0.9")
    assert told["times_known"]
    assert told["recommended"]["coverage"] >= 0.9
    assert all(isinstance(row["saved_s"], float) for row in told["front"])


def test_whole_utterances_are_planned_with_buckets(stateless: Path) -> None:
    told = planned(stateless)
    assert told["recommended"]["targets"] == ["qwen3_tts.stateless"]
    forced = StatelessGrid(20, 4).forced
    assert set(forced) <= set(told["recommended"]["frame_sizes"])
    assert told["stage"]["vocoder_cudagraph"]["decode_chunk_frames"] == 20


@pytest.mark.parametrize("kind", ["streaming", "stateless"])
def test_tables_fit_eighty_columns(kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    result = runner.invoke(app, ["plan", str(request.getfixturevalue(kind))])
    assert result.exit_code == 0, result.output
    table, _, prose = result.stdout.partition("\nrecommended: ")
    assert max(map(len, table.splitlines())) <= 80
    assert "…" not in table
    assert "recommended" in table
    assert "current: batch sizes 1, 2" in prose


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["NEW"], "cannot be read"),
        (["QUIET"], "holds no calls"),
        (["BARE"], "has no stage to plan for"),
        (["NO_GRAPHS"], "--window"),
        (["EMPTY_POOL"], "holds no captured graph"),
        (["SUFFIXES"], "--checkpoint measures"),
        (["RECORDED", "--budget-mib", "0.001"], "the smallest set of graphs takes"),
        (["RECORDED", "--max-capture-s", "0"], "the quickest set of graphs takes"),
        (["RECORDED", "--costs", "NEW"], "cannot be read as a CSV file"),
        (["RECORDED", "--costs", "TEXT"], "lacks target"),
        (["RECORDED", "--costs", "TEXT", "--checkpoint", "bundled"], "Give one of them"),
        (["RECORDED", "--checkpoint", "NEW", "--device", "cpu"], "NEW"),
        (["RECORDED", "--output", "TEXT"], "nothing is written over"),
    ],
)
def test_what_cannot_be_planned_is_bad_input(
    streaming: Path, tmp_path: Path, arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = Recording.load(streaming)
    replace(found, calls=()).save(tmp_path / "QUIET")
    replace(found, stage=None).save(tmp_path / "BARE")
    replace(found, graphs=()).save(tmp_path / "NO_GRAPHS")
    rejection = Rejection(FallbackReason.DISABLED, "switched off")
    rejected = tuple(replace(graph, cost=None, rejection=rejection) for graph in found.graphs)
    replace(found, graphs=rejected).save(tmp_path / "EMPTY_POOL")
    replace(found, graphs=tuple(graph for graph in found.graphs if graph.target_id.endswith("suffix"))).save(tmp_path / "SUFFIXES")
    (tmp_path / "TEXT").write_text("one,two\n1,2\n")
    places = {name: str(tmp_path / name) for name in ("NEW", "QUIET", "BARE", "NO_GRAPHS", "EMPTY_POOL", "SUFFIXES", "TEXT")}
    places["RECORDED"] = str(streaming)
    code, told = stopped(["plan", *[places.get(argument, argument) for argument in arguments]], monkeypatch, capsys)
    assert code == 2
    assert message.replace(" ", "") in told.replace(" ", "")
    assert (tmp_path / "TEXT").read_text() == "one,two\n1,2\n"
    assert not (tmp_path / "NEW").exists()


def test_a_window_can_be_said(streaming: Path, tmp_path: Path) -> None:
    found = Recording.load(streaming)
    kept = tuple(graph for graph in found.graphs if not graph.target_id.endswith("suffix"))
    replace(found, graphs=kept).save(tmp_path / "prefixes.vgl")
    told = planned(tmp_path / "prefixes.vgl", "--window", "16", "--costs", str(costs_file(tmp_path, graphs_help=True)))
    assert told["recommended"]["coverage"] == 1


# ------------------------------------------------------------------------------------------------------- from a log


def as_log(recording: Path, folder: Path) -> Path:
    """The recording's calls as a table, which an importer reads back."""
    coverage_table(Recording.load(recording)).to_csv(folder / "calls.csv", index=False)
    return folder / "calls.csv"


def test_a_log_of_the_same_calls_gives_the_same_plan(streaming: Path, tmp_path: Path) -> None:
    costs = ["--costs", str(costs_file(tmp_path, graphs_help=True)), "--window", "16"]
    from_log = planned(as_log(streaming, tmp_path), "--config", str(streaming.parent / "stage.yaml"), *costs)
    from_recording = planned(streaming, *costs)
    for told in ("calls", "current", "recommended", "front", "stage"):
        assert from_log[told] == from_recording[told], told
    assert from_log["notes"][0].endswith("0 ignored, 0 malformed")


def omni_log(folder: Path, *replays: tuple[tuple[str, int, int], int], misses: Any = ()) -> Path:
    hits, missed = sum(key[2] * n for key, n in replays), sum(key[1] * n for key, n in misses)
    rate = 100 * hits / (hits + missed)
    (folder / "omni.log").write_text(
        f"(Worker pid=7) [Stage-1] INFO 03-14 15:41:06 [wrapper.py:94] Segmented Code2Wav CUDA Graph stats: requests={hits + missed} "
        f"hits={hits} fallbacks={missed} hit_rate={rate:.2f}% replays={list(replays)} fallback_groups={list(misses)}\n"
    )
    return folder / "omni.log"


def test_a_segmented_log_is_planned_with_its_schedule(streaming: Path, tmp_path: Path) -> None:
    """The log names neither the frames of first chunks nor what suffix steps keep: W = 16, chunks of 2, then 15."""
    log = omni_log(
        tmp_path, (("icl_prefix", 2, 2), 30), (("suffix_17", 2, 1), 30), (("suffix_31", 1, 1), 40), misses=[(("suffix_31:no_graph", 3), 5)]
    )
    costs = ["--costs", str(costs_file(tmp_path, graphs_help=True)), "--window", "16"]
    told = planned(log, "--config", str(streaming.parent / "stage.yaml"), *costs)
    assert told["calls"] == 30 + 30 + 40 + 5
    assert told["current"]["calls"] == 100, "three rows have no graph"
    best = told["recommended"]
    assert (best["coverage"], best["batch_sizes"]) == (1, [1, 2, 3])
    xvec = omni_log(tmp_path, (("suffix_17", 1, 1), 3))
    with_kind = planned(xvec, "--config", str(streaming.parent / "stage.yaml"), "--kind", "xvec", *costs)
    assert with_kind["recommended"]["coverage"] == 1


@pytest.mark.parametrize(
    ("replays", "message"),
    [
        ([(("suffix_17", 1, 1), 3)], "Say it with --kind icl or xvec"),
        ([(("icl_prefix", 1, 1), 1), (("xvec_prefix", 1, 1), 1), (("suffix_17", 1, 1), 3)], "Say it with --kind icl or xvec"),
        ([(("xvec_prefix", 1, 1), 1), (("suffix_97", 1, 1), 3)], "counts suffix steps of 97 frames"),
    ],
)
def test_a_segmented_log_that_does_not_fit_its_schedule(
    streaming: Path, tmp_path: Path, replays: Any, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    costs = ["--costs", str(costs_file(tmp_path, graphs_help=True)), "--window", "16"]
    arguments = [str(omni_log(tmp_path, *replays)), "--config", str(streaming.parent / "stage.yaml"), *costs]
    code, told = stopped(["plan", *arguments], monkeypatch, capsys)
    assert code == 2
    assert message.replace(" ", "") in told.replace(" ", "").replace("\n", "")


def test_whole_utterances_of_a_log_are_planned_too(stateless: Path, tiny_folder: Path, tmp_path: Path) -> None:
    log = as_log(stateless, tmp_path)
    arguments = ["--config", str(stateless.parent / "stage.yaml"), "--checkpoint", str(tiny_folder), "--device", "cpu"]
    result = runner.invoke(app, ["plan", str(log), *arguments])
    assert result.exit_code in (0, 1), result.output  # whether graphs help is the machine's business
    assert "recommended:" in result.stdout
    assert "traffic: " in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["LOG"], "Give its file with --config"),
        (["LOG", "--config", "STAGE"], "does not say what graphs take. Give --checkpoint"),
        (["LOG", "--config", "STAGE", "--costs", "COSTS"], "Say it with --window"),
        (["RECORDED", "--config", "STAGE"], "has its own stage. Leave --config out"),
        (["OTHER", "--config", "STAGE", "--costs", "COSTS", "--window", "16"], "unknown Targets"),
        (["SHAPELESS", "--config", "STAGE", "--costs", "COSTS", "--window", "16"], "SHAPELESS"),
        (["LOG", "--config", "NEW", "--costs", "COSTS", "--window", "16"], "NEW"),
    ],
)
def test_what_cannot_be_planned_from_a_log_is_bad_input(
    streaming: Path, tmp_path: Path, arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "OTHER").write_text("target,batch_size,frames,calls\ntheir.vocoder,1,4,3\n")
    (tmp_path / "SHAPELESS").write_text("nothing that is known\n")
    places = {name: str(tmp_path / name) for name in ("NEW", "OTHER", "SHAPELESS")}
    places |= {"RECORDED": str(streaming), "STAGE": str(streaming.parent / "stage.yaml"), "LOG": str(as_log(streaming, tmp_path))}
    places["COSTS"] = str(costs_file(tmp_path, graphs_help=True))
    code, told = stopped(["plan", *[places.get(argument, argument) for argument in arguments]], monkeypatch, capsys)
    assert code == 2
    assert message.replace(" ", "") in told.replace(" ", "")


# ----------------------------------------------------------------------------------------------------------- import

CSV = "target,batch_size,frames,calls\nqwen3_tts.stateless,1,40,3\nqwen3_tts.stateless,2,55,4\n"


def imported(log: Path, *arguments: str, exit_code: int = 0) -> dict[str, Any]:
    result = runner.invoke(app, ["import", str(log), *arguments, "--json"])
    assert result.exit_code == exit_code, result.output
    return json.loads(result.stdout)  # type: ignore[no-any-return]


def test_a_log_as_tables(tmp_path: Path) -> None:
    (tmp_path / "calls.csv").write_text(CSV)
    told = imported(tmp_path / "calls.csv", "--check-targets")
    assert [(row["batch_size"], row["frames"], row["calls"]) for row in told["calls"]] == [(1, 40, 3), (2, 55, 4)]
    assert told["lines"] == {"read": 3, "recognised": 3, "ignored": 0, "malformed": 0}
    assert told["captures"] == told["malformed"] == []


def test_captures_of_a_log_are_shown(tmp_path: Path) -> None:
    lines = ["INFO Graph capturing for 8 input tokens", "INFO                         finished in 0.250 secs, took 12.50 MiB"]
    (tmp_path / "server.log").write_text("\n".join(lines) + "\n")
    (row,) = imported(tmp_path / "server.log")["captures"]
    assert (row["frames"], row["seconds"], row["mib"], row["unit"]) == (8, 0.25, 12.5, "tokens")
    shown = runner.invoke(app, ["import", str(tmp_path / "server.log")])
    assert shown.exit_code == 0
    assert "12.50" in shown.stdout


def test_malformed_lines_are_shown_and_told_by_the_exit_code(tmp_path: Path) -> None:
    (tmp_path / "calls.csv").write_text(CSV + "qwen3_tts.stateless,one,40,3\n")
    told = imported(tmp_path / "calls.csv", exit_code=1)
    assert told["lines"]["malformed"] == len(told["malformed"]) == 1
    assert told["malformed"][0]["line"] == 4
    shown = runner.invoke(app, ["import", str(tmp_path / "calls.csv")])
    assert shown.exit_code == 1
    assert "malformed, line 4" in shown.stdout


@pytest.mark.parametrize(
    ("content", "arguments", "message"),
    [
        (None, [], "cannot be read"),
        ("", [], "is empty"),
        ("nothing of ours\n", [], "holds no usable line"),
        (CSV, ["--repetition", "often"], "accepted are 'auto', 'cumulative', 'interval'"),
        (CSV.replace("stateless", "statless"), ["--check-targets"], "unknown Targets: 'qwen3_tts.statless'"),
    ],
)
def test_what_is_no_log_is_bad_input(
    tmp_path: Path,
    content: str | None,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if content is not None:
        (tmp_path / "log").write_text(content)
    code, told = stopped(["import", str(tmp_path / "log"), *arguments], monkeypatch, capsys)
    assert code == 2
    assert message.replace(" ", "") in told.replace(" ", "")


def test_both_commands_are_in_the_help() -> None:
    told = runner.invoke(app, ["--help"]).stdout
    assert "plan" in told
    assert "import" in told
