"""The parts of incremental decoding, each against a truth of its own: whole sequences, closed forms, plain enumeration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import combinations_with_replacement, pairwise

import pytest
import torch
from contracts.incremental import FLAT, stage
from contracts.streaming import SMALL, codes
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from vgraph_lab.config import ConnectorConfig, StageConfig
from vgraph_lab.errors import ConfigError, InputError
from vgraph_lab.graphs.descriptor import Descriptor
from vgraph_lab.qwen3_tts.checkpoint import random_decoder
from vgraph_lab.qwen3_tts.code2wav import Qwen3TTSCode2Wav
from vgraph_lab.qwen3_tts.decoder import Code2WavDecoder
from vgraph_lab.qwen3_tts.geometry import DecoderGeometry, published_geometry
from vgraph_lab.qwen3_tts.incremental import _Histories, begin_with_reference, continue_stream, render_context_frames
from vgraph_lab.qwen3_tts.incremental_path import IncrementalPath
from vgraph_lab.qwen3_tts.incremental_state import StateArena, history_size, look_backs
from vgraph_lab.qwen3_tts.incremental_widths import SPARE_CALLS, ChunkWidths
from vgraph_lab.qwen3_tts.layers import CausalConv1d, CausalConvTranspose1d, ConvNeXtBlock, DecoderBlock, ResidualUnit, in_order
from vgraph_lab.qwen3_tts.transformer import KeyValue, PreTransformer, sliding_window_mask
from vgraph_lab.requests import ChunkRequest

ODD = SMALL.model_copy(update={"upsampling_ratios": (3,), "upsample_rates": (2, 3), "num_key_value_heads": 4, "sliding_window": 5})

# A window that is longer than the context of a frame, so that only the end of a reference is rendered.
WIDE = ODD.model_copy(update={"sliding_window": 24, "max_position_embeddings": 128})


def exact_decoder(geometry: DecoderGeometry, weights: Mapping[str, Tensor] | None = None) -> Code2WavDecoder:
    """In fp64 throughout: rotary table and codebooks are otherwise made of fp32 numbers."""
    decoder = random_decoder(geometry, dtype=torch.float64, seed=4)
    if weights:
        decoder.load_state_dict({name: tensor.double() for name, tensor in weights.items()})
    for rvq in (decoder.quantizer.rvq_first, decoder.quantizer.rvq_rest):
        rvq.table = torch.stack([book.embedding_sum / book.cluster_usage.clamp(min=1e-5)[:, None] for book in rvq.codebooks])
    frequencies = geometry.rope_theta ** -(torch.arange(0, geometry.head_dim, 2, dtype=torch.float64) / geometry.head_dim)
    angles = (torch.arange(geometry.max_position_embeddings)[:, None] * frequencies).repeat(1, 2)
    decoder.pre_transformer.cos, decoder.pre_transformer.sin = angles.cos(), angles.sin()
    return decoder


# ---------------------------------------------------------------------------------------------------- steps in fp64


@pytest.mark.parametrize("geometry", [SMALL, FLAT, ODD, WIDE], ids=["small", "flat", "odd", "wide"])
def test_steps_equal_the_whole_in_double_precision(geometry: DecoderGeometry) -> None:
    """To 1e-11: what is left of the distance is rounding. Each row at a position of its own, in a row that was used before."""
    decoder, per_frame = exact_decoder(geometry), geometry.samples_per_frame
    window = geometry.sliding_window
    assert (window > render_context_frames(decoder)) == (geometry is WIDE)
    arena = StateArena(decoder, 3)

    @settings(max_examples=15)
    @given(
        references=st.lists(st.integers(0, window), min_size=3, max_size=3),
        first=st.integers(1, 4),
        widths=st.lists(st.integers(1, 9), max_size=6),
        seed=st.integers(0, 99),
    )
    def check(references: list[int], first: int, widths: list[int], seed: int) -> None:
        total = first + sum(widths)
        utterances = [codes(reference + total, seed + row) for row, reference in enumerate(references)]
        pieces: list[list[Tensor]] = [[], [], []]
        with torch.no_grad():
            for row, (utterance, reference) in enumerate(zip(utterances, references, strict=True)):
                slot = torch.tensor([row])
                if reference:
                    padded = nn.functional.pad(utterance[:, : reference + first], (window - reference, 0), value=seed % 32)[None]
                    arena.rows[row].fill_(float("nan"))
                    wave = begin_with_reference(decoder, arena, padded, slot, torch.tensor([reference - window]), new_frames=first)
                else:
                    arena.rows[row].fill_(float("nan"))  # left by whoever had the row before
                    wave = continue_stream(decoder, arena, utterance[None, :, :first], slot, torch.tensor([0]))
                pieces[row].append(wave[0])
            done = first
            for width in widths:
                starts = [reference + done for reference in references]
                batch = torch.stack([u[:, start : start + width] for u, start in zip(utterances, starts, strict=True)])
                waves = continue_stream(decoder, arena, batch, torch.arange(3), torch.tensor(starts))
                for row in range(3):
                    pieces[row].append(waves[row])
                done += width
            for row, reference in enumerate(references):
                truth = decoder.decode(utterances[row][None])[0, :, reference * per_frame :]
                assert (torch.cat(pieces[row], dim=-1) - truth).abs().max() < 1e-11

    check()


def test_what_fp32_attains(tiny_decoder: Code2WavDecoder) -> None:
    """The tiny checkpoint's random weights amplify rounding: eager fp32 itself is up to 1e-4 from fp64, and so are the chunks."""
    exact = exact_decoder(tiny_decoder.geometry, tiny_decoder.state_dict())
    utterance = codes(40, 5)[None]

    def streamed(decoder: Code2WavDecoder) -> Tensor:
        arena, pieces, done = StateArena(decoder, 1), [], 0
        for piece in utterance.split([1, 7, 7, 7, 7, 7, 4], dim=-1):
            pieces.append(continue_stream(decoder, arena, piece, torch.tensor([0]), torch.tensor([done])))
            done += piece.shape[-1]
        return torch.cat(pieces, dim=-1)

    with torch.no_grad():
        truth = exact.decode(utterance)
        assert (streamed(exact) - truth).abs().max() < 1e-11
        assert (tiny_decoder.decode(utterance) - truth).abs().max() < 1e-4
        assert (streamed(tiny_decoder) - truth).abs().max() < 1e-4


