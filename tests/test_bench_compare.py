"""The comparison: what its record holds, that all contenders did the same work, and that nobody is dropped without a word."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor
from typer.testing import CliRunner

from vgraph_lab.bench import compare_measure, own_contenders
from vgraph_lab.bench import contenders as contenders_module
from vgraph_lab.bench.compare import _in_fp32, bench_compare
from vgraph_lab.bench.compare_frames import (
    COST_COLUMNS,
    KIND_COLUMNS,
    PART_COLUMNS,
    TIME_COLUMNS,
    costs_frame,
    kinds_frame,
    parts_frame,
    read_compare,
    times_frame,
)
from vgraph_lab.bench.compare_table import compare_table
from vgraph_lab.bench.contender import NotRunError
from vgraph_lab.bench.contenders import choose
from vgraph_lab.bench.floors import decoder_parts
from vgraph_lab.bench.forms import FormInUse
from vgraph_lab.bench.own_contenders import OWN, RunnerContender
from vgraph_lab.bench.peers import PeerUnavailableError
from vgraph_lab.bench.record import MeasurementRecord
from vgraph_lab.cli import app, main
from vgraph_lab.config import ConnectorConfig
from vgraph_lab.errors import InputError
from vgraph_lab.inspect.kernel_times import REST
from vgraph_lab.inspect.work_kinds import WORK_KINDS
from vgraph_lab.qwen3_tts.decoder import Code2WavDecoder
from vgraph_lab.qwen3_tts.geometry import DecoderGeometry

PLAIN = ["published-eager", "published-graphs", "incremental-eager", "incremental-graphs"]
CONNECTOR = ConnectorConfig(codec_chunk_frames=16, initial_codec_chunk_frames=1)


class WholePeer:
    """Keeps all codes and decodes them anew with every chunk: right, and slow."""

    name, what = "whole", "everything again"
    decoder: Code2WavDecoder
    state_bytes_per_request: int | None = None

    def load(self, weights: Mapping[str, Tensor], geometry: DecoderGeometry, device: torch.device, dtype: torch.dtype) -> WholePeer:
        self.decoder = Code2WavDecoder(geometry).to(device, dtype)
        self.decoder.load_state_dict(weights)
        self.decoder.refresh_tables()
        return self

    def start(self, rows: int) -> WholeStream:
        return WholeStream(self.decoder)


class WholeStream:
    def __init__(self, decoder: Code2WavDecoder) -> None:
        self.decoder, self.codes = decoder, torch.zeros(0)

    def chunk(self, codes: Tensor) -> Tensor:
        self.codes = torch.cat((self.codes, codes), dim=2) if self.codes.numel() else codes
        return self.decoder.decode(self.codes)[:, 0, -codes.shape[2] * self.decoder.samples_per_frame :]


class AbsentPeer(WholePeer):
    name = "absent"

    def load(self, *_: Any) -> WholePeer:
        raise PeerUnavailableError("it wants another planet")


class DamagedPeer(WholePeer):
    name = "damaged"

    def load(self, *_: Any) -> WholePeer:
        raise ZeroDivisionError("its own fault")


class FailingPeer(WholePeer):
    """Works for one stream and not for two."""

    name = "failing"

    def start(self, rows: int) -> WholeStream:
        if rows > 1:
            raise RuntimeError("one at a time")
        return super().start(rows)


class LaterPeer(WholePeer):
    """Works when it is compared, and not when it is timed."""

    name = "later"
    starts = 0

    def start(self, rows: int) -> WholeStream:
        self.starts += 1
        if self.starts == 3:
            raise RuntimeError("that was enough")
        return super().start(rows)


class ImpostorPeer(WholePeer):
    name = "published-eager"


@pytest.fixture(scope="module")
def peers() -> Iterator[None]:
    found = {peer.name: peer for peer in (WholePeer(), AbsentPeer(), DamagedPeer(), FailingPeer())}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(compare_measure._TRACED_CALLS, "cpu", 1)
        patch.setattr(contenders_module, "available_peers", lambda: (found, {"crooked": "its adapter is no adapter"}))
        yield


@pytest.fixture(scope="module")
def seen() -> list[str]:
    return []


@pytest.fixture(scope="module")
def record(tiny_decoder: Code2WavDecoder, peers: None, seen: list[str]) -> MeasurementRecord:
    """W is 16, so a chunk of 1 and one of 16 fill the window."""
    return bench_compare(
        tiny_decoder, batch_sizes=(2, 1), chunk_frames=16, repeats=1, seconds=0.0, settings={"weights": "tiny"}, progress=seen.append
    )


def shown(record: MeasurementRecord, width: int = 80) -> str:
    printed = StringIO()
    Console(width=width, file=printed).print(compare_table(record))
    return printed.getvalue()


def rows_of(record: MeasurementRecord, batch_size: int) -> dict[str, dict[str, Any]]:
    return {row["contender"]: row for row in record.rows if row["batch_size"] == batch_size}


def test_one_row_per_contender_and_batch_size(record: MeasurementRecord, seen: list[str]) -> None:
    assert [row["batch_size"] for row in record.rows] == [1] * 6 + [2] * 5
    assert list(rows_of(record, 1)) == [*PLAIN, "whole", "failing"]
    assert list(rows_of(record, 2)) == [*PLAIN, "whole"]
    assert "published-graphs: capturing 1/" in " ".join(seen)
    assert not any("eager: capturing" in message for message in seen)


def test_nobody_is_dropped_without_a_word(record: MeasurementRecord) -> None:
    absent = record.settings["not_run"]
    assert set(absent) == {"incremental-fast", "incremental-compiled", "absent", "damaged", "failing", "crooked"}
    assert "'fast'" in absent["incremental-fast"], "on a CPU, whatever the settings know"
    assert "takes minutes" in absent["incremental-compiled"]
    assert absent["absent"] == "it wants another planet"
    assert absent["damaged"] == "its adapter failed to load (ZeroDivisionError: its own fault)"
    assert absent["failing"] == "failed with 2 streams: RuntimeError: one at a time"
    assert absent["crooked"] == "its adapter is no adapter"
    assert {*record.settings["contenders"], *absent} == {*OWN, "whole", "absent", "damaged", "failing", "crooked"}


def test_all_contenders_decoded_the_same_streams(record: MeasurementRecord) -> None:
    for size in (1, 2):
        rows = rows_of(record, size)
        for name in ("incremental-eager", "incremental-graphs", "whole"):
            assert rows[name]["snr_db"] is None or rows[name]["snr_db"] > 90, "the whole utterance, up to rounding"
            assert rows[name]["largest_difference"] < 1e-3
        assert rows["published-eager"]["snr_db"] < 90, "context is left out"
        for form in ("published", "incremental"):
            assert rows[f"{form}-eager"]["snr_db"] == pytest.approx(rows[f"{form}-graphs"]["snr_db"], abs=1)
        assert rows["incremental-graphs"]["state_largest_difference"] < 1e-3
        assert rows["published-graphs"]["state_largest_difference"] is None
        assert {row["level_dbfs"] for row in rows.values()} == {rows["whole"]["level_dbfs"]}
        assert all(row["nonfinite_samples"] == 0 for row in rows.values())


def test_graphs_served_every_call(record: MeasurementRecord) -> None:
    for row in record.rows:
        if row["contender"].endswith("-graphs"):
            assert row["graph_fallbacks"] == 0
            assert row["graph_hits"] > 0
            assert row["nodes"] == sum(row["nodes_by_kind"].values()) > 100
            assert set(row["nodes_by_kind"]) <= set(WORK_KINDS)
        elif row["contender"].endswith("-eager"):
            assert row["graph_hits"] == 0
            assert set(row["part_ms"]) == {"pre_conv", "transformer", "upsample", "decoder.0", "output", REST} | {
                f"block {number}" for number in range(4)
            }
        else:
            assert "graph_hits" not in row


def test_times_and_ratios(record: MeasurementRecord) -> None:
    for size in (1, 2):
        rows = rows_of(record, size)
        (*_, floor) = record.settings["floors"][str(size)]
        for row in rows.values():
            assert row["steady_wall_p10_ms"] <= row["steady_wall_ms"] <= row["steady_wall_p90_ms"]
            assert row["steady_repeats"] == row["first_repeats"] == 1
            assert row["speedup_steady"] == pytest.approx(rows["published-eager"]["steady_wall_ms"] / row["steady_wall_ms"])
            assert row["floor_ms"] == floor["floor_ms"]
            assert row["floor_share"] == pytest.approx(floor["floor_ms"] / row["steady_wall_ms"])
            assert row["real_time_factor"] == pytest.approx(row["steady_wall_ms"] / (16 * 80))
            assert row["first_floor_ms"] < row["floor_ms"]
            assert ("handle_wall_ms" in row) == (row["contender"] == "incremental-graphs")
            assert not any("burst" in key for key in row), "on the CPU there is no host time of its own"
            assert sum(row["kernel_ms_by_kind"].values()) > 0


def test_settings_say_what_was_measured(record: MeasurementRecord) -> None:
    s = record.settings
    assert {"weights": "tiny", "dtype": "float32", "chunk_frames": 16, "frames_compared": 49, "window_frames": 16}.items() <= s.items()
    assert s["ceilings"]["flop_per_s"] > 0
    facts = s["contenders"]
    assert facts["incremental-graphs"]["form"] == "plain"
    assert facts["incremental-graphs"]["graphs"] == 6
    assert facts["incremental-graphs"]["ready_seconds"] >= facts["incremental-graphs"]["seconds"] > 0
    assert facts["published-eager"]["graphs"] == 0
    assert facts["whole"] == {"what": "everything again", "form": None, "state_bytes_per_request": None}
    assert facts["incremental-eager"]["state_bytes_per_request"] > 0
    json.loads(record.to_json(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_the_table(record: MeasurementRecord) -> None:
    text = shown(record)
    assert "…" not in text, "it fits a terminal"
    lines = [line.split() for line in text.splitlines()]
    row = rows_of(record, 2)["whole"]
    (found,) = [line for line in lines if line[:1] == ["whole"] and "%" not in line][1:2]
    assert found[-1] == ("exact" if row["largest_difference"] == 0 else f"{row['snr_db']:.1f}")
    assert [line[:2] for line in lines if line[:1] in (["1"], ["2"])] == [["1", "published-eager"], ["2", "published-eager"]]
    flat = " ".join(text.split())
    for words in ("not run: absent, it wants another planet", "6 graphs, ready in", "floor at B=1:", "where it goes at B=2, ms", "GB/s"):
        assert words in flat


def test_the_table_of_a_gpu(record: MeasurementRecord) -> None:
    rows = [
        {**row, "steady_wall_ms": 12.34, "contender": "incremental-compiled", "steady_burst_host_us": 1234.5, "handle_wall_ms": 11.0,
         "handle_burst_host_us": 61.2, "first_wall_ms": 1.5, "snr_db": 72.3, "largest_difference": 0.1, "conversion_share": 0.123,
         "kernel_ms_by_kind": dict.fromkeys(WORK_KINDS, 12.345), "nodes": 1234}
        for row in record.rows
    ]  # fmt: skip
    machine = {**record.machine, "cuda": "13.0"}
    text = shown(replace(record, rows=rows, machine=machine, settings={**record.settings, "nodes_unknown": "no bindings"}))
    assert "…" not in text
    lines = [line.split() for line in text.splitlines()]
    assert any(line[-5:] == ["1,234", "11.0", "61", "1.50", "72.3"] for line in lines)
    assert any(line[-1:] == ["12.3"] and line[1:2] == ["1,234"] for line in lines)
    assert "nodes of graphs are not listed: no bindings" in text


def test_frames(record: MeasurementRecord, tmp_path: Path) -> None:
    read = read_compare(record.write(tmp_path / "record.json"))
    times = times_frame(read)
    assert list(times.columns) == list(TIME_COLUMNS)
    assert times["contender"].tolist() == [row["contender"] for row in record.rows]
    kinds = kinds_frame(read, 1)
    assert list(kinds.columns) == list(KIND_COLUMNS)
    assert kinds.groupby("contender")["time_share"].sum().tolist() == pytest.approx([1.0] * 6)
    parts = parts_frame(read, 2)
    assert list(parts.columns) == list(PART_COLUMNS)
    assert set(parts["contender"]) == {"published-eager", "incremental-eager"}
    floors = {part["part"]: part["floor_ms"] for part in record.settings["floors"]["2"]}
    per_part = parts[parts["contender"] == "published-eager"].set_index("part")["floor_ms"]
    assert per_part["block 3"] == floors["block 3"]
    assert per_part["state and codebooks"] == floors["quantizer"]
    assert per_part.sum() == pytest.approx(floors["total"])
    costs = costs_frame(read)
    assert list(costs.columns) == list(COST_COLUMNS)
    assert costs.set_index("contender")["graphs"].isna().to_dict()["whole"]
    for frame in (kinds_frame, parts_frame):
        with pytest.raises(InputError, match=r"nothing was measured with 3 streams. Measured: \[1, 2\]"):
            frame(read, 3)


def test_files_that_are_no_comparison_fail(record: MeasurementRecord, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    for text, message in (("{", "no record"), ("{}", "no record"), (replace(record, bench="v1").to_json(), "of 'vgraph-lab bench v1'")):
        path.write_text(text)
        with pytest.raises(InputError, match=message):
            read_compare(path)
    with pytest.raises(InputError, match="no record"):
        read_compare(tmp_path / "none.json")


def test_the_choice(peers: None) -> None:
    chosen, left_out = choose(["incremental-compiled", "whole"])
    assert list(chosen) == ["incremental-compiled", "whole"]
    assert left_out["published-eager"] == "not asked for"
    assert left_out["crooked"] == "its adapter is no adapter"
    assert "incremental-compiled" in choose(["all"])[0]
    assert "incremental-compiled" not in choose(None)[0]
    with pytest.raises(InputError, match=r"no contender 'publishd-eager'\. Did you mean 'published-eager'\? There are: all, published-"):
        choose(["publishd-eager"])
    with pytest.raises(InputError, match=r"no contender ''\. There are: all, published-eager, "):
        choose([""])
    with pytest.raises(InputError, match="no contender ''"):
        choose([])


def test_one_that_fails_while_it_is_timed_leaves_the_others(tiny_decoder: Code2WavDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {peer.name: peer for peer in (WholePeer(), LaterPeer(), ImpostorPeer())}
    monkeypatch.setitem(compare_measure._TRACED_CALLS, "cpu", 1)
    monkeypatch.setattr(contenders_module, "available_peers", lambda: (dict(found), {}))
    record = bench_compare(tiny_decoder, batch_sizes=(1,), contenders=["whole", "later"], chunk_frames=16, repeats=1, seconds=0.0)
    assert [row["contender"] for row in record.rows] == ["whole"]
    assert record.rows[0]["steady_wall_ms"] > 0
    assert record.settings["not_run"]["later"] == "failed with 1 streams: RuntimeError: that was enough"
    assert record.settings["not_run"]["peer published-eager"] == "it calls itself as one of our own contenders is called"


@pytest.mark.parametrize("fields", [{"batch_sizes": (1, 1)}, {"chunk_frames": 0}, {"repeats": 0}], ids=str)
def test_bad_numbers(tiny_decoder: Code2WavDecoder, fields: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="batch_sizes must be different whole numbers from 1, chunk_frames and repeats at least 1"):
        bench_compare(tiny_decoder, **fields)


def test_nobody_left_fails(tiny_decoder: Code2WavDecoder, peers: None) -> None:
    with pytest.raises(InputError, match=r"no contender can run here\. absent: it wants another planet"):
        bench_compare(tiny_decoder, contenders=["absent"], batch_sizes=(1,))
    with pytest.raises(InputError, match=r"at least 1; got \[\], 25 and 50"):
        bench_compare(tiny_decoder, batch_sizes=())


def test_a_form_that_is_not_the_one_in_use_is_not_run(tiny_decoder: Code2WavDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_contenders, "form_in_use", lambda path: FormInUse("slow", "no hurry"))
    asked = replace(OWN["incremental-eager"], form="plain")
    monkeypatch.setattr(own_contenders.Form, "stage", lambda self, *a, **k: _stage_without_form(*a, **k))
    with pytest.raises(NotRunError, match="asked for the form 'plain', the model runs 'slow': no hurry"):
        RunnerContender("x", asked, tiny_decoder, CONNECTOR, (1,))


def _stage_without_form(connector: ConnectorConfig, batch_sizes: Any, max_num_seqs: int) -> dict[str, Any]:
    return {"connector": connector.model_dump(), "enforce_eager": True, "vocoder_cudagraph": {"streaming_algorithm": "incremental"}}


def test_graphs_that_cannot_be_captured_are_not_run(tiny_decoder: Code2WavDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    def stage(self: Any, connector: ConnectorConfig, batch_sizes: Any, max_num_seqs: int) -> dict[str, Any]:
        keys = {"streaming_algorithm": "incremental", "capture_batch_sizes": list(batch_sizes), "max_memory_bytes": 1}
        return {"connector": connector.model_dump(), "vocoder_cudagraph": keys}

    monkeypatch.setattr(own_contenders.Form, "stage", stage)
    with pytest.raises(NotRunError, match=r"none of its 3 graphs could be captured \(B1×T16: "):
        RunnerContender("x", OWN["incremental-graphs"], tiny_decoder, CONNECTOR, (1,))


def test_the_truth_is_in_fp32(tiny_decoder: Code2WavDecoder) -> None:
    narrow = copy.deepcopy(tiny_decoder).to(torch.bfloat16)
    wide = _in_fp32(narrow)
    assert wide.dtype is torch.float32
    assert narrow.dtype is torch.bfloat16
    assert torch.equal(wide.pre_conv.conv.weight.to(torch.bfloat16), narrow.pre_conv.conv.weight), "the same weights"
    assert torch.equal(wide.pre_transformer.cos, tiny_decoder.pre_transformer.cos), "angles are not rounded"
    assert _in_fp32(tiny_decoder) is tiny_decoder
    assert set(decoder_parts(wide)) == set(decoder_parts(narrow))


def test_bfloat16(tiny_decoder: Code2WavDecoder) -> None:
    """A coarser dtype is further from the truth, and its state is too."""
    narrow = copy.deepcopy(tiny_decoder).to(torch.bfloat16)
    found = bench_compare(narrow, batch_sizes=(1,), contenders=["incremental-eager"], chunk_frames=16, repeats=1, seconds=0.0)
    (row,) = found.rows
    assert 0 < row["snr_db"] < 70
    assert row["state_snr_db"] < 70
    assert row["speedup_steady"] is None, "there is no baseline"
    assert found.settings["not_run"]["published-eager"] == "not asked for"


SMALL = ["--device", "cpu", "--contenders", "incremental-eager", "--chunk-frames", "16", "--repeats", "1"]


def test_the_command(tiny_folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "compare.json"
    arguments = ["bench", "compare", "--checkpoint", str(tiny_folder), *SMALL, "--output", str(output)]
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == json.loads(output.read_text())
    assert json.loads(result.stdout)["settings"]["weights"] == str(tiny_folder)
    again = CliRunner().invoke(app, arguments)
    assert isinstance(again.exception, InputError)
    assert "nothing is written over" in str(again.exception)
    printed = CliRunner().invoke(app, [*arguments, "--overwrite"])
    assert printed.exit_code == 0, printed.output
    assert "not asked for: published-eager, published-graphs, " in printed.stdout


def test_older_records_and_tf32(record: MeasurementRecord) -> None:
    """Which arithmetic floors are of; a record that does not tell has that of its dtype."""
    ceilings = record.settings["ceilings"]
    assert ceilings["arithmetic"] == "float32"
    older = {name: value for name, value in ceilings.items() if name != "arithmetic"}
    for given, told in ((ceilings, "float32"), (older, "float32"), (ceilings | {"arithmetic": "tf32"}, "tf32")):
        text = " ".join(shown(replace(record, settings={**record.settings, "ceilings": given})).split())
        assert f"TFLOP/s in {told} and " in text
        assert ("floors are those of TF32" in text) == (told == "tf32")


def test_the_command_refuses(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for given, message in (
        (["--contenders", "best"], "no contender 'best'"),
        (["--contenders", ""], "no contender ''. There are: all, published-eager,"),
        (["--contenders", "incremental-eager,"], "no contender ''. There are: all, published-eager,"),
        (["--batch-sizes", "0"], "distinct whole numbers from 1"),
        (["--batch-sizes", ""], "distinct whole numbers from 1"),
    ):
        arguments = ["vgraph-lab", "bench", "compare", "--checkpoint", str(tiny_folder), "--device", "cpu", *given]
        monkeypatch.setattr(sys, "argv", arguments)
        with pytest.raises(SystemExit) as stop:
            main()
        assert stop.value.code == 2
        assert message in " ".join(capsys.readouterr().err.split())
