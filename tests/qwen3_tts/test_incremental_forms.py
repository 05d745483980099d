"""Which form a model gets, and what a report says when it is not the one that was asked for."""

from __future__ import annotations

import math
import re
import sys
import weakref
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from contracts.incremental import FLAT, path_of, running, stage
from contracts.streaming import MIXED, Stream, play, same
from torch import Tensor

from vgraph_lab.config import StageConfig
from vgraph_lab.errors import ConfigError, FormError
from vgraph_lab.graphs import VocoderCUDAGraphManager, create_backend
from vgraph_lab.graphs.backends.audit import CaptureAudit, run_checked
from vgraph_lab.graphs.backends.rules import capture_conditions
from vgraph_lab.graphs.capture import owned_tensors
from vgraph_lab.graphs.progress import CaptureProgress
from vgraph_lab.inspect.records import CaptureFigures
from vgraph_lab.qwen3_tts import code2wav, incremental_check, incremental_forms
from vgraph_lab.qwen3_tts.checkpoint import random_decoder
from vgraph_lab.qwen3_tts.decoder import Code2WavDecoder
from vgraph_lab.qwen3_tts.incremental_check import ExactTwin, check_exact
from vgraph_lab.qwen3_tts.incremental_forms import FORMS, FormReport, PlainForm, StepForm, choose_form
from vgraph_lab.qwen3_tts.incremental_state import StateArena
from vgraph_lab.runner import GPUGenerationModelRunner

TARGET = "qwen3_tts.incremental"


def asking_for(form: str) -> dict[str, Any]:
    return {"targets": {TARGET: {"form": form}}}


class Prepared(incremental_forms._PreparedForm):
    """The plain step, prepared and checked like another one."""

    name = "prepared"

    def continue_stream(self, arena: StateArena, codes: Tensor, places: Tensor) -> Tensor:
        return self._plain(arena, codes, places)


class Copying(Prepared):
    """Runs on a copy of the weights, which it renews when it is told to."""

    name = "copying"

    def __init__(self, decoder: Code2WavDecoder) -> None:
        super().__init__(decoder)
        self._copy = deepcopy(decoder)

    def keep_up(self) -> None:
        self._copy.load_state_dict(self._decoder.state_dict())
        self._copy.refresh_tables()

    def continue_stream(self, arena: StateArena, codes: Tensor, places: Tensor) -> Tensor:
        return PlainForm(self._copy).continue_stream(arena, codes, places)


class Doubling(Prepared):
    """Twice the samples that are right."""

    name = "doubling"

    def continue_stream(self, arena: StateArena, codes: Tensor, places: Tensor) -> Tensor:
        return super().continue_stream(arena, codes, places) * 2


class Refusing(PlainForm):
    """Cannot run two rows of one frame."""

    name = "refusing"

    def prepare(self, arena: StateArena, batch: int, frames: int) -> None:
        if (batch, frames) == (2, 1):
            raise FormError("no tile fits")

    def notes(self) -> list[str]:
        return ["a note of the form"]


@pytest.mark.parametrize(("form", "reason"), [("fast", "it needs a CUDA device"), ("compiled", "has none. Use a CUDA device")])
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_plain_form_takes_over(form: str, reason: str) -> None:
    with running("cpu", stage()) as plain, running("cpu", stage(**asking_for(form))) as other:
        assert same(play(plain, MIXED[:3]), play(other, MIXED[:3]))
        report = path_of(other).form_report
        assert (report.asked, report.form) == (form, "plain")
        assert reason in str(report)
        assert other.manager is not None
        assert f"form {form} is not used, plain is: " in str(other.manager.report)
        assert plain.manager is not None
        assert "form" not in str(plain.manager.report)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"latent_dim": 40}, r"multiples of 16, and this decoder has \[.*40"),
        ({"num_attention_heads": 4, "num_key_value_heads": 2}, "4 query heads share 2 key heads"),
        ({"head_dim": 24}, "head_dim is 24"),
        ({"head_dim": 8}, "head_dim is 8"),
        ({"upsample_rates": ()}, "at least one stage of each kind of upsampling"),
        ({"upsampling_ratios": ()}, "at least one stage of each kind of upsampling"),
    ],
    ids=["channels", "grouped", "not-a-power", "small", "no-blocks", "no-upsampling"],
)
def test_a_geometry_that_kernels_cannot_take(fields: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incremental_forms, "_NEEDS_CUDA", False)
    even = {"codebook_dim": 32, "latent_dim": 32, "hidden_size": 32, "intermediate_size": 32, "decoder_dim": 32, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    decoder = random_decoder(FLAT.model_copy(update={**even, **heads, **fields}))
    with pytest.raises(FormError, match=reason):
        FORMS["fast"](decoder)
    form, report = choose_form("fast", decoder)
    assert (form.name, report.form) == ("plain", "plain")


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    report = choose_form("fast", random_decoder(FLAT))[1]
    assert "Triton is not installed" in str(report)
    assert "pip install triton" in str(report)


def test_a_form_that_is_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FORMS, "doubling", Doubling)
    form, report = choose_form("doubling", random_decoder(FLAT))
    assert form.name == "plain"
    assert "form doubling is not used, plain is: with 2 × 1 frames the error of form 'doubling' is more than 2.0 times" in str(report)