# ---------------------------------------------------------------------------------------------------- layers

LAYERS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "pointwise": (partial(CausalConv1d, 4, 6, 1), 1),
    "dilated": (partial(CausalConv1d, 4, 6, 7, dilation=9), 1),
    "depthwise": (partial(ConvNeXtBlock, 4), 1),
    "residual": (partial(ResidualUnit, 4, 3), 1),
    "upsampling without overlap": (partial(CausalConvTranspose1d, 4, 3, 2, 2), 2),
    "upsampling with overlap": (partial(CausalConvTranspose1d, 4, 3, 10, 5), 5),
    "upsampling with a long overlap": (partial(CausalConvTranspose1d, 4, 3, 8, 3), 3),
    "upsampling with a short overlap": (partial(CausalConvTranspose1d, 4, 3, 5, 4), 4),
    "block": (partial(DecoderBlock, 4, 2, 3), 3),
}


@pytest.mark.parametrize("name", LAYERS)
@settings(max_examples=10)
@given(widths=st.lists(st.integers(1, 30), min_size=1, max_size=5), seed=st.integers(0, 9))
def test_layers_go_on_where_they_ended(name: str, widths: list[int], seed: int) -> None:
    make, factor = LAYERS[name]
    torch.manual_seed(seed)
    layer = make().double()
    x = torch.randn(2, 4, sum(widths), dtype=torch.float64)
    rows = torch.zeros(2, 4 * 54 + 4 * 18 + 4 * 6 + 4, dtype=torch.float64)  # room for any of them
    with torch.no_grad():
        truth = layer(x)
        pieces = [in_order([layer], piece, _Histories(rows)) for piece in x.split(widths, dim=-1)]
    assert [piece.shape[-1] for piece in pieces] == [factor * width for width in widths]
    assert torch.allclose(torch.cat(pieces, dim=-1), truth, atol=1e-12)


