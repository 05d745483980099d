"""The streaming contract on the CPU backend, and what needs no device."""

from __future__ import annotations

import threading

import pytest
import torch
from contracts.streaming import CHUNK, MIXED, SMALL, Stream, StreamingContract, codes, play, running, samples_of, stage

from vgraph_lab.config import StageConfig
from vgraph_lab.errors import ConfigError, InputError, LifecycleError, RequestError, RequestErrorKind
from vgraph_lab.qwen3_tts.checkpoint import random_decoder
from vgraph_lab.qwen3_tts.code2wav import Qwen3TTSCode2Wav
from vgraph_lab.requests import ChunkRequest
from vgraph_lab.runner import GPUGenerationModelRunner


@pytest.fixture
def device() -> str:
    return "cpu"


class TestStreaming(StreamingContract):
    """On the CPU."""


def kind_of(result: object) -> RequestErrorKind:
    assert isinstance(result, RequestError), result
    return result.kind


EAGER = stage(enforce_eager=True)


def test_the_life_of_an_id() -> None:
    with running("cpu", EAGER) as runner:
        assert kind_of(runner.execute_model([ChunkRequest("a", codes(0, 1), finished=True)])["a"]) is RequestErrorKind.UNKNOWN
        assert samples_of(runner.execute_model([ChunkRequest("a", codes(1, 1))])["a"]).shape == (1920,)
        end = samples_of(runner.execute_model([ChunkRequest("a", codes(0, 1), finished=True)])["a"])
        assert end.shape == (0,)
        assert end.dtype is torch.float32
        assert kind_of(runner.execute_model([ChunkRequest("a", codes(1, 1))])["a"]) is RequestErrorKind.FINISHED
        runner.execute_model([ChunkRequest("b", codes(1, 1))])
        assert runner.abort("b") == ["b"]
        assert runner.abort(["b", "never seen"]) == []
        assert kind_of(runner.execute_model([ChunkRequest("b", codes(3, 1))])["b"]) is RequestErrorKind.ABORTED
        assert samples_of(runner.execute_model([ChunkRequest("c", codes(4, 1), ref_frames=4, finished=True)])["c"]).shape == (0,)


def test_a_reference_that_changes() -> None:
    with running("cpu", EAGER) as runner:
        for name, later in (("same", 4), ("none", 0), ("other", 3)):
            runner.execute_model([ChunkRequest(name, codes(5, 1), ref_frames=4)])
            result = runner.execute_model([ChunkRequest(name, codes(CHUNK, 2), ref_frames=later)])[name]
            if later == 3:
                assert kind_of(result) is RequestErrorKind.INVALID_INPUT
                assert "ref_frames changed from 4 to 3" in str(result)
            else:
                samples_of(result)
        late = ChunkRequest("late", codes(1, 1))
        runner.execute_model([late])
        assert "changed from 0 to 2" in str(runner.execute_model([ChunkRequest("late", codes(CHUNK, 1), ref_frames=2)])["late"])


