"""Streaming through a runner, held to the published streams and to eager. Shared by both backends.

A test class that inherits :class:`StreamingContract` provides a ``device`` fixture. What incremental decoding promises as well is in
:class:`ChunkContract`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from qwen3_tts.streams import NAMES, golden_requests, play_golden, stage_of
from torch import Tensor

from vgraph_lab.config import StageConfig
from vgraph_lab.errors import FallbackReason, LifecycleError, RequestError, RequestErrorKind
from vgraph_lab.qwen3_tts.checkpoint import random_decoder
from vgraph_lab.qwen3_tts.code2wav import Qwen3TTSCode2Wav
from vgraph_lab.qwen3_tts.decoder import Code2WavDecoder
from vgraph_lab.qwen3_tts.geometry import DecoderGeometry
from vgraph_lab.requests import ChunkRequest
from vgraph_lab.runner import GPUGenerationModelRunner

TINY = Path(__file__).parents[1] / "data" / "tiny-12hz"
SMALL = DecoderGeometry(codebook_size=32, codebook_dim=8, latent_dim=16, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
                        num_attention_heads=4, num_key_value_heads=2, head_dim=4, sliding_window=6, max_position_embeddings=64,
                        decoder_dim=16)  # fmt: skip
CHUNK, WINDOW, PER_FRAME = 3, 6, 1920


def codes(frames: int, seed: int) -> Tensor:
    return torch.randint(0, 32, (16, frames), generator=torch.Generator().manual_seed(seed))


def stage(
    sizes: Sequence[int] = (2,), *, max_num_seqs: int = 6, connector: dict[str, Any] | None = None, **graph_settings: Any
) -> StageConfig:
    delivery = {"codec_chunk_frames": CHUNK, "initial_codec_chunk_frames": 1, "codec_left_context_frames": WINDOW, **(connector or {})}
    graphs = {"capture_batch_sizes": list(sizes), "num_warmups": 1, **graph_settings}
    return StageConfig.from_dict({"connector": delivery, "max_num_seqs": max_num_seqs, "vocoder_cudagraph": graphs})


@contextmanager
def running(
    device: str,
    cfg: StageConfig,
    geometry: DecoderGeometry = SMALL,
    *,
    decoder: Code2WavDecoder | None = None,
    dtype: torch.dtype = torch.float32,
) -> Iterator[GPUGenerationModelRunner]:
    """A ready runner on a small random decoder, or on another one."""
    with GPUGenerationModelRunner(cfg, device) as runner:
        runner.load_model(Qwen3TTSCode2Wav(decoder or random_decoder(geometry, device, dtype, seed=4), cfg))
        runner.capture_model()
        yield runner


class Stream:
    """One request's chunks: a reference, then sizes of new frames."""

    def __init__(self, name: str, reference: int, sizes: Sequence[int], *, seed: int) -> None:
        self.name, self.reference, self.sizes = name, reference, list(sizes)
        self.codes = codes(reference + sum(sizes), seed)

    def chunk(self, i: int, *, finished: bool | None = None) -> ChunkRequest:
        start = self.reference + sum(self.sizes[:i])
        first = 0 if i == 0 else start
        is_last = i == len(self.sizes) - 1 if finished is None else finished
        return ChunkRequest(self.name, self.codes[:, first : start + self.sizes[i]], self.reference if i == 0 else 0, is_last)


def samples_of(result: object) -> Tensor:
    assert isinstance(result, Tensor), result
    return result


def play(runner: GPUGenerationModelRunner, streams: Sequence[Stream], *, reverse: bool = False) -> dict[str, list[Tensor]]:
    """Chunk i of every stream together, until all have ended."""
    found: dict[str, list[Tensor]] = {stream.name: [] for stream in streams}
    for i in range(max(len(stream.sizes) for stream in streams)):
        batch = [stream.chunk(i) for stream in streams if i < len(stream.sizes)]
        for name, result in runner.execute_model(batch[::-1] if reverse else batch).items():
            found[name].append(samples_of(result))
    return found


def same(a: dict[str, list[Tensor]], b: dict[str, list[Tensor]]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(x, y) for name in a for x, y in zip(a[name], b[name], strict=True))