def test_keys_before_their_rotation_can_stand_anywhere() -> None:
    """A window whose keys are given unrotated is the same at positions 0, 1, … as where it was."""
    model = PreTransformer(SMALL.model_copy(update={"num_hidden_layers": 1})).double().eval()
    frequencies = 10000.0 ** -(torch.arange(0, 4, 2, dtype=torch.float64) / 4)
    angles = (torch.arange(64)[:, None] * frequencies).repeat(1, 2)
    model.cos, model.sin = angles.cos(), angles.sin()
    x, positions = torch.randn(1, 40, 16, dtype=torch.float64), torch.arange(40)
    whole, (cache,) = model(x, cache_plain_keys=True)
    assert torch.equal(cache.key, model.layers[0].self_attn._heads(model.layers[0].self_attn.k_proj(normed(model, x))))
    for start in (7, 20, 36):
        before = [KeyValue(*(part[:, :, start - 5 : start] for part in cache))]
        mask = sliding_window_mask(positions[5:9], positions[:9], 6)
        part, (grown,) = model(x[:, start : start + 4], first_position=5, mask=mask, past=before, cache_plain_keys=True)
        assert torch.allclose(part, whole[:, start : start + 4], atol=1e-12)
        assert torch.equal(grown.key[:, :, :5], before[0].key)


def normed(model: PreTransformer, x: Tensor) -> Tensor:
    normed: Tensor = model.layers[0].input_layernorm(model.input_proj(x))
    return normed


# ---------------------------------------------------------------------------------------------------- figures