@pytest.mark.parametrize(
    ("chunk", "message"),
    [
        (ChunkRequest("r", codes(1, 1)[:, :0]), "the chunk is empty. Send at least one frame, or finished=True"),
        (ChunkRequest("r", codes(3, 1), ref_frames=5), "the first chunk has 3 frames, its reference alone 5"),
        (ChunkRequest("r", codes(5, 1), ref_frames=5), "the first chunk has 5 frames, its reference alone 5"),
        (ChunkRequest("r", codes(5, 1), ref_frames=-1), "ref_frames must be a whole number from 0, got -1"),
        (ChunkRequest("r", codes(CHUNK + 1, 1)), "brings 4 new frames, the connector delivers at most 3"),
        (ChunkRequest("r", codes(3, 1)[:8]), r"codes must be \[16, F\] \(16 quantisers\), got \[8, 3\]"),
        (ChunkRequest("r", codes(4, 1).T), r"got \[4, 16\]. These look like \[F, 16\]: try codes.T"),
        (ChunkRequest("r", codes(1, 1)[None]), r"got \[1, 16, 1\]. Leave out the batch dimension: codes\[0\]"),
        (ChunkRequest("r", codes(1, 1).float()), "codes must be integers .* got torch.float32"),
        (ChunkRequest("r", codes(1, 1).tolist()), "codes must be a dense tensor of integers .* got list"),  # type: ignore[arg-type]
        (ChunkRequest("r", codes(1, 1) - 33), "got values from"),
        (ChunkRequest("r", torch.full((16, 7), 99), ref_frames=6), "got values from 99 to 99"),
    ],
)
def test_bad_chunks_fail_their_request(chunk: ChunkRequest, message: str) -> None:
    with running("cpu", EAGER) as runner:
        result = runner.execute_model([chunk])["r"]
        assert isinstance(result, RequestError)
        assert result.kind is RequestErrorKind.INVALID_INPUT
        with pytest.raises(RequestError, match=message):
            raise result
        again = runner.execute_model([ChunkRequest("r", codes(1, 1))])["r"]
        assert kind_of(again) is RequestErrorKind.FAILED_BEFORE
        with pytest.raises(RequestError, match=message):
            raise again  # type: ignore[misc]
        assert runner.model.live_requests == ()  # type: ignore[attr-defined]


def test_a_live_request_that_fails_gives_its_slot_back() -> None:
    with running("cpu", stage(enforce_eager=True, max_num_seqs=1)) as runner:
        runner.execute_model([ChunkRequest("a", codes(1, 1))])
        both = runner.execute_model([ChunkRequest("a", codes(CHUNK, 1)), ChunkRequest("b", codes(1, 1))])
        assert kind_of(both["b"]) is RequestErrorKind.NO_FREE_SLOT
        assert "raise max_num_seqs" in str(both["b"])
        runner.execute_model([ChunkRequest("a", codes(CHUNK + 1, 1))])
        samples_of(runner.execute_model([ChunkRequest("c", codes(1, 1))])["c"])
        assert runner.model.live_requests == ("c",)  # type: ignore[attr-defined]


def test_a_request_of_one_chunk_needs_no_slot() -> None:
    with running("cpu", stage(enforce_eager=True, max_num_seqs=1)) as runner:
        runner.execute_model([ChunkRequest("a", codes(1, 1))])
        samples_of(runner.execute_model([ChunkRequest("b", codes(1, 1), finished=True)])["b"])


def test_a_bad_chunk_takes_no_slot_from_a_good_one() -> None:
    """Nor does a request that is sent twice, nor one that ends in the same call."""
    with running("cpu", stage(enforce_eager=True, max_num_seqs=1)) as runner:
        runner.execute_model([ChunkRequest("old", codes(1, 1))])
        found = runner.execute_model(
            [
                ChunkRequest("bad", torch.full((16, 1), 32)),
                ChunkRequest("twice", codes(1, 1)),
                ChunkRequest("twice", codes(1, 1)),
                ChunkRequest("good", codes(1, 1)),
                ChunkRequest("old", codes(CHUNK, 1), finished=True),
            ]
        )
        assert [name for name, result in found.items() if isinstance(result, RequestError)] == ["bad", "twice"]
        assert runner.model.live_requests == ("good",)  # type: ignore[attr-defined]
        samples_of(runner.execute_model([ChunkRequest("good", codes(CHUNK, 1))])["good"])


WRONG = {
    "no ref_frames": ChunkRequest("r", codes(4, 1), None),  # type: ignore[arg-type]
    "text": ChunkRequest("r", codes(4, 1), "0"),  # type: ignore[arg-type]
    "fraction": ChunkRequest("r", codes(4, 1), 1.0),  # type: ignore[arg-type]
    "truth": ChunkRequest("r", codes(4, 1), True),
    "tensor": ChunkRequest("r", codes(4, 1), torch.tensor(1)),  # type: ignore[arg-type]
    "finished text": ChunkRequest("r", codes(1, 1), finished="no"),  # type: ignore[arg-type]
    "elsewhere": ChunkRequest("r", codes(1, 1).to("meta"), finished=True),
    "sparse": ChunkRequest("r", codes(1, 1).to_sparse(), finished=True),
}


