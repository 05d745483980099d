"""Incremental decoding through a runner, held to the whole utterance decoded at once. Shared by both backends.

A test class that inherits :class:`IncrementalContract` provides a ``device`` fixture. In fp64 nothing but the mathematics can
differ; in fp32 the small random decoder amplifies rounding to some 1e-5, the bundled checkpoint does not.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from contracts.streaming import (
    CHUNK,
    MIXED,
    PER_FRAME,
    SMALL,
    TINY,
    WINDOW,
    ChunkContract,
    FailingGraph,
    Stream,
    codes,
    play,
    same,
    samples_of,
)
from contracts.streaming import running as streaming_running
from contracts.streaming import stage as streaming_stage
from vgraph_lab import bundled
from vgraph_lab.config import StageConfig
from vgraph_lab.errors import FallbackReason, RequestError, RequestErrorKind
from vgraph_lab.qwen3_tts.checkpoint import load_decoder, random_decoder
from vgraph_lab.qwen3_tts.codes import read_codes
from vgraph_lab.qwen3_tts.decoder import Code2WavDecoder
from vgraph_lab.qwen3_tts.geometry import DecoderGeometry
from vgraph_lab.qwen3_tts.incremental import continue_stream
from vgraph_lab.qwen3_tts.incremental_path import IncrementalPath
from vgraph_lab.qwen3_tts.incremental_state import StateArena
from vgraph_lab.requests import ChunkRequest
from vgraph_lab.runner import GPUGenerationModelRunner

TARGET = "qwen3_tts.incremental"
SETTINGS = {"streaming_algorithm": "incremental"}
# Few layers, for what does not depend on them: capturing is most of the work.
FLAT = SMALL.model_copy(update={"upsampling_ratios": (2,), "upsample_rates": (2,)})


def stage(sizes: Sequence[int] = (2,), **fields: Any) -> StageConfig:
    return streaming_stage(sizes, **SETTINGS, **fields)


def running(
    device: str, cfg: StageConfig, geometry: DecoderGeometry = FLAT, **options: Any
) -> AbstractContextManager[GPUGenerationModelRunner]:
    """A ready runner on a small random decoder, or on another one."""
    return streaming_running(device, cfg, geometry, **options)


def path_of(runner: GPUGenerationModelRunner) -> IncrementalPath:
    path = runner.model.incremental  # type: ignore[attr-defined]
    assert isinstance(path, IncrementalPath)
    return path


def whole(decoder: Code2WavDecoder, stream: Stream) -> Tensor:
    """What the eager decoder makes of reference and new frames together, cut to the new ones."""
    return decoder(stream.codes[None].to(decoder.device))[0, 0, stream.reference * decoder.samples_per_frame :].float()


def largest_distance(runner: GPUGenerationModelRunner, streams: Sequence[Stream]) -> float:
    """Play the streams side by side; how far any sample is from the whole utterance's."""
    found = play(runner, streams)
    decoder = path_of(runner).decoder
    distances = []
    for stream in streams:
        samples, expected = torch.cat(found[stream.name]), whole(decoder, stream)
        assert samples.dtype is torch.float32
        assert samples.shape == expected.shape
        distances.append(float((samples - expected).abs().max()))
    return max(distances)


chunkings = st.lists(
    st.tuples(st.sampled_from([0, 0, 1, 2, 5, WINDOW, WINDOW + 1, 3 * WINDOW]), st.lists(st.integers(1, 8), min_size=1, max_size=6)),
    min_size=1,
    max_size=4,
)