def test_the_context_of_a_frame_is_exact() -> None:
    """A change of the hidden frame that far back changes the samples; one a frame earlier does not."""
    for geometry in (SMALL, FLAT, ODD):
        decoder = exact_decoder(geometry)
        context, per_frame = render_context_frames(decoder), geometry.samples_per_frame
        hidden = torch.randn(1, geometry.latent_dim, context + 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        newest = slice(-per_frame, None)
        with torch.no_grad():
            before = decoder.render(hidden)[..., newest]
            for back, changes in ((context, True), (context + 1, False)):
                changed = hidden.clone()
                changed[..., -1 - back] += 3
                assert torch.equal(decoder.render(changed)[..., newest], before) is not changes, (geometry.upsample_rates, back)


def test_the_published_decoder_in_figures() -> None:
    """2.5 MiB a request in bf16: 71 frames of 16,384 numbers and 135,232 numbers of convolutions, rounded up to 9 frames."""
    with torch.device("meta"):
        decoder = Code2WavDecoder(published_geometry()).to(torch.bfloat16)
        arena = StateArena(decoder, 4)
    assert render_context_frames(decoder) == 10
    residual = sum(6 * dilation * channels for dilation in (1, 3, 9) for channels in (768, 384, 192, 96))
    upsampling = 1536 + 768 + 384 + 192  # one input each
    assert history_size(decoder) == 2 * 512 + 2 * 6 * 1024 + 6 * 1024 + upsampling + residual + 6 * 96 == 135_232
    assert arena.rows.shape == (5, 9 + 71, 16_384)
    assert arena.bytes_per_request == 2.5 * 2**20
    assert arena.nbytes == 5 * arena.bytes_per_request


# ---------------------------------------------------------------------------------------------------- arena


@settings(max_examples=30)
@given(
    writes=st.lists(st.tuples(st.integers(1, 12), st.sampled_from([(0,), (1,), (0, 1), (1, 0)])), max_size=12), start=st.integers(0, 2**40)
)
def test_the_ring_holds_the_last_frames(writes: list[tuple[int, tuple[int, ...]]], start: int) -> None:
    """Against lists of all frames that were ever written."""
    arena = StateArena(random_decoder(FLAT), 2)
    page = arena.rows.shape[2]
    written: dict[int, list[float]] = {0: [], 1: []}
    value = 0
    for count, slots in writes:
        kept = min(count, arena.ring)
        frames = torch.arange(value, value + len(slots) * count).view(len(slots), count)
        value += frames.numel()
        ends = torch.tensor([start + len(written[slot]) + count for slot in slots])
        arena.write_frames(torch.tensor(slots), ends - kept, frames[:, -kept:, None].expand(-1, -1, page).float())
        for slot, new in zip(slots, frames, strict=True):
            written[slot] += new.tolist()
    first = torch.tensor([start + len(written[slot]) for slot in (1, 0)])
    found = arena.frames_before(torch.tensor([1, 0]), first)
    assert found.shape == (2, arena.ring, 2, 2, 2, 4)
    for row, slot in zip(found, (1, 0), strict=True):
        known = written[slot][-arena.ring :]
        if known:
            assert row.flatten(1)[-len(known) :].unique(dim=1)[:, 0].tolist() == known
    assert not arena.rows[2].any(), "nobody wrote the spare row"


@pytest.mark.parametrize("geometry", [SMALL, FLAT, ODD], ids=["small", "flat", "odd"])
def test_layers_that_look_back_are_listed_as_they_run(geometry: DecoderGeometry) -> None:
    """Against what the layers ask for: channels, samples, and of three frames, as many samples as they are given."""
    decoder, asked = random_decoder(geometry), []

    class Recording:
        def extend(self, x: Tensor, samples: int) -> Tensor:
            asked.append((x.shape[1], samples, x.shape[2]))
            return F.pad(x, (samples, 0))

    with torch.no_grad():
        decoder.pre_conv(decoder.quantize(torch.zeros(1, 16, 3, dtype=torch.int64)), Recording())
        in_order((decoder.upsample, decoder.decoder), torch.zeros(1, geometry.latent_dim, 3), Recording())
    listed = look_backs(decoder)
    assert [(layer.channels, layer.samples, 3 * layer.per_frame) for layer in listed] == [each for each in asked if each[1]]
    assert [layer.place for layer in listed] == [0, *(layer.end for layer in listed[:-1])]
    assert listed[-1].end == history_size(decoder) == sum(layer.channels * layer.samples for layer in listed)


def test_rows_of_the_arena() -> None:
    arena = StateArena(random_decoder(FLAT), 3)
    arena.rows.normal_()
    before, slots = arena.rows.clone(), torch.tensor([2, 0])
    copies = [arena.copy_of([2, 0]), arena.copy_of([1, 0, 2])]
    assert isinstance(copies[0][0], Tensor)
    assert copies[1][0] == slice(0, 3), "neighbours, in whatever order"
    histories = arena.histories(slots, torch.tensor([3, 1]))
    assert torch.equal(histories, before[slots].flatten(1)[:, : history_size(random_decoder(FLAT))])
    arena.write_histories(slots, histories + 1)
    assert torch.equal(arena.rows[[1, 3]], before[[1, 3]])
    fresh = arena.histories(slots, torch.tensor([0, 1]))
    assert not fresh[0].any(), "a stream that begins has no past"
    assert torch.equal(fresh[1], histories[1] + 1)
    for where, rows in copies:
        arena.rows[[0, 2]] = 7
        arena.put_back(where, rows)
        assert torch.equal(arena.rows, before)


def test_parts_of_rows() -> None:
    """All of them together are the row, but for what fills the last page of histories up."""
    arena = StateArena(random_decoder(FLAT), 3)
    arena.rows.normal_()
    histories, ring = arena.parts_of([2, 0])
    written = arena.histories(torch.tensor([2, 0]), torch.ones(2, dtype=torch.int64))
    assert torch.equal(torch.cat(histories, dim=1), written)
    assert torch.equal(ring, arena.frames_before(torch.tensor([2, 0]), torch.tensor([100, 100])).flatten(2))  # 100 = 20 · (W − 1)
    before = arena.rows.clone()
    for part in (*histories, ring):
        part += 1
    assert torch.equal(arena.rows, before), "they are copies"


# ---------------------------------------------------------------------------------------------------- widths


@settings(max_examples=150)
@given(widths=st.sets(st.integers(1, 9), min_size=1, max_size=3), frames=st.integers(1, 24), is_last=st.booleans())
def test_as_few_captured_widths_as_possible(widths: set[int], frames: int, is_last: bool) -> None:
    """Against trying every combination."""
    plan = ChunkWidths(widths, most_eager_frames=7)
    found = plan.pieces(frames, is_last=is_last)
    unavoidable = -(-frames // max(widths))
    if is_last:
        assert len(found) == unavoidable
        assert set(found) <= widths
        assert sum(found[:-1]) < frames <= sum(found)
        assert all(width < frames - sum(found[:-1]) for width in widths if width < found[-1]), "the last one is the smallest that fits"
        return
    assert sum(found) == frames
    most = unavoidable + SPARE_CALLS
    fewest = next((n for n in range(1, most + 1) for c in combinations_with_replacement(sorted(widths), n) if sum(c) == frames), None)
    if fewest is None:
        assert found == (7,) * (frames // 7) + ((frames % 7,) if frames % 7 else ())
    else:
        assert len(found) == fewest
        assert set(found) <= widths
        assert all(a >= b for a, b in pairwise(found))


def test_long_chunks_are_planned_quickly() -> None:
    plan = ChunkWidths([1, 25], most_eager_frames=300)
    assert plan.pieces(250_027, is_last=False) == (25,) * 10_001 + (1, 1)
    assert plan.pieces(250_001, is_last=True) == (25,) * 10_000 + (1,)
    assert ChunkWidths([], most_eager_frames=300).pieces(700, is_last=False) == (300, 300, 100)


# ---------------------------------------------------------------------------------------------------- Target and settings


@pytest.fixture(scope="module")
def path() -> IncrementalPath:
    connector = ConnectorConfig(codec_chunk_frames=3, initial_codec_chunk_frames=2, codec_chunk_ramp=(1, 2, 5))
    return IncrementalPath(random_decoder(FLAT), connector, batch_sizes=(4, 1), largest_batch=4, max_requests=2, more_widths=(8,))


def zeros(rows: int, frames: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(rows, 16, frames, dtype=torch.int64), torch.tensor([[row, 0] for row in range(rows)])


def test_every_size_of_the_schedule_has_its_graph(path: IncrementalPath) -> None:
    (target,) = path.targets
    plain = {(d.batch_size, d.frames) for d in target.descriptors if not d.state}
    behind = {(d.batch_size, d.frames) for d in target.descriptors if d.state}
    assert plain == {(rows, frames) for rows in (1, 4) for frames in (1, 2, 3, 5, 8)}
    assert behind == {(1, 1), (4, 1)}
    for d in target.descriptors:
        has_reference = d.state == "icl"
        found = target.routine.resolve(*zeros(d.batch_size, d.frames + 6 * has_reference), has_reference)
        assert (found.key, found.candidates[0]) == (d, d)


def test_only_a_last_chunk_may_be_padded(path: IncrementalPath) -> None:
    resolve = path.targets[0].routine.resolve
    assert resolve(*zeros(1, 4), False, False).candidates == ()
    assert [str(d) for d in resolve(*zeros(1, 4), False, True).candidates] == ["B1×T5", "B1×T8", "B4×T5", "B4×T8"]
    assert resolve(*zeros(1, 4), False, True).key == Descriptor(1, 4)


def test_calls_that_are_no_steps(path: IncrementalPath) -> None:
    (target,) = path.targets
    before = path.table.rows.clone()
    given_codes, places = zeros(1, 3)
    for wrong in (places[:, :1], places.repeat(2, 1), places.int(), places.float()):
        with pytest.raises(InputError, match=r"places must be int64 \[B, 2\] \(slot, first frame\) for codes \[B, Q, n\], got"):
            target(given_codes, wrong)
    with pytest.raises(InputError, match=r"codes with a reference must be \[B, Q, 6 \+ n\], n ≥ 1, got \[1, 16, 6\]"):
        target(*zeros(1, 6), True)
    with pytest.raises(InputError, match="codes must be in"):
        target(given_codes + 99, places)
    with pytest.raises(InputError, match=r"no live request 'nobody'\. Live: none"):
        path.state_of("nobody")
    assert torch.equal(path.table.rows, before)


def test_the_algorithm_is_a_setting() -> None:
    decoder = random_decoder(FLAT)
    by_default = Qwen3TTSCode2Wav(decoder, StageConfig.from_dict({"connector": {"codec_chunk_frames": 3}}))
    assert by_default.streaming is not None
    assert by_default.incremental is None
    model = Qwen3TTSCode2Wav(decoder, stage(max_num_seqs=5, targets={"qwen3_tts.incremental": {"capture_widths": [9]}}))
    assert model.streaming is None
    assert model.incremental is not None
    assert {d.frames for d in model.get_vocoder_cudagraph_targets()[0].descriptors} == {1, 3, 9}
    table = model.incremental.table
    assert model.state_bytes == table.nbytes == (5 + 2 + 1) * table.bytes_per_request  # requests, a batch of passing ones, padding
    assert any(module is table for target in model.get_vocoder_cudagraph_targets() for module in target.routine.captured_modules())
    with pytest.raises(ConfigError, match=r"streaming_algorithm: Input should be 'published' or 'incremental'"):
        StageConfig.from_dict({"vocoder_cudagraph": {"streaming_algorithm": "incremantal"}})
    with pytest.raises(ConfigError, match=r"chunks of 59 frames need 65 positions .* the decoder has 64. Use smaller chunks"):
        Qwen3TTSCode2Wav(decoder, stage(targets={"qwen3_tts.incremental": {"capture_widths": [59]}}))


def test_state_of_a_live_request(path: IncrementalPath) -> None:
    path.forward([ChunkRequest("a", codes(8, 1), ref_frames=5)])
    record, row = path.state_of("a")
    assert (record.ref_frames, record.suffix_frames, record.slot) == (5, 3, 0)
    assert torch.equal(row, path.table.rows[0])
    assert path.abort(["a", "b"]) == ["a"]