def close(a: dict[str, list[Tensor]], b: dict[str, list[Tensor]], atol: float) -> bool:
    return a.keys() == b.keys() and all(torch.allclose(x, y, atol=atol) for name in a for x, y in zip(a[name], b[name], strict=True))


MIXED = [
    Stream("icl", 6, [1, 3, 3, 3, 2], seed=1),
    Stream("xvec", 0, [1, 3, 3, 3, 3], seed=2),
    Stream("short", 4, [1, 3, 1], seed=3),
    Stream("once", 0, [1], seed=4),
    Stream("other", 0, [1, 3, 2], seed=5),
]


class ChunkContract:
    """What both ways of streaming promise. Subclasses provide ``device``."""

    graph_settings: ClassVar[dict[str, Any]] = {}
    geometry = SMALL
    atol = 1e-4  # between graphs and eager
    more_bad_chunks: ClassVar[list[ChunkRequest]] = []

    def running(self, device: str, sizes: Sequence[int] = (2,), **fields: Any) -> AbstractContextManager[GPUGenerationModelRunner]:
        """A ready runner."""
        return running(device, stage(sizes, **self.graph_settings, **fields), self.geometry)

    def test_graphs_equal_eager_in_mixed_batches(self, device: str) -> None:
        with self.running(device) as runner:
            through_graphs = play(runner, MIXED)
            assert runner.stats().fallbacks() == 0
        with self.running(device, enforce_eager=True) as runner:
            eager = play(runner, MIXED)
            assert runner.stats().reasons() == {FallbackReason.DISABLED: runner.stats().calls()}
            assert runner.manager is not None
            assert runner.manager.entries() == []
            assert runner.manager.charged_bytes == 0
        assert close(through_graphs, eager, self.atol)

    def test_a_stream_is_what_it_is_alone(self, device: str) -> None:
        """Whatever its neighbours are, their order, and what its rows and slots held before, aborted requests included: bit for
        bit, since graphs of one batch size run the same kernels."""
        alone: dict[str, list[Tensor]] = {}
        for stream in MIXED[:3]:
            with self.running(device) as runner:
                alone |= play(runner, [stream])
        with self.running(device) as runner:
            together = play(runner, MIXED)
            assert same({name: together[name] for name in alone}, alone)
            again = [Stream(f"{s.name} again", s.reference, s.sizes, seed=90 + i) for i, s in enumerate(MIXED)]
            play(runner, again)  # other content in the same rows and slots
            aborted = [Stream(f"{s.name} aborted", s.reference, [3, 3], seed=80 + i) for i, s in enumerate(MIXED)]
            runner.execute_model([s.chunk(0) for s in aborted])
            assert runner.abort([s.name for s in aborted]) == [s.name for s in aborted]
            renamed = [Stream(f"{s.name} 2", s.reference, s.sizes, seed=i + 1) for i, s in enumerate(MIXED)]
            later = play(runner, renamed, reverse=True)
            assert same({name.removesuffix(" 2"): pieces for name, pieces in later.items()}, together)
            assert runner.model.live_requests == ()  # type: ignore[attr-defined]

    def test_one_bad_chunk_changes_nothing_for_the_others(self, device: str) -> None:
        bad = [
            ChunkRequest("values", torch.full((16, 1), 32)),
            ChunkRequest("quantisers", torch.zeros(8, 1, dtype=torch.int64)),
            ChunkRequest("short reference", codes(3, 1), ref_frames=5),
            ChunkRequest("empty", codes(0, 1)),
            ChunkRequest("floats", torch.zeros(16, 1)),
            *self.more_bad_chunks,
        ]
        with self.running(device) as runner:
            expected = play(runner, MIXED)
        with self.running(device) as runner:
            first = runner.execute_model([*bad[:3], *(s.chunk(0) for s in MIXED), *bad[3:]])
            for chunk in bad:
                error = first[chunk.request_id]
                assert isinstance(error, RequestError), chunk.request_id
                assert error.kind is RequestErrorKind.INVALID_INPUT
            found = {s.name: [samples_of(first[s.name])] for s in MIXED}
            for i in range(1, 5):
                batch = [s.chunk(i) for s in MIXED if i < len(s.sizes)]
                if i == 1:  # a bad chunk in the middle of a request, beside the good ones
                    batch.append(ChunkRequest("values", codes(3, 1)))
                for name, result in runner.execute_model(batch).items():
                    if name == "values":
                        assert isinstance(result, RequestError)
                        assert result.kind is RequestErrorKind.FAILED_BEFORE
                        assert "got values from 32 to 32" in str(result)
                    else:
                        found[name].append(samples_of(result))
            assert same(found, expected)

    def test_inference_mode_at_any_step(self, device: str) -> None:
        """Serving engines work in it; what is made inside must be usable outside, and the other way round."""
        cfg = stage(**self.graph_settings)
        with running(device, cfg, self.geometry) as runner:
            expected = play(runner, MIXED[:2])
        with GPUGenerationModelRunner(cfg, device) as runner:
            with torch.inference_mode():
                runner.load_model(Qwen3TTSCode2Wav(random_decoder(self.geometry, device, seed=4), cfg))
                runner.capture_model()
            found: dict[str, list[Tensor]] = {s.name: [] for s in MIXED[:2]}
            for i in range(5):
                with torch.inference_mode(i % 2 == 0):
                    for name, result in runner.execute_model([s.chunk(i) for s in MIXED[:2]]).items():
                        found[name].append(samples_of(result).clone())
            assert same(found, expected)
            assert runner.stats().fallbacks() == 0


