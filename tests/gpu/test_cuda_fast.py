"""The fast and the compiled form on a CUDA device: as exact as the plain one, the same state, and all of it inside graphs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from contracts.incremental import path_of, running, stage, whole
from contracts.streaming import Stream, play
from torch import Tensor

from vgraph_lab.graphs.backends.base import GraphBackend
from vgraph_lab.inspect.work_kinds import OWN_KERNELS
from vgraph_lab.qwen3_tts.checkpoint import random_decoder
from vgraph_lab.qwen3_tts.decoder import Code2WavDecoder
from vgraph_lab.qwen3_tts.geometry import DecoderGeometry
from vgraph_lab.qwen3_tts.incremental import continue_stream
from vgraph_lab.qwen3_tts.incremental_check import ExactTwin, check_exact
from vgraph_lab.qwen3_tts.incremental_forms import FastForm, choose_form
from vgraph_lab.qwen3_tts.incremental_state import StateArena
from vgraph_lab.runner import GPUGenerationModelRunner

TARGET = "qwen3_tts.incremental"
# Both kinds of residual units (192 channels in two kernels, 96 in one), split sums, a window that is no power of two.
GEOMETRY = DecoderGeometry(
    codebook_size=64,
    codebook_dim=128,
    latent_dim=256,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=32,
    sliding_window=23,
    max_position_embeddings=512,
    upsampling_ratios=(2, 2),
    upsample_rates=(4, 3),
    decoder_dim=384,
)
STREAMS = [("a", 0, [1, 7, 7, 7, 7]), ("b", 9, [1, 7, 7]), ("c", 0, [1, 7, 7, 3])]


@pytest.fixture
def device(backend: GraphBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return str(backend.device)


def streams() -> list[Stream]:
    return [Stream(name, reference, sizes, seed=seed) for seed, (name, reference, sizes) in enumerate(STREAMS)]


def asking_for(form: str, *, autotune: bool = False) -> dict[str, Any]:
    connector = {"initial_codec_chunk_frames": 1, "codec_chunk_frames": 7, "codec_left_context_frames": 9}
    return {"targets": {TARGET: {"form": form, "autotune": autotune}}, "connector": connector}


@pytest.fixture(scope="module")
def decoders() -> dict[torch.dtype, Code2WavDecoder]:
    """The same weights twice."""
    weights = random_decoder(GEOMETRY, seed=4).state_dict()
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        found[dtype] = random_decoder(GEOMETRY, "cuda", dtype)
        found[dtype].load_state_dict(weights)
        found[dtype].refresh_tables()
    return found


def snr_db(exact: Tensor, found: Tensor) -> float:
    return float(10 * torch.log10(exact.double().square().mean() / (exact.double() - found.double()).square().mean()))


def played(runner: GPUGenerationModelRunner) -> dict[str, Tensor]:
    return {name: torch.cat(pieces) for name, pieces in play(runner, streams()).items()}


def test_streams_through_graphs_are_no_less_exact_than_the_plain_form(device: str, decoders: dict[torch.dtype, Code2WavDecoder]) -> None:
    heard = {}
    for form in ("plain", "fast"):
        with running(device, stage([1, 2, 3], **asking_for(form)), decoder=decoders[torch.bfloat16]) as runner:
            heard[form] = played(runner)
            assert path_of(runner).form_report.form == form
            assert runner.stats().fallbacks() == 0
    for stream in streams():
        exact = whole(decoders[torch.float32], stream)
        plain, fast = (snr_db(exact, heard[form][stream.name]) for form in ("plain", "fast"))
        assert fast > plain - 1, f"{stream.name}: {fast:.1f} dB, and {plain:.1f} in the plain form"


def test_full_precision_equals_the_whole_utterance(device: str, decoders: dict[torch.dtype, Code2WavDecoder]) -> None:
    decoder = decoders[torch.float32]
    with running(device, stage([1, 2, 3], **asking_for("fast")), decoder=decoder) as runner:
        assert path_of(runner).form_report.form == "fast"
        found = played(runner)
    with running(device, stage([1, 2, 3], **asking_for("plain")), decoder=decoder) as runner:
        plain = played(runner)
    for stream in streams():
        expected = whole(decoder, stream)
        noise = float((plain[stream.name] - expected).abs().amax())
        assert float((found[stream.name] - expected).abs().amax()) < max(4 * noise, 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_forms_take_turns_on_one_state(device: str, decoders: dict[torch.dtype, Code2WavDecoder], dtype: torch.dtype) -> None:
    """Eager calls are plain, graphs fast, and either goes on where the other one ended; the ring wraps several times."""
    decoder, exact = decoders[dtype], decoders[torch.float32]
    fast = FastForm(decoder, autotune=False)
    arenas = [StateArena(decoder, 2), StateArena(decoder, 2), StateArena(exact, 2)]
    slots, first = torch.tensor([1, 0], device=device), torch.zeros(2, dtype=torch.int64, device=device)
    mixed, plain, truth = [], [], []
    with torch.no_grad():
        for turn, size in enumerate([3, 1, 16, 30, 2, 23, 22, 5]):
            codes = torch.randint(0, 64, (2, 16, size), generator=torch.Generator().manual_seed(turn)).to(device)
            if turn % 2:
                mixed.append(continue_stream(decoder, arenas[0], codes, slots, first)[:, 0].float())
            else:
                mixed.append(fast.continue_stream(arenas[0], codes, torch.stack((slots, first), dim=1).contiguous()))
            plain.append(continue_stream(decoder, arenas[1], codes, slots, first)[:, 0].float())
            truth.append(continue_stream(exact, arenas[2], codes, slots, first)[:, 0])
            first = first + size
    errors = [(torch.cat(found, dim=1) - torch.cat(truth, dim=1)).square().mean().sqrt() for found in (mixed, plain)]
    noise = 1e-4 if dtype is torch.float32 else 0.0  # where the truth has the plain form's own rounding
    assert errors[0] < 2 * errors[1] + noise
    kept = [(arena.rows[:2].float() - arenas[2].rows[:2]).square().mean().sqrt() for arena in arenas[:2]]
    assert kept[0] < 2 * kept[1] + noise


def test_replays_equal_the_step_bit_for_bit(device: str, decoders: dict[torch.dtype, Code2WavDecoder]) -> None:
    """The same kernels with the same tiles: what a graph adds is nothing. First, second and later replays."""
    decoder = decoders[torch.bfloat16]
    with running(device, stage([2], **asking_for("fast")), decoder=decoder) as runner:
        form = path_of(runner)._routine._form
        twins = [Stream(name, 0, [1, 7, 7, 7], seed=seed) for seed, name in enumerate("ab")]
        found = play(runner, twins)
        arena = StateArena(decoder, 2)
        first = 0
        for number, size in enumerate([1, 7, 7, 7]):
            codes = torch.stack([twin.codes[:, first : first + size] for twin in twins]).to(device)
            places = torch.tensor([[0, first], [1, first]], device=device)
            with torch.no_grad():
                expected = form.continue_stream(arena, codes.long(), places)
            assert torch.equal(torch.stack([found[name][number] for name in "ab"]), expected)
            first += size


def test_replays_from_one_state_are_alike(device: str, decoders: dict[torch.dtype, Code2WavDecoder]) -> None:
    """On Hopper kernels begin while the ones before them still run: one that did not wait would show. Their edges can be listed."""
    decoder = decoders[torch.bfloat16]
    with running(device, stage([4], **asking_for("fast")), decoder=decoder) as runner:
        assert runner.manager is not None
        entry = next(e for e in runner.manager.entries() if (e.descriptor.frames, e.descriptor.state) == (7, ""))
        nodes = entry.graph.nodes()
        assert nodes[0].name == nodes[-1].name == "move_histories"
        assert {node.name for node in nodes} <= OWN_KERNELS
        assert [bool(node.dependencies) for node in nodes] == [False] + [True] * (len(nodes) - 1)
        assert all(max(node.dependencies) < node.index for node in nodes[1:])

        form, arena = path_of(runner)._routine._form, path_of(runner).table
        arena.rows.normal_(std=0.3, generator=torch.Generator(device).manual_seed(1))
        before = arena.rows.clone()
        codes = torch.randint(0, 64, (4, 16, 7), generator=torch.Generator().manual_seed(2)).to(device)
        places = torch.tensor([[2, 40], [0, 0], [3, 9], [1, 1000]], device=device)
        with torch.no_grad():
            expected = form.continue_stream(arena, codes, places)
        kept = arena.rows.clone()
        assert bool(expected.isfinite().all())
        entry.buffers["inputs"].copy_(torch.cat((places.flatten(), codes.flatten())))
        with runner.manager.pool.exclusive():
            for _ in range(20):
                arena.rows.copy_(before)
                entry.graph.replay()
                assert torch.equal(entry.output, expected)
                assert torch.equal(arena.rows, kept)


def test_rows_that_no_request_has_disturb_nobody(device: str, decoders: dict[torch.dtype, Code2WavDecoder]) -> None:
    """Three rows in a graph of four: the fourth works in the spare slot."""
    decoder = decoders[torch.bfloat16]
    heard = []
    for sizes in ([3], [4]):
        with running(device, stage(sizes, **asking_for("fast")), decoder=decoder) as runner:
            heard.append(played(runner))
            assert bool(path_of(runner).table.rows.isfinite().all())
    for name in "abc":
        assert snr_db(heard[0][name], heard[1][name]) > 30


def test_autotuning_is_reported_and_kept(device: str, tmp_path: Path, decoders: dict[torch.dtype, Code2WavDecoder]) -> None:
    decoder = decoders[torch.bfloat16]
    for attempt in range(2):
        with running(device, stage([1], **asking_for("fast", autotune=True)), decoder=decoder) as runner:
            assert runner.manager is not None
            lines = str(runner.manager.report).splitlines()
            assert any(line.startswith("form fast, its error ") for line in lines)
            tried = next(line for line in lines if line.startswith("tiles: "))
            assert tried.startswith("tiles: 0 products") == bool(attempt), tried
    (table,) = (tmp_path / "vgraph_lab" / "tiles").iterdir()
    assert len(json.loads(table.read_text())) > 20


def test_a_step_launches_few_kernels(device: str, decoders: dict[torch.dtype, Code2WavDecoder]) -> None:
    """Two layers, two upsampling stages, two blocks: 5 each, 4 each, 1 + 3 or 1 + 6; and the ends."""
    with running(device, stage([1], **asking_for("fast")), decoder=decoders[torch.bfloat16]) as runner:
        assert runner.manager is not None
        nodes = {str(e.descriptor): e.cost.node_counts for e in runner.manager.entries() if not e.descriptor.state}
    assert nodes
    for counts in nodes.values():
        kernels = counts["kernel"]
        assert kernels <= 1 + 1 + 2 + 2 * 5 + 1 + 2 * 4 + 1 + (1 + 6) + (1 + 3) + 2 + 1 + 2, counts


def test_it_is_not_used_where_it_is_less_exact(
    device: str, decoders: dict[torch.dtype, Code2WavDecoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = decoders[torch.bfloat16]
    form = FastForm(decoder, autotune=False)
    assert check_exact(form.name, form.continue_stream, ExactTwin(decoder), 3, 30) < 1.5
    right = FastForm.continue_stream
    monkeypatch.setattr(FastForm, "continue_stream", lambda self, *args: right(self, *args) + 0.5)
    form, report = choose_form("fast", decoder, autotune=False)
    assert form.name == "plain"
    assert "times the plain form's" in str(report)


def test_the_compiled_form_equals_the_plain_one(device: str, decoders: dict[torch.dtype, Code2WavDecoder]) -> None:
    decoder = decoders[torch.bfloat16]
    fields = asking_for("compiled")
    del fields["targets"][TARGET]["autotune"]
    with running(device, stage([1], **fields), decoder=decoder) as runner:
        assert path_of(runner).form_report.form == "compiled", str(path_of(runner).form_report)
        found = played(runner)
        assert runner.manager is not None
        assert runner.manager.report is not None
        assert runner.manager.report.failed == 0
    with running(device, stage([1], **asking_for("plain")), decoder=decoder) as runner:
        plain = played(runner)
    for stream in streams():
        exact = whole(decoders[torch.float32], stream)
        assert snr_db(exact, found[stream.name]) > snr_db(exact, plain[stream.name]) - 1