def test_a_shape_in_which_a_form_is_wrong_is_captured_in_the_plain_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found when the shape gets ready, not when the model is made."""

    class WrongFromThree(Prepared):
        name = "wrong from three"

        def continue_stream(self, arena: StateArena, codes: Tensor, places: Tensor) -> Tensor:
            samples = super().continue_stream(arena, codes, places)
            return samples + 0.1 if codes.shape[2] == 3 and codes.shape[0] == 1 else samples

    monkeypatch.setattr(
        code2wav, "choose_form", lambda name, decoder: (WrongFromThree(decoder), FormReport("wrong from three", "wrong from three"))
    )
    with running("cpu", stage([1, 2])) as runner:
        report = path_of(runner).form_report
        assert runner.manager is not None
        lines = str(runner.manager.report).splitlines()
    assert report.form == "plain"
    assert "1 shapes have the plain form, B1×T3 because with 1 × 3 frames the error of form 'wrong from three' is " in str(report)
    assert any(line.startswith("B1×T3 has the plain form: ") for line in lines)


def test_nothing_is_made_for_a_target_without_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FORMS, "fast", lambda *args, **options: pytest.fail("a form was made"))
    for fields in ({"enforce_eager": True}, {}):
        targets = {"targets": {TARGET: {"form": "fast", "enabled": bool(fields)}}}
        with running("cpu", stage(**targets, **fields)) as runner:
            assert str(path_of(runner).form_report) == "form fast is not used, plain is: there are no graphs"


def test_whatever_goes_wrong_in_the_making_the_plain_form_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(decoder: Any) -> StepForm:
        raise torch.OutOfMemoryError("no room for a second copy")

    monkeypatch.setitem(FORMS, "failing", failing)
    form, report = choose_form("failing", random_decoder(FLAT))
    assert form.name == "plain"
    assert str(report).endswith("it could not be made: OutOfMemoryError: no room for a second copy")


def test_a_form_that_raises_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    class Raising(Prepared):
        name = "raising"

        def continue_stream(self, arena: StateArena, codes: Tensor, places: Tensor) -> Tensor:
            raise ValueError("no such kernel")

    monkeypatch.setitem(FORMS, "raising", Raising)
    form, report = choose_form("raising", random_decoder(FLAT))
    assert form.name == "plain"
    assert str(report) == "form raising is not used, plain is: form 'raising' cannot run 2 × 1 frames: ValueError: no such kernel"


def test_the_compiled_step_is_one_program_a_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced without a break, state written in place; nothing is compiled after the preparation, an audited warm-up puts nothing out of
    service, and torch's limit of eight programs does not count."""
    compiled, entered = [], []

    def backend(module: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        compiled.append(module)

        def run(*args: Tensor) -> Any:
            entered.append(module)
            return module.forward(*args)

        return run

    decoder = random_decoder(FLAT.model_copy(update={"num_hidden_layers": 1}), seed=2)
    monkeypatch.setattr(incremental_forms, "_check_compiled", lambda decoder: None)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    form, arenas, first = FORMS["compiled"](decoder), [StateArena(decoder, 3), StateArena(decoder, 3)], 0
    for frames in range(1, 10):
        form.prepare(arenas[0], 1, frames)
    assert len(compiled) == 9
    for frames in (1, 9, 5):
        codes = torch.randint(0, 32, (1, 16, frames), generator=torch.Generator().manual_seed(frames))
        places, spare, before = torch.tensor([[2, first]]), torch.tensor([[3, 0]]), len(entered)
        with capture_conditions():
            audit = CaptureAudit((codes, spare), owned_tensors((decoder, arenas[0])))
            run_checked(partial(form.continue_stream, arenas[0], codes, spare), audit)
            assert len(entered) == before
            expected = PlainForm(decoder).continue_stream(arenas[1], codes, places)
            assert torch.equal(form.continue_stream(arenas[0], codes, places), expected)
            assert len(entered) == before + 1
        assert torch.equal(arenas[0].rows[:3], arenas[1].rows[:3])
        first += frames
    assert len(compiled) == 9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_plain_form_is_as_exact_as_itself(dtype: torch.dtype) -> None:
    decoder = random_decoder(FLAT, dtype=dtype)
    assert check_exact("plain", PlainForm(decoder).continue_stream, ExactTwin(decoder), 3, 4) == 1


def spoil_samples(arena: StateArena, samples: Tensor, places: Tensor) -> None:
    samples[:, -1] += 0.1


def spoil_samples_of_the_last_row(arena: StateArena, samples: Tensor, places: Tensor) -> None:
    samples[-1] += 0.01


def spoil_samples_of_full_windows(arena: StateArena, samples: Tensor, places: Tensor) -> None:
    samples += 0.01 * (places[:, 1:] > 0)


def spoil_the_smallest_history(arena: StateArena, samples: Tensor, places: Tensor) -> None:
    layer = min(arena._look_backs, key=lambda layer: layer.end - layer.place)
    arena.rows.flatten(1)[places[:, 0], layer.place : layer.end] *= 1 + 1e-6


def spoil_one_page(arena: StateArena, samples: Tensor, places: Tensor) -> None:
    """Written in the wrong place by one row: two frames of the ring have changed places."""
    row = arena._frames.view(arena.rows.shape)[places[0, 0], arena._history_pages :]
    row[[1, 2]] = row[[2, 1]]


def round_one_page(arena: StateArena, samples: Tensor, places: Tensor) -> None:
    """Which no mean over all of them would show."""
    arena.rows[places[:, 0], -1] *= 1 + 1e-6


def spoil_all(arena: StateArena, samples: Tensor, places: Tensor) -> None:
    samples *= torch.nan
    arena.rows[places[:, 0]] = torch.nan


BEGIN, FULL = "streams that begin", "streams with full windows"


@pytest.mark.parametrize(
    ("spoil", "quantities", "streams"),
    [
        (spoil_samples, ["samples"], [BEGIN, FULL]),
        (spoil_samples_of_the_last_row, ["samples"], [BEGIN, FULL]),
        (spoil_samples_of_full_windows, ["samples"], [FULL]),
        (spoil_the_smallest_history, ["convolution histories"], [BEGIN, FULL]),
        (spoil_one_page, ["keys and values"], [BEGIN, FULL]),
        (round_one_page, ["keys and values"], [BEGIN, FULL]),
        (spoil_all, ["samples", "convolution histories", "keys and values"], [BEGIN, FULL]),
    ],
    ids=lambda value: value.__name__ if callable(value) else None,
)
def test_an_error_says_what_is_wrong_and_when(spoil: Callable[..., None], quantities: list[str], streams: list[str]) -> None:
    """By how much, too; and it names nothing else."""
    decoder = random_decoder(FLAT)

    def step(arena: StateArena, codes: Tensor, places: Tensor) -> Tensor:
        samples = PlainForm(decoder).continue_stream(arena, codes, places)
        spoil(arena, samples, places)
        return samples

    with pytest.raises(FormError) as caught:
        check_exact("wrong", step, ExactTwin(decoder), 3, 4)
    begin, _, found = str(caught.value).partition(": ")
    assert begin == "with 3 × 4 frames the error of form 'wrong' is more than 2.0 times the plain form's"
    ratios = {where: float(ratio) for ratio, where in (part.split(" times in ") for part in found.split(", "))}
    assert list(ratios) == [f"{quantity} of {begin}" for begin in streams for quantity in quantities]
    assert all(ratio > 2 for ratio in ratios.values())
    assert (spoil is spoil_all) == (math.inf in ratios.values())


def test_a_row_in_the_middle_is_judged_too() -> None:
    decoder = random_decoder(FLAT)

    def step(arena: StateArena, codes: Tensor, places: Tensor) -> Tensor:
        samples = PlainForm(decoder).continue_stream(arena, codes, places)
        samples[1] += 0.01
        return samples

    with pytest.raises(FormError, match="in samples of streams that begin"):
        check_exact("wrong", step, ExactTwin(decoder), 3, 4)


@pytest.mark.parametrize("slot", [3, 5], ids=["of another stream", "the spare one"])
def test_rows_that_a_step_was_not_given_must_stay_as_they_are(slot: int) -> None:
    decoder = random_decoder(FLAT)

    def step(arena: StateArena, codes: Tensor, places: Tensor) -> Tensor:
        arena.rows[slot, -1, 0] += 1
        return PlainForm(decoder).continue_stream(arena, codes, places)

    with pytest.raises(FormError, match="with 3 × 4 frames it wrote into rows of streams that it was not given"):
        check_exact("wrong", step, ExactTwin(decoder), 3, 4, slots=5)


def test_a_form_may_be_wrong_in_some_shapes_only() -> None:
    decoder = random_decoder(FLAT)
    exact = ExactTwin(decoder)

    def step(arena: StateArena, codes: Tensor, places: Tensor) -> Tensor:
        samples = PlainForm(decoder).continue_stream(arena, codes, places)
        return samples + 0.01 if codes.shape[2] > 3 else samples

    assert check_exact("right", step, exact, 3, 3) == 1
    with pytest.raises(FormError, match="with 3 × 4 frames"):
        check_exact("wrong", step, exact, 3, 4)


# ---------------------------------------------------------------------------------------------------- the exact twin


@pytest.fixture
def twins(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Any]]:
    """Those that are made in a test."""
    made: list[weakref.ref[Any]] = []

    def copied(decoder: Any) -> Any:
        assert alive(made) == 0, "there are never two"
        made.append(weakref.ref(twin := deepcopy(decoder)))
        return twin

    monkeypatch.setattr(incremental_check, "deepcopy", copied)
    return made