class StreamingContract(ChunkContract):
    """Subclasses provide ``device``."""

    more_bad_chunks: ClassVar[list[ChunkRequest]] = [ChunkRequest("too long", codes(CHUNK + 1, 1))]

    @pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
    @pytest.mark.parametrize("name", NAMES)
    def test_golden_streams(self, device: str, name: str, graphs: bool) -> None:
        cfg = stage_of(TINY, name, graphs=graphs, capture_batch_sizes=[2] if "mixed" in name else [1], num_warmups=1)
        with GPUGenerationModelRunner(cfg, device) as runner:
            runner.load_model(Qwen3TTSCode2Wav.from_checkpoint(TINY, cfg, device))
            report = runner.capture_model()
            assert (report.captured > 0) == graphs
            worst = play_golden(runner, list(golden_requests(TINY, name)))
            stats = runner.stats()
        # The golden vectors are themselves up to 6e-5 from the same mathematics in fp64.
        assert max(worst.values()) < 2e-4, worst
        assert stats.hits() == (stats.calls() if graphs else 0)
        assert stats.calls() > 0

    def test_large_groups_are_split_and_small_ones_padded(self, device: str) -> None:
        streams = [Stream(f"r{i}", 0, [1, 3], seed=i) for i in range(5)]
        with running(device, stage([1, 2])) as runner:
            play(runner, streams)
            hits = {(k.target_id, k.key.batch_size, k.descriptor.batch_size): n for k, n in runner.stats().counts.items() if k.descriptor}
        assert hits == {
            ("qwen3_tts.xvec_prefix", 2, 2): 2,
            ("qwen3_tts.xvec_prefix", 1, 1): 1,
            ("qwen3_tts.suffix", 2, 2): 2,
            ("qwen3_tts.suffix", 1, 1): 1,
        }
        with running(device, stage([4])) as runner:
            play(runner, streams[:3])
            assert {(k.key.batch_size, k.descriptor.batch_size) for k in runner.stats().counts if k.descriptor} == {(3, 4)}

    def test_a_failed_forward_changes_no_request(self, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """At every step the second Target call fails after the first has succeeded; the batch repeated gives the right samples."""
        streams = MIXED[:2]
        with running(device, stage()) as runner:
            expected = play(runner, streams)
        with running(device, stage()) as runner:
            found: dict[str, list[Tensor]] = {s.name: [] for s in streams}
            assert runner.manager is not None
            entries = runner.manager.entries()
            for i in range(5):
                batch = [s.chunk(i) for s in streams]  # two modes: two calls
                countdown = [1]
                with monkeypatch.context() as patch:
                    for entry in entries:
                        patch.setattr(entry, "graph", FailingGraph(entry.graph, countdown))
                    with pytest.raises(RuntimeError, match="the device is lost"):
                        runner.execute_model(batch)
                assert countdown == [-1], "the first call went through, the second did not"
                for name, result in runner.execute_model(batch).items():
                    found[name].append(samples_of(result))
            assert same(found, expected)
            assert runner.stats().replay_errors() == 5

    def test_state_that_could_not_be_written_ends_the_requests(self, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Nobody continues from rows that may be half new, and nobody else is touched."""
        bystander = Stream("bystander", 6, [1, 3, 3, 3], seed=7)
        with running(device, stage()) as runner:
            expected = play(runner, [bystander])
        with running(device, stage()) as runner:
            found = [samples_of(runner.execute_model([bystander.chunk(i)])["bystander"]) for i in range(2)]
            runner.execute_model([MIXED[0].chunk(0)])
            table = runner.model.streaming.table  # type: ignore[attr-defined]
            write, calls = table.write_suffix, [0]

            def broken(*args: Any) -> None:
                calls[0] += 1
                if calls[0] == 2:
                    raise KeyboardInterrupt
                write(*args)

            with monkeypatch.context() as patch:
                patch.setattr(table, "write_suffix", broken)
                with pytest.raises(KeyboardInterrupt):
                    runner.execute_model([MIXED[0].chunk(1), MIXED[1].chunk(0)])
            assert runner.model.live_requests == ("bystander",)  # type: ignore[attr-defined]
            for stream, i in ((MIXED[0], 2), (MIXED[1], 1)):
                error = runner.execute_model([stream.chunk(i)])[stream.name]
                assert isinstance(error, RequestError)
                assert error.kind is RequestErrorKind.FAILED_BEFORE
                assert "its state could not be written (KeyboardInterrupt)" in str(error)
            found += [samples_of(runner.execute_model([bystander.chunk(i)])["bystander"]) for i in (2, 3)]
            assert all(torch.equal(a, b) for a, b in zip(found, expected["bystander"], strict=True))

    def test_a_budget_smaller_than_the_smallest_graph(self, device: str) -> None:
        with running(device, stage(max_memory_bytes=1)) as runner:
            found = play(runner, MIXED)
            stats = runner.stats()
            assert runner.manager is not None
            assert runner.manager.entries() == []
            assert stats.reasons() == {FallbackReason.OVER_BUDGET: stats.calls()}
        with running(device, stage(enforce_eager=True)) as runner:
            assert same(found, play(runner, MIXED))

    def test_two_threads(self, device: str) -> None:
        """Each plays its own requests through one runner, on its own stream."""
        mine = {k: [Stream(f"{k}{s.name}", s.reference, s.sizes, seed=i + 10 * k) for i, s in enumerate(MIXED[:3])] for k in (1, 2)}
        with running(device, stage()) as runner:
            expected = {k: play(runner, streams) for k, streams in mine.items()}
        found: dict[int, dict[str, list[Tensor]]] = {}
        errors: list[BaseException] = []
        with running(device, stage()) as runner:

            def work(k: int) -> None:
                try:
                    if device == "cpu":
                        found[k] = play(runner, mine[k])
                    else:
                        with torch.cuda.stream(torch.cuda.Stream()):
                            found[k] = play(runner, mine[k])
                            torch.cuda.current_stream().synchronize()
                except BaseException as error:  # noqa: BLE001 - shown below
                    errors.append(error)

            threads = [threading.Thread(target=work, args=(k,)) for k in mine]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert not errors, errors
        assert all(same(found[k], expected[k]) for k in mine)

    def test_what_the_schedule_does_not_know_runs_eager(self, device: str) -> None:
        """A long reference, an odd first chunk, a short chunk that is not the last: right samples, with reasons."""
        odd = [Stream("long", 9, [1, 3, 3], seed=1), Stream("odd", 0, [2, 3, 3, 3], seed=2), Stream("early", 0, [1, 2, 3], seed=3)]
        with running(device, stage(connector={"codec_left_context_frames": 9})) as runner:
            found = play(runner, odd)
            reasons = {(k.target_id, str(k.key)): k.reason for k in runner.stats().counts}
        decoder = random_decoder(SMALL, device, seed=4)
        for stream in odd[1:]:  # up to W − 2 kept frames a stream is the whole utterance
            whole = decoder(stream.codes[None])[0, 0, stream.reference * PER_FRAME :]
            pieces = torch.cat(found[stream.name])
            upto = PER_FRAME * 5
            assert torch.allclose(pieces[:upto], whole[:upto], atol=1e-4), stream.name
        whole = decoder(odd[0].codes[None])[0, 0, 9 * PER_FRAME :]
        assert torch.allclose(torch.cat(found["long"]), whole, atol=1e-4)
        assert reasons["qwen3_tts.icl_prefix", "B1×T1·long reference"] is FallbackReason.STATE_NOT_COVERED
        assert reasons["qwen3_tts.suffix", "B1·icl, long reference 1→4"] is FallbackReason.STATE_NOT_COVERED
        assert reasons["qwen3_tts.xvec_prefix", "B1×T2"] is FallbackReason.SHAPE_NOT_COVERED
        assert reasons["qwen3_tts.suffix", "B1·xvec 2→5"] is FallbackReason.STATE_NOT_COVERED
        assert reasons["qwen3_tts.suffix", "B1·xvec 1→3"] is FallbackReason.SHAPE_NOT_COVERED

    def test_lazy_capture_of_an_unknown_state(self, device: str) -> None:
        lazy = {"targets": {"qwen3_tts.suffix": {"enable_lazy_capture": True, "max_extra_graphs": 1}}}
        with running(device, stage(**lazy)) as runner:
            first = play(runner, [Stream("a", 0, [2, 3], seed=2)])
            second = play(runner, [Stream("b", 0, [2, 3], seed=2)])
            play(runner, [Stream("c", 0, [2, 1, 3], seed=2)])
            assert runner.manager is not None
            assert [str(e.descriptor) for e in runner.manager.entries() if e.lazy] == ["B1·xvec 2→5"]
            assert runner.stats().reasons("qwen3_tts.suffix") == {FallbackReason.CAPACITY: 2}
        assert torch.allclose(torch.cat(first["a"]), torch.cat(second["b"]), atol=1e-4)

    def test_load_dependent_first_chunks_are_all_covered(self, device: str) -> None:
        cfg = stage([1], connector={"initial_codec_chunk_frames": None, "codec_chunk_frames": 5})
        with running(device, cfg) as runner:
            play(runner, [Stream("two", 0, [2, 5, 5, 5], seed=1), Stream("four", 6, [4, 5, 5, 3], seed=2)])
            assert runner.stats().fallbacks() == 0

    def test_ready_only_after_capture(self, device: str) -> None:
        cfg = stage()
        with GPUGenerationModelRunner(cfg, device) as runner:
            with pytest.raises(LifecycleError, match="needs a runner that is ready, this one is new"):
                runner.execute_model([])
            with pytest.raises(LifecycleError, match="no model is loaded"):
                _ = runner.model
            runner.load_model(Qwen3TTSCode2Wav(random_decoder(SMALL, device), cfg))
            seen: list[bool] = []

            def progress(_: object) -> None:
                seen.append(runner.is_ready)
                for step in (runner.capture_model, runner.profile_memory, runner.shutdown, lambda: runner.execute_model([])):
                    with pytest.raises(LifecycleError, match=r"capturing|during capture_model"):
                        step()

            runner.capture_model(progress)
            assert seen
            assert not any(seen)
            assert runner.is_ready
            with pytest.raises(LifecycleError, match="this one is ready"):
                runner.capture_model()
            assert runner.manager is not None
            assert runner.manager.is_ready
        assert not runner.is_ready
        runner.shutdown()


class FailingGraph:
    """Stands in for a graph whose launch fails once a countdown has run out."""

    def __init__(self, graph: Any, countdown: list[int]) -> None:
        self._graph, self._countdown = graph, countdown

    def replay(self) -> None:
        self._countdown[0] -= 1
        if self._countdown[0] < 0:
            raise RuntimeError("the device is lost")
        self._graph.replay()