class IncrementalContract(ChunkContract):
    """Subclasses provide ``device``."""

    graph_settings = SETTINGS
    geometry = FLAT
    atol = 2e-4

    @pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
    def test_every_chunking_gives_the_whole_utterance(self, device: str, graphs: bool) -> None:
        """Any widths, ragged from the first chunk on, with and without a reference, rows of a batch at different positions."""
        cfg = stage(enforce_eager=not graphs)
        with running(device, cfg, SMALL, dtype=torch.float64) as runner:

            @settings(max_examples=10, suppress_health_check=list(HealthCheck))
            @given(plans=chunkings, seed=st.integers(0, 999))
            def check(plans: list[tuple[int, list[int]]], seed: int) -> None:
                runner.model.reset()
                streams = [Stream(f"r{i}", reference, sizes, seed=seed + i) for i, (reference, sizes) in enumerate(plans)]
                assert largest_distance(runner, streams) < 1e-6  # samples are handed over in fp32, and eager's angles are fp32 too
                assert runner.model.live_requests == ()  # type: ignore[attr-defined]

            check()
            assert (runner.stats().hits() > 0) == graphs

    def test_a_real_voice_to_1e_5(self, device: str) -> None:
        """The bundled checkpoint in fp32, in batches whose rows are at different positions, until the window is full and beyond."""
        decoder = load_decoder(bundled.checkpoint_folder(), device)
        cfg = StageConfig.from_dict(
            {
                "connector": {"codec_chunk_frames": 8},
                "max_num_seqs": 4,
                "vocoder_cudagraph": {"streaming_algorithm": "incremental", "capture_batch_sizes": [2], "num_warmups": 1},
            }
        )
        streams = [
            Stream("icl", 72, [1, 8, 5], seed=0),
            Stream("short", 30, [1, 8, 8, 2], seed=0),
            Stream("xvec", 0, [1, *[8] * 9], seed=0),
        ]
        for stream, utterance in zip(streams, bundled.utterances()[:3], strict=True):
            spoken = read_codes(utterance.codes_file)[utterance.id]
            stream.codes = spoken.repeat(1, 8)[:, : stream.reference + sum(stream.sizes)]
        with running(device, cfg, decoder=decoder) as runner:
            assert largest_distance(runner, streams) < 1e-5
            assert runner.stats().fallbacks() == 0

    def test_golden_utterances_in_chunks(self, device: str) -> None:
        """Made with the published implementation, all at once. They are up to 7e-5 from the same mathematics in fp64."""
        golden = np.load(TINY / "stateless.npz")
        with running(device, stage([1, 2]), decoder=load_decoder(TINY, device)) as runner:
            for name in ("1", "5", "40", "b3_33"):
                given_codes, published = torch.from_numpy(golden[f"codes_{name}"]), torch.from_numpy(golden[f"wav_{name}"])
                streams = []
                for row, utterance in enumerate(given_codes):
                    frames = utterance.shape[1]
                    sizes = [1, *[CHUNK] * ((frames - 1) // CHUNK), (frames - 1) % CHUNK]
                    streams.append(Stream(f"{name} {row}", 0, [n for n in sizes if n], seed=0))
                    streams[-1].codes = utterance
                found = play(runner, streams)
                for stream, expected in zip(streams, published, strict=True):
                    assert (torch.cat(found[stream.name]).cpu() - expected[0]).abs().max() < 2e-4

    def test_calls_are_counted_by_target(self, device: str) -> None:
        with running(device, stage()) as runner:
            assert [t.target_id for t in runner.model.get_vocoder_cudagraph_targets()] == [TARGET]  # type: ignore[attr-defined]
            play(runner, MIXED)
            assert {k.target_id for k in runner.stats().counts} == {TARGET}
            assert runner.manager is not None
            assert {str(e.descriptor) for e in runner.manager.entries()} == {"B2×T1", "B2×T3", "B2×T1·icl"}

    def test_requests_at_different_positions_share_a_call(self, device: str) -> None:
        with running(device, stage([2])) as runner:
            early, late = Stream("early", 0, [1, 3, 3, 3], seed=1), Stream("late", 6, [1, 3, 3], seed=2)
            runner.execute_model([early.chunk(0)])
            runner.execute_model([early.chunk(1), late.chunk(0)])
            before = runner.stats()
            runner.execute_model([early.chunk(2), late.chunk(1)])
            assert runner.stats().calls() - before.calls() == 1

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_a_reused_row_begins_as_new(self, device: str, value: float) -> None:
        """A masked key is multiplied by zero, which does not help against these."""
        streams = [Stream("xvec", 0, [1, 3, 3], seed=1), Stream("icl", 4, [1, 3, 3], seed=2), Stream("once", 0, [3], seed=3)]
        with running(device, stage()) as runner:
            expected = play(runner, streams)
        with running(device, stage()) as runner:
            table = path_of(runner).table
            table.rows[: table.spare_slot].fill_(value)
            assert same(play(runner, streams), expected)

    def test_chunks_wider_than_any_graph_are_cut(self, device: str) -> None:
        """In a few captured widths; else in one eager call, with its reason."""
        with running(device, stage([1]), dtype=torch.float64) as runner:

            def calls_of(stream: Stream) -> dict[str, int]:
                before = dict(runner.stats().counts)
                assert largest_distance(runner, [stream]) < 1e-6
                new = {kind: n - before.get(kind, 0) for kind, n in runner.stats().counts.items()}
                return {f"{kind.key} {kind.reason or 'graph'}": n for kind, n in new.items() if n}

            assert calls_of(Stream("cut", 0, [7, 1], seed=1)) == {"B1×T3 graph": 2, "B1×T1 graph": 2}
            assert calls_of(Stream("padded", 0, [1, 8], seed=1)) == {"B1×T3 graph": 2, "B1×T1 graph": 1, "B1×T2 graph": 1}
            assert calls_of(Stream("behind a reference", 5, [4, 3], seed=1)) == {"B1×T1·icl graph": 1, "B1×T3 graph": 2}
            assert calls_of(Stream("long reference", 8, [1, 3], seed=1)) == {"B1×T3 graph": 4}
        with running(device, stage([1], connector={"codec_chunk_frames": 8}), dtype=torch.float64) as runner:
            eager = {"B1×T7 shape_not_covered": 1, "B1×T8 graph": 1}
            assert calls_of(Stream("eager", 0, [7, 8], seed=1)) == eager
            assert calls_of(Stream("eager behind a reference", 2, [6, 8], seed=1)) == {
                "B1×T6·icl shape_not_covered": 1,
                "B1×T8 graph": 1,
            }

    def test_longer_than_the_decoder_has_positions_for(self, device: str) -> None:
        """64 positions: as one chunk, as a reference, and as a stream."""
        for graphs in (False, True):
            with running(device, stage([1], enforce_eager=not graphs), dtype=torch.float64) as runner:
                long_model = random_decoder(FLAT.model_copy(update={"max_position_embeddings": 400}), device, torch.float64, seed=4)
                for stream in (Stream("a", 0, [150, 3], seed=1), Stream("b", 140, [2, 3], seed=2), Stream("c", 0, [3] * 50, seed=3)):
                    found = torch.cat(play(runner, [stream])[stream.name])
                    assert (found - whole(long_model, stream)).abs().max() < 1e-5

    @pytest.mark.parametrize("position", [450_000, 2**40], ids=["ten hours", "for ever"])
    def test_positions_grow_for_hours(self, device: str, position: int) -> None:
        """A stream that far on, against the same last frames decoded as an utterance: alike to the last bit, once what lies
        before them is out of reach (two layers with W − 1 frames each, the convolutions' context, and as many samples)."""
        decoder, reach = random_decoder(SMALL, device, torch.float64, seed=4), 2 * (WINDOW - 1) + 2 + 10
        given_codes = codes(reach + 20, 3)[None].to(device)
        arena = StateArena(decoder, 2)
        arena.rows.normal_(generator=torch.Generator(device).manual_seed(1))
        slots, first = torch.tensor([1, 0], device=device), torch.tensor([position, 0], device=device)
        pieces = []
        with torch.no_grad():
            for piece in given_codes.split([1, 3, 2, 7, reach + 7], dim=-1):
                pieces.append(continue_stream(decoder, arena, piece.expand(2, -1, -1), slots, first))
                first = first + piece.shape[-1]
            truth = decoder.decode(given_codes)
        found = torch.cat(pieces, dim=-1)[0, :, reach * PER_FRAME :]
        assert (found - truth[0, :, reach * PER_FRAME :]).abs().max() < 1e-6

    def test_more_live_requests_than_slots(self, device: str) -> None:
        """The new one is refused, the others go on. Who comes and goes in one chunk needs no slot, and an end makes room at once."""
        streams = [Stream(f"r{i}", 0, [1, 3, 3], seed=i) for i in range(2)]
        with running(device, stage(max_num_seqs=2)) as runner:
            expected = play(runner, streams)
        with running(device, stage(max_num_seqs=2)) as runner:
            found = {s.name: [samples_of(runner.execute_model([s.chunk(0)])[s.name])] for s in streams}
            passing = [Stream(f"passing {i}", i % 2 * 4, [4], seed=10 + i) for i in range(5)]
            results = runner.execute_model(
                [ChunkRequest("third", codes(1, 9)), *(s.chunk(0) for s in [*passing]), *(s.chunk(1) for s in streams)]
            )
            error = results["third"]
            assert isinstance(error, RequestError)
            assert error.kind is RequestErrorKind.NO_FREE_SLOT
            assert "all 2 slots are in use. Send fewer requests at a time or raise max_num_seqs." in str(error)
            decoder = path_of(runner).decoder
            for stream in passing:
                assert torch.allclose(samples_of(results[stream.name]), whole(decoder, stream), atol=2e-4)
            newcomer = Stream("newcomer", 0, [1, 3], seed=7)
            last = runner.execute_model([newcomer.chunk(0), *(s.chunk(2) for s in streams)])
            for stream in streams:
                found[stream.name] += [samples_of(results[stream.name]), samples_of(last[stream.name])]
            assert same(found, expected)
            assert runner.model.live_requests == ("newcomer",)  # type: ignore[attr-defined]
            pieces = [last["newcomer"], runner.execute_model([newcomer.chunk(1)])["newcomer"]]
            assert torch.allclose(torch.cat(pieces), whole(decoder, newcomer), atol=2e-4)  # type: ignore[arg-type]

    def test_a_failed_forward_changes_no_request(self, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """At every step each Target call fails once, after those before it have moved their rows on; the batch repeated gives the
        right samples. One request ends and another one takes its slot in a failing forward, too."""
        streams = [Stream("a", 6, [1, 3, 1, 4, 2], seed=1), Stream("b", 0, [3, 1, 3, 3], seed=2)]
        heir = Stream("heir", 0, [2, 3], seed=3)
        plan = [[(s, i) for s in streams if i < len(s.sizes)] for i in range(5)]
        plan[3].append((heir, 0))  # b ends here
        plan[4].append((heir, 1))

        def play_plan(fails: bool) -> dict[str, list[Tensor]]:
            found: dict[str, list[Tensor]] = {"a": [], "b": [], "heir": []}
            with running(device, stage(max_num_seqs=2)) as runner:
                for moves in plan:
                    batch = [stream.chunk(i) for stream, i in moves]
                    if fails:
                        fail_at_every_call(runner, batch, monkeypatch)
                    for name, result in runner.execute_model(batch).items():
                        found[name].append(samples_of(result))
            return found

        assert same(play_plan(fails=True), play_plan(fails=False))

    def test_state_that_cannot_be_brought_back_ends_the_requests(self, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
        bystander = Stream("bystander", 6, [1, 3, 3], seed=7)
        with running(device, stage()) as runner:
            expected = play(runner, [bystander])
        with running(device, stage()) as runner:
            found = [samples_of(runner.execute_model([bystander.chunk(0)])["bystander"])]
            runner.execute_model([MIXED[1].chunk(0)])

            def broken(*args: Any) -> None:
                raise KeyboardInterrupt

            with monkeypatch.context() as patch:
                patch.setattr(path_of(runner)._target, "_delegate", broken)
                patch.setattr(path_of(runner).table, "put_back", broken)
                with pytest.raises(KeyboardInterrupt):
                    runner.execute_model([MIXED[1].chunk(1)])
            error = runner.execute_model([MIXED[1].chunk(2)])["xvec"]
            assert isinstance(error, RequestError)
            assert error.kind is RequestErrorKind.FAILED_BEFORE
            assert "its state could not be written or brought back (KeyboardInterrupt)" in str(error)
            assert runner.model.live_requests == ("bystander",)  # type: ignore[attr-defined]
            found += [samples_of(runner.execute_model([bystander.chunk(i)])["bystander"]) for i in (1, 2)]
            assert all(torch.equal(a, b) for a, b in zip(found, expected["bystander"], strict=True))

    def test_a_release_during_a_replay(self, device: str) -> None:
        """Another thread aborts requests and their slots are taken again, while one plays on."""
        steady = Stream("steady", 4, [1, *[3] * 20], seed=1)
        with running(device, stage()) as runner:
            expected = play(runner, [steady])
        with running(device, stage(max_num_seqs=3)) as runner:
            stop = threading.Event()
            unexpected: list[BaseException] = []

            def come_and_go(who: int) -> None:
                n = 0
                while not stop.is_set():
                    try:
                        name = f"{who}.{n}"
                        samples_of(runner.execute_model([ChunkRequest(name, codes(3, n))])[name])
                        assert runner.abort([name]) == [name]
                        n += 1
                    except BaseException as error:  # noqa: BLE001 - shown below
                        unexpected.append(error)
                        return

            threads = [threading.Thread(target=come_and_go, args=(who,)) for who in range(2)]
            for thread in threads:
                thread.start()
            try:
                found = play(runner, [steady])
            finally:
                stop.set()
                for thread in threads:
                    thread.join()
            assert unexpected == []
            assert same(found, expected)
            assert runner.model.live_requests == ()  # type: ignore[attr-defined]

    def test_a_budget_smaller_than_the_smallest_graph(self, device: str) -> None:
        with running(device, stage(max_memory_bytes=1), dtype=torch.float64) as runner:
            assert largest_distance(runner, MIXED) < 1e-6
            assert runner.manager is not None
            assert runner.manager.entries() == []
            assert runner.stats().reasons() == {FallbackReason.OVER_BUDGET: runner.stats().calls()}

    def test_lazy_capture_of_a_width(self, device: str) -> None:
        """Between two chunks, while requests are live: a capture must leave their rows alone."""
        lazy = {"targets": {TARGET: {"enable_lazy_capture": True, "max_extra_graphs": 1, "capture_widths": [20]}}}
        with running(device, stage([1], **lazy), dtype=torch.float64) as runner:
            assert largest_distance(runner, [Stream("a", 3, [1, 16, 16, 3], seed=1), Stream("b", 0, [3, 3, 16, 3], seed=2)]) < 1e-6
            assert runner.manager is not None
            assert [str(e.descriptor) for e in runner.manager.entries() if e.lazy] == ["B1×T16"]
            assert runner.stats().fallbacks() == 0

    def test_nothing_grows_over_a_thousand_steps(self, device: str) -> None:
        """Neither tensors nor their memory nor the arena's address, whatever comes and goes."""
        with running(device, stage(max_num_seqs=3)) as runner:
            path, manager = path_of(runner), runner.manager
            assert manager is not None
            given_codes, address = codes(3, 1), path.table.rows.data_ptr()

            def step(number: int) -> None:
                name = f"r{number // 10}"
                steady = ChunkRequest("steady", given_codes)
                other = ChunkRequest(name, given_codes[:, : 1 + number % 3], finished=number % 10 == 9)
                runner.execute_model([steady, other] if number % 7 else [steady])
                if number % 10 == 9:
                    runner.abort([name])

            def readings() -> tuple[int, ...]:
                gc.collect()
                things = [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]
                tensors = [thing for thing in things if thing.layout is torch.strided and not thing.is_nested]
                allocated = torch.cuda.memory_allocated(device) if device != "cpu" else 0
                return len(tensors), sum(t.nbytes for t in tensors), allocated, manager.pool.reserved_bytes, manager.charged_bytes

            for number in range(20):
                step(number)
            before = readings()
            for number in range(20, 1_020):
                step(number)
            assert readings() == before
            assert path.table.rows.data_ptr() == address
            assert list(path.book.live) == ["steady"]
            assert path.book.live["steady"].suffix_frames == 3 * 1_020


def fail_at_every_call(runner: GPUGenerationModelRunner, batch: list[ChunkRequest], monkeypatch: pytest.MonkeyPatch) -> None:
    """Execute a batch again and again: its first Target call fails at its launch, then its second, and so on. In the end it goes
    through, which is undone."""
    assert runner.manager is not None
    before = _Requests(runner)
    for calls in range(10):
        countdown = [calls]
        with monkeypatch.context() as patch:
            for entry in runner.manager.entries():
                patch.setattr(entry, "graph", FailingGraph(entry.graph, countdown))
            with suppress(RuntimeError):
                runner.execute_model(batch)
        if countdown[0] >= 0:  # no launch failed
            assert calls > 0
            before.restore(runner)
            return
        before.check(runner)
    raise AssertionError("more calls than expected")


class _Requests:
    """What a runner's requests are, to be compared after a failed forward and restored after one that went through."""

    def __init__(self, runner: GPUGenerationModelRunner) -> None:
        path = path_of(runner)
        self._rows = path.table.rows.clone()
        self._live = {name: (r.slot, r.suffix_frames) for name, r in path.book.live.items()}
        self._free, self._ended = list(path.book._free), dict(path.book._ended)
        self._records = dict(path.book.live)

    def check(self, runner: GPUGenerationModelRunner) -> None:
        path = path_of(runner)
        assert {name: (r.slot, r.suffix_frames) for name, r in path.book.live.items()} == self._live
        for slot, _ in self._live.values():
            assert torch.equal(path.table.rows[slot], self._rows[slot])
        assert (list(path.book._free), dict(path.book._ended)) == (self._free, self._ended)

    def restore(self, runner: GPUGenerationModelRunner) -> None:
        path = path_of(runner)
        path.table.rows.copy_(self._rows)
        path.book.live = dict(self._records)
        for name, (slot, frames) in self._live.items():
            path.book.live[name].slot, path.book.live[name].suffix_frames = slot, frames
        path.book._free = list(self._free)
        path.book._ended.clear()
        path.book._ended.update(self._ended)