@pytest.mark.parametrize("chunk", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("async_chunk", [True, False], ids=["streaming", "whole"])
def test_wrong_types_fail_their_request_only(chunk: ChunkRequest, async_chunk: bool) -> None:
    cfg = StageConfig.from_dict({"async_chunk": async_chunk, "enforce_eager": True, "connector": {"codec_chunk_frames": CHUNK}})
    decoder = random_decoder(SMALL.model_copy(update={"max_position_embeddings": 400}))
    with GPUGenerationModelRunner(cfg, "cpu") as runner:
        runner.load_model(Qwen3TTSCode2Wav(decoder, cfg))
        runner.capture_model()
        found = runner.execute_model([ChunkRequest("good", codes(1, 1), finished=True), chunk])
        samples_of(found["good"])
        assert kind_of(found["r"]) is RequestErrorKind.INVALID_INPUT


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("async_chunk", [True, False], ids=["streaming", "whole"])
def test_nested_codes(async_chunk: bool) -> None:
    nested = torch._nested_tensor_from_tensor_list([codes(1, 1).float(), codes(1, 2).float()])
    test_wrong_types_fail_their_request_only(ChunkRequest("r", nested, finished=True), async_chunk)


def test_lengths_that_the_decoder_has_no_positions_for() -> None:
    """64 positions, W = 6, chunks of 3: a reference of 55 frames is the longest."""
    cfg = stage(enforce_eager=True, connector={"codec_left_context_frames": 100})
    with running("cpu", cfg) as runner:
        found = runner.execute_model([ChunkRequest("good", codes(56, 1), 55), ChunkRequest("long", codes(57, 1), 56)])
        samples_of(found["good"])
        assert "positions take at most 55" in str(found["long"])
        for seed in range(4):
            samples_of(runner.execute_model([ChunkRequest("good", codes(CHUNK, seed))])["good"])
    with pytest.raises(ConfigError, match="chunks of 53 frames need 65 positions"):
        Qwen3TTSCode2Wav(random_decoder(SMALL), stage(connector={"codec_chunk_frames": 53}))
    Qwen3TTSCode2Wav(random_decoder(SMALL), stage(connector={"codec_chunk_frames": 52}))


@pytest.mark.parametrize("ramp", [[7, 9], [2, 8, 1], [3, 3, 3, 3, 5]])
def test_a_ramp_that_goes_on_after_the_window_rolls(ramp: list[int]) -> None:
    """Chunks that the schedule brings are never refused; beyond W they run eager if they are not of the steady size."""
    cfg = stage(enforce_eager=True, connector={"codec_chunk_ramp": ramp})
    with running("cpu", cfg) as runner:
        for i, frames in enumerate([*ramp, CHUNK, CHUNK]):
            assert len(samples_of(runner.execute_model([ChunkRequest("a", codes(frames, i))])["a"])) == frames * 1920


def test_a_model_starts_afresh_in_another_runner() -> None:
    cfg = stage(enforce_eager=True)
    model = Qwen3TTSCode2Wav(random_decoder(SMALL), cfg)
    for _ in range(2):
        with GPUGenerationModelRunner(cfg, "cpu") as runner:
            runner.load_model(model)
            runner.capture_model()
            samples_of(runner.execute_model([ChunkRequest("a", codes(1, 1))])["a"])
            samples_of(runner.execute_model([ChunkRequest("b", codes(1, 1), finished=True)])["b"])
            assert model.live_requests == ("a",)
        assert model.live_requests == ()


def test_a_model_serves_one_runner_at_a_time() -> None:
    cfg = stage(enforce_eager=True)
    model = Qwen3TTSCode2Wav(random_decoder(SMALL), cfg)
    with GPUGenerationModelRunner(cfg, "cpu") as first, GPUGenerationModelRunner(cfg, "cpu") as second:
        first.load_model(model)
        first.capture_model()
        second.load_model(model)
        with pytest.raises(LifecycleError, match="served by another Manager"):
            second.capture_model()
        with pytest.raises(ConfigError, match="another configuration than the runner"):
            GPUGenerationModelRunner(stage(), "cpu").load_model(model)


def test_a_shutdown_that_fails_is_a_shutdown(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = stage()
    runner = GPUGenerationModelRunner(cfg, "cpu")
    runner.load_model(Qwen3TTSCode2Wav(random_decoder(SMALL), cfg))
    runner.capture_model()
    assert runner.manager is not None

    def broken() -> None:
        raise RuntimeError("reset broke")

    monkeypatch.setattr(runner.manager.entries()[0].graph, "reset", broken)
    with pytest.raises(LifecycleError, match="reset broke"):
        runner.shutdown()
    assert not runner.is_ready
    runner.shutdown()


def test_threads_around_a_shutdown() -> None:
    """Whoever comes too late is told so; nobody gets samples from a runner that is shut down."""
    with running("cpu", stage(enforce_eager=True)) as runner:
        unexpected: list[BaseException] = []

        def work(k: int) -> None:
            for j in range(10_000):
                try:
                    runner.execute_model([ChunkRequest(f"{k}.{j}", codes(1, j))])
                    runner.abort([f"{k}.{j}"])
                except LifecycleError:
                    return
                except BaseException as error:  # noqa: BLE001 - shown below
                    unexpected.append(error)
                    return

        threads = [threading.Thread(target=work, args=(k,)) for k in range(3)]
        for thread in threads:
            thread.start()
        runner.execute_model([ChunkRequest("mine", codes(1, 1))])
        runner.shutdown()
        for thread in threads:
            thread.join(timeout=60)
        assert unexpected == []
        assert not any(thread.is_alive() for thread in threads)
        assert not runner.is_ready


def test_two_chunks_of_one_request_in_one_batch() -> None:
    with running("cpu", EAGER) as runner:
        found = runner.execute_model([ChunkRequest("a", codes(1, 1)), ChunkRequest("a", codes(1, 2)), ChunkRequest("b", codes(1, 3))])
        assert kind_of(found["a"]) is RequestErrorKind.DUPLICATE
        samples_of(found["b"])
        assert list(found) == ["a", "b"]


def test_results_come_in_the_order_of_the_requests() -> None:
    with running("cpu", EAGER) as runner:
        batch = [s.chunk(0) for s in MIXED] + [ChunkRequest("bad", codes(0, 1))]
        assert list(runner.execute_model(batch[::-1])) == [chunk.request_id for chunk in batch[::-1]]


def test_integer_types_give_the_same_samples() -> None:
    with running("cpu", EAGER) as runner:
        found = [
            samples_of(runner.execute_model([ChunkRequest(str(dtype), codes(1, 7).to(dtype))])[str(dtype)])
            for dtype in (torch.int64, torch.int32, torch.int16, torch.uint8)
        ]
        assert all(torch.equal(samples, found[0]) for samples in found)


def test_results_own_their_memory() -> None:
    with running("cpu", stage()) as runner:
        first = samples_of(runner.execute_model([ChunkRequest("a", codes(1, 1))])["a"])
        before = first.clone()
        runner.execute_model([ChunkRequest("b", codes(1, 2))])
        assert torch.equal(first, before)


def test_whole_utterances() -> None:
    """With ``async_chunk: false``: windows, references cut, padding between rows unheard."""
    cfg = StageConfig.from_dict(
        {
            "async_chunk": False,
            "vocoder_cudagraph": {
                "capture_batch_sizes": [1, 2],
                "decode_chunk_frames": 6,
                "decode_left_context_frames": 2,
                "num_warmups": 1,
                "targets": {"qwen3_tts.stateless": {"capture_bucket_sizes": [4]}, "qwen3_tts.suffix": {"enabled": False}},
            },
        }
    )
    decoder = random_decoder(SMALL.model_copy(update={"max_position_embeddings": 150}), seed=4)
    with GPUGenerationModelRunner(cfg, "cpu") as runner:
        runner.load_model(Qwen3TTSCode2Wav(decoder, cfg))
        report = runner.capture_model()
        assert {str(o.descriptor) for o in report.outcomes} == {f"B{b}×T{t}" for b in (1, 2) for t in (4, 8, 150)}
        batch = [ChunkRequest(str(n), codes(n, n), ref_frames=n // 3, finished=True) for n in (3, 6, 4)]
        found = runner.execute_model([*batch, ChunkRequest("part", codes(3, 1))])
        for chunk in batch:
            whole = decoder(chunk.codes[None])[0, 0, chunk.ref_frames * 1920 :]
            assert torch.allclose(samples_of(found[chunk.request_id]), whole, atol=1e-4)
        assert "set async_chunk: true" in str(found["part"])
        assert runner.stats().fallbacks() == 0
        assert runner.stats().calls() == 2
        bad = {
            "values": ChunkRequest("values", torch.full((16, 20), 40), finished=True),
            "shape": ChunkRequest("shape", codes(3, 1)[None], finished=True),
            "list": ChunkRequest("list", [[1]], finished=True),  # type: ignore[arg-type]
            "reference": ChunkRequest("reference", codes(3, 1), ref_frames=3, finished=True),
        }
        errors = runner.execute_model([*bad.values(), ChunkRequest("good", codes(3, 1), finished=True)])
        assert all(kind_of(errors[name]) is RequestErrorKind.INVALID_INPUT for name in bad)
        samples_of(errors["good"])
        twice = runner.execute_model([batch[0], batch[0]])
        assert kind_of(twice["3"]) is RequestErrorKind.DUPLICATE


def test_late_values_of_a_long_utterance_are_checked_too() -> None:
    cfg = StageConfig.from_dict({"async_chunk": False, "enforce_eager": True, "vocoder_cudagraph": {"decode_chunk_frames": 5}})
    utterance = codes(20, 1)
    utterance[0, 17] = 32
    decoder = random_decoder(SMALL.model_copy(update={"max_position_embeddings": 150}))
    with GPUGenerationModelRunner(cfg, "cpu") as runner:
        runner.load_model(Qwen3TTSCode2Wav(decoder, cfg))
        runner.capture_model()
        assert "got values from" in str(runner.execute_model([ChunkRequest("a", utterance, finished=True)])["a"])


def test_the_runner_takes_chunk_requests_only() -> None:
    with running("cpu", EAGER) as runner:
        with pytest.raises(InputError, match="takes ChunkRequests with text ids, got 3"):
            runner.execute_model([3])  # type: ignore[list-item]
        with pytest.raises(InputError, match="text ids"):
            runner.execute_model([ChunkRequest(7, codes(1, 1))])  # type: ignore[arg-type]
        assert runner.execute_model([]) == {}
        for wrong in ((c for c in [ChunkRequest("a", codes(1, 1))]), ChunkRequest("a", codes(1, 1)), None):
            with pytest.raises(InputError, match="takes a list or tuple of ChunkRequests, got"):
                runner.execute_model(wrong)  # type: ignore[arg-type]
        for wrong in (None, [["x"]], [3]):
            with pytest.raises(InputError, match="abort takes request ids"):
                runner.abort(wrong)  # type: ignore[arg-type]
        assert runner.model.live_requests == ()  # type: ignore[attr-defined]


def test_a_model_without_the_capability_runs_eager(caplog: pytest.LogCaptureFixture) -> None:
    class Plain:
        device = torch.device("cpu")

        def __call__(self, chunks: list[ChunkRequest]) -> dict[str, torch.Tensor]:
            return {chunk.request_id: chunk.codes.float().mean(dim=0) for chunk in chunks}

    with GPUGenerationModelRunner(StageConfig(), "cpu") as runner:
        runner.load_model(Plain())  # type: ignore[arg-type]
        assert "Plain does not declare supports_vocoder_cudagraph: it runs eager" in caplog.text
        report = runner.capture_model()
        assert (report.requested, report.eager_targets) == (0, {"Plain": "it does not declare supports_vocoder_cudagraph"})
        assert samples_of(runner.execute_model([ChunkRequest("a", codes(2, 1))])["a"]).shape == (2,)
        assert runner.stats().calls() == 0
        assert runner.abort(["a"]) == []


def test_a_strict_failure_leaves_the_runner_loaded() -> None:
    """The cause is removed, the capture repeated."""
    cfg = stage(strict=True)
    model = Qwen3TTSCode2Wav(random_decoder(SMALL), cfg)
    with GPUGenerationModelRunner(cfg, "cpu") as runner:
        runner.load_model(model)
        suffix = next(t for t in model.get_vocoder_cudagraph_targets() if t.target_id == "qwen3_tts.suffix")
        routine, forward = suffix.routine, suffix.routine.forward_for_capture

        def broken(*args: object) -> object:
            raise ValueError("injected")

        routine.forward_for_capture = broken  # type: ignore[assignment, method-assign]
        with pytest.raises(ValueError, match="injected"):
            runner.capture_model()
        assert not runner.is_ready
        routine.forward_for_capture = forward  # type: ignore[method-assign]
        assert runner.capture_model().failed == 0
        play(runner, [Stream("a", 0, [1, 3], seed=1)])
        assert runner.stats().fallbacks() == 0


def test_loading_checks_configuration_and_device() -> None:
    cfg = stage()
    model = Qwen3TTSCode2Wav(random_decoder(SMALL), cfg)
    runner = GPUGenerationModelRunner(cfg, "cpu")
    runner.load_model(model)
    with pytest.raises(LifecycleError, match="load_model needs a runner that is new, this one is loaded"):
        runner.load_model(model)

    class Elsewhere:
        device = torch.device("meta")

    with pytest.raises(ConfigError, match="the model is on meta, the runner on cpu"):
        GPUGenerationModelRunner(cfg, "cpu").load_model(Elsewhere())  # type: ignore[arg-type]

    class Incapable:
        supports_vocoder_cudagraph = True
        device = torch.device("cpu")

    with pytest.raises(ConfigError, match="has no get_vocoder_cudagraph_targets"):
        GPUGenerationModelRunner(cfg, "cpu").load_model(Incapable())  # type: ignore[arg-type]


def test_targets_are_the_same_objects_and_the_model_knows_no_manager() -> None:
    model = Qwen3TTSCode2Wav(random_decoder(SMALL), stage())
    assert model.supports_vocoder_cudagraph
    first, second = model.get_vocoder_cudagraph_targets(), model.get_vocoder_cudagraph_targets()
    assert [t.target_id for t in first] == ["qwen3_tts.icl_prefix", "qwen3_tts.xvec_prefix", "qwen3_tts.suffix"]
    assert all(a is b for a, b in zip(first, second, strict=True))


def test_debug_mode_checks_device_values_too() -> None:
    """On the CPU all values are on the host; the flag only has to be passed on."""
    model = Qwen3TTSCode2Wav(random_decoder(SMALL), stage(debug=True))
    assert all(t.routine.debug for t in model.get_vocoder_cudagraph_targets())  # type: ignore[attr-defined]


def test_profile_then_capture() -> None:
    cfg = stage([1])
    with GPUGenerationModelRunner(cfg, "cpu") as runner:
        with pytest.raises(LifecycleError, match="needs a runner that is loaded, this one is new"):
            runner.profile_memory()
        runner.load_model(Qwen3TTSCode2Wav(random_decoder(SMALL), cfg))
        profile = runner.profile_memory()
        assert runner.manager is not None
        assert (runner.manager.entries(), runner.manager.charged_bytes) == ([], 0)
        report = runner.capture_model()
        assert report.profile is profile
        assert profile.bytes == report.bytes > 0