def alive(twins: list[weakref.ref[Any]]) -> int:
    """How many are there still, without any collection of garbage."""
    return sum(twin() is not None for twin in twins)


def test_one_exact_twin_serves_a_capture_and_is_given_up(twins: list[weakref.ref[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FORMS, "compiled", Prepared)
    seen = []
    lazy = {"form": "compiled", "enable_lazy_capture": True, "max_extra_graphs": 1, "capture_widths": [20]}
    with GPUGenerationModelRunner(cfg := stage([1], targets={TARGET: lazy}), "cpu") as runner:
        runner.load_model(code2wav.Qwen3TTSCode2Wav(random_decoder(FLAT), cfg))
        assert (len(twins), alive(twins)) == (1, 0), "the form was made, the capture is still to come"
        runner.capture_model(lambda progress: seen.append((progress.descriptor, alive(twins))))
        assert (len(twins), alive(twins)) == (2, 0)
        assert [count for descriptor, count in seen if descriptor and not descriptor.state] == [0, 1, 1]
        assert runner.manager is not None
        assert str(path_of(runner).form_report) == "form compiled, its error 1.00 times the plain form's"
        runner.execute_model([Stream("of an uncaptured width", 0, [16, 3], seed=1).chunk(0)])
        assert [str(entry.descriptor) for entry in runner.manager.entries() if entry.lazy] == ["B1×T16"]
        assert (len(twins), alive(twins)) == (3, 0)


@pytest.mark.parametrize("ends", ["profiled", "failed"])
def test_a_profile_or_a_failed_capture_leaves_no_twin(twins: list[weakref.ref[Any]], monkeypatch: pytest.MonkeyPatch, ends: str) -> None:
    monkeypatch.setitem(FORMS, "compiled", Prepared)
    model = code2wav.Qwen3TTSCode2Wav(random_decoder(FLAT), stage([1], targets={TARGET: {"form": "compiled"}}))
    manager = VocoderCUDAGraphManager(create_backend("cpu"), model.get_vocoder_cudagraph_targets())

    def stop(progress: CaptureProgress) -> None:
        assert alive(twins) == (progress.done > 0)
        if progress.done == 2:
            raise KeyboardInterrupt

    if ends == "profiled":
        manager.profile_memory()
    else:
        with pytest.raises(KeyboardInterrupt):
            manager.capture(stop)
    assert (len(twins), alive(twins)) == (2, 0)
    manager.clear()


def test_the_report_has_the_largest_error_of_all_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that of the shapes that were tried when the form was made."""
    monkeypatch.setitem(FORMS, "compiled", Prepared)
    ratios = iter([1.0, 1.0, 1.5])
    monkeypatch.setattr(incremental_forms, "check_exact", lambda *args, **kwargs: next(ratios, 1.25))
    with running("cpu", stage([1], targets={TARGET: {"form": "compiled"}})) as runner:
        assert path_of(runner).form_report.error_ratio == 1.5
        assert runner.manager is not None
        assert "form compiled, its error 1.50 times the plain form's" in str(runner.manager.report).splitlines()


def test_a_refused_form_leaves_no_twin(twins: list[weakref.ref[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FORMS, "doubling", Doubling)
    report = choose_form("doubling", random_decoder(FLAT))[1]
    assert (report.form, len(twins), alive(twins)) == ("plain", 1, 0)


@pytest.mark.parametrize("in_inference_mode", [False, True])
def test_changed_weights_are_held_to_a_twin_of_their_own(twins: list[weakref.ref[Any]], in_inference_mode: bool) -> None:
    """And the form has taken them over by then. Tensors that were made in inference mode do not tell that they were written: then each
    check has its own twin."""
    with torch.inference_mode(in_inference_mode):
        decoder = random_decoder(FLAT, seed=1)
    form, arena = Copying(decoder), StateArena(decoder, 2)
    with torch.no_grad():
        form.prepare(arena, 1, 1)
        form.prepare(arena, 1, 2)
        assert len(twins) == 1 + in_inference_mode
        with torch.inference_mode(in_inference_mode):
            decoder.load_state_dict(random_decoder(FLAT, seed=2).state_dict())
            decoder.refresh_tables()
        form.prepare(arena, 1, 3)
    assert len(twins) == 2 + in_inference_mode
    assert form.error_ratio == 1
    assert alive(twins) == 1
    form.checks_are_over()
    assert alive(twins) == 0


def test_a_shape_that_a_form_cannot_run_is_captured_in_the_plain_form(monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(name: str, decoder: Any, **options: Any) -> tuple[StepForm, FormReport]:
        return Refusing(decoder), FormReport("refusing", "refusing")

    with running("cpu", stage()) as plain:
        expected = play(plain, MIXED[:3])
    monkeypatch.setattr(code2wav, "choose_form", choose)
    with running("cpu", stage()) as runner:
        assert same(play(runner, MIXED[:3]), expected)
        assert runner.manager is not None
        lines = str(runner.manager.report).splitlines()
        assert runner.manager.report is not None
        assert runner.manager.report.failed == 0
    assert "form refusing" in lines
    assert "a note of the form" in lines
    assert [line for line in lines if "has the plain form: no tile fits" in line] == ["B2×T1 has the plain form: no tile fits"]


PUBLISHED = ("qwen3_tts.suffix", "qwen3_tts.icl_prefix")


@pytest.mark.parametrize(("algorithm", "target"), [("published", TARGET), *(("incremental", target) for target in PUBLISHED)])
def test_settings_of_the_other_algorithms_target_stop_the_start_up(algorithm: str, target: str) -> None:
    graphs = {"streaming_algorithm": algorithm, "targets": {target: {"enabled": True}}}
    cfg = StageConfig.from_dict({"vocoder_cudagraph": graphs})
    wanted = "incremental" if algorithm == "published" else "published"
    message = f"targets.{target}: there is no such Target with streaming_algorithm '{algorithm}'."
    with pytest.raises(ConfigError, match=re.escape(message) + f".* Set vocoder_cudagraph.streaming_algorithm: {wanted}"):
        code2wav.Qwen3TTSCode2Wav(random_decoder(FLAT), cfg)


def test_a_recording_keeps_why_the_plain_form_runs() -> None:
    with running("cpu", stage([1], **asking_for("fast"))) as runner:
        assert runner.manager is not None
        assert runner.manager.report is not None
        (note,) = CaptureFigures.of(runner.manager.report).notes
    assert note == "form fast is not used, plain is: it needs a CUDA device, and the decoder is on cpu"
