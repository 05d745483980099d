"""The forms in which an incremental step can run: the same mathematics and the same arena, other kernels.

``plain`` is the decoder's own layers, and the truth of the others. A form that cannot run here, or that is less exact than the plain
one, is not used: the plain one takes its place, and the report says why. That is found out when the form is made and again for each
shape before its capture, against the same step in double precision.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from vgraph_lab.errors import FormError
from vgraph_lab.graphs.backends.rules import capture_conditions

from .decoder import Code2WavDecoder
from .incremental import plain_step
from .incremental_check import ExactTwin, check_exact, on_device
from .incremental_state import StateArena

__all__ = ["FORMS", "CompiledForm", "FastForm", "FormReport", "PlainForm", "StepForm", "choose_form"]

logger = logging.getLogger(__name__)

_NEEDS_CUDA = True  # Triton's kernels; in its interpreter they run on a CPU, but no graph can hold that

_MOST_PROGRAMS = 1024  # of one compiled step: one for each shape, and torch gives up after 8 by default


class StepForm(ABC):
    """Runs steps of streams that have begun, or begin without a reference; see :func:`~.incremental.continue_stream`."""

    name: str
    probed_frames: tuple[int, ...] = (1, 3)  # shapes of two rows that are tried when it is made
    error_ratio: float | None = None  # of the shapes that were checked: their largest error over the plain form's

    def keep_up(self) -> None:  # noqa: B027  # the plain form reads the decoder's own weights
        """Take over weights that were changed since. Before every replay; cheap if nothing has changed."""

    def modules(self) -> Iterable[nn.Module]:
        """What a graph reads beside the decoder and the arena."""
        return ()

    def prepare(self, arena: StateArena, batch: int, frames: int) -> None:  # noqa: B027  # the plain form has nothing to do
        """Get ready for a shape, outside of any capture: compile, try out. It works in the spare slot. Of no effect the second time.

        Raises:
            FormError: this form cannot run that shape.
        """

    def checks_are_over(self) -> None:  # noqa: B027  # the plain form is not checked
        """Let go of what only checks need: no shape is being prepared any more."""

    @abstractmethod
    def continue_stream(self, arena: StateArena, codes: Tensor, places: Tensor) -> Tensor:
        """codes int64 [B, Q, n], places int64 [B, 2] (slot, number of the first frame) → fp32 [B, n * samples_per_frame]."""

    def notes(self) -> list[str]:
        """What a report should say of it."""
        return []


class PlainForm(StepForm):
    """The decoder's own layers."""

    name = "plain"

    def __init__(self, decoder: Code2WavDecoder) -> None:
        self._decoder = decoder

    def continue_stream(self, arena: StateArena, codes: Tensor, places: Tensor) -> Tensor:
        """The step as :func:`~.incremental.continue_stream` runs it."""
        return plain_step(self._decoder, arena, codes, places)


class _PreparedForm(StepForm):
    """A form that does something once for each shape, and is held to the plain form then.

    Shapes that are prepared one after the other share the plain form's exact twin, until their checks are over.
    """

    def __init__(self, decoder: Code2WavDecoder) -> None:
        self._decoder, self._prepared = decoder, set[tuple[int, int, int]]()
        self._exact = ExactTwin(decoder)
        self._seconds = 0.0

    def prepare(self, arena: StateArena, batch: int, frames: int) -> None:
        """Once for each shape, of the arena too: compiled programs know it."""
        shape = (arena.spare_slot, batch, frames)
        if shape in self._prepared:
            return
        begin = perf_counter()
        codes = torch.zeros(batch, self._decoder.geometry.num_quantizers, frames, dtype=torch.int64, device=self._decoder.device)
        places = torch.tensor([[arena.spare_slot, 0]], device=self._decoder.device).repeat(batch, 1)
        try:
            self.keep_up()
            with capture_conditions(), on_device(self._decoder.device):
                self._prepare(lambda: self.continue_stream(arena, codes, places))
            ratio = check_exact(self.name, self.continue_stream, self._exact, batch, frames, slots=arena.spare_slot)
        except FormError:
            raise
        except Exception as error:
            raise FormError(f"form {self.name!r} cannot run {batch} × {frames} frames: {type(error).__name__}: {error}") from error
        self._prepared.add(shape)
        self.error_ratio = max(ratio, self.error_ratio or 0.0)
        self._seconds += perf_counter() - begin

    def checks_are_over(self) -> None:
        """Give the twin up."""
        self._exact.give_up()

    def _prepare(self, step: Callable[[], Tensor]) -> None:
        step()

    def _plain(self, arena: StateArena, codes: Tensor, places: Tensor) -> Tensor:
        return plain_step(self._decoder, arena, codes, places)

    def notes(self) -> list[str]:
        """How long that took."""
        return [f"form {self.name}: made ready in {self._seconds:.1f} s"]


class FastForm(_PreparedForm):
    """Channels-last, prepared weights, Triton kernels. It holds a second copy of the weights, and renews it after ``refresh_tables``.

    Args:
        decoder: on a CUDA device.
        autotune: try tiles for products that no table knows; else they are chosen by rule.

    Raises:
        FormError: this device, installation or geometry cannot have it.
    """

    name = "fast"

    def __init__(self, decoder: Code2WavDecoder, *, autotune: bool = True) -> None:
        super().__init__(decoder)
        _check_fast(decoder)
        from .fast.step import FastStep
        from .fast.tuning import TileTuner

        self.tuner = TileTuner(decoder.device, autotune=autotune)
        self.step = FastStep(decoder, self.tuner)
        self._made_from = decoder.revision

    def keep_up(self) -> None:
        """Prepare the weights again, where graphs read them, if the decoder's tables were refreshed."""
        if self._decoder.revision != self._made_from:
            self.step.take_over(self._decoder)
            self._made_from = self._decoder.revision

    def modules(self) -> Iterable[nn.Module]:
        """The prepared weights."""
        return (self.step,)

    def continue_stream(self, arena: StateArena, codes: Tensor, places: Tensor) -> Tensor:
        """The step."""
        with on_device(self._decoder.device):
            out: Tensor = self.step(arena, codes, places)
        return out

    def _prepare(self, step: Callable[[], Tensor]) -> None:
        self.tuner.get_ready(step)
        step()

    def notes(self) -> list[str]:
        """Time, and what tuning found."""
        return [*super().notes(), *self.tuner.notes()]


def _check_fast(decoder: Code2WavDecoder) -> None:
    try:
        import triton  # noqa: F401  # asked for here, so that its absence has its own words
    except ImportError as error:
        raise FormError("Triton is not installed. It comes with torch for CUDA on Linux; else: pip install triton") from error
    if _NEEDS_CUDA and decoder.device.type != "cuda":
        raise FormError(f"it needs a CUDA device, and the decoder is on {decoder.device}")
    g = decoder.geometry
    if not g.upsampling_ratios or not g.upsample_rates:
        raise FormError("it needs at least one stage of each kind of upsampling")
    channels = [
        g.codebook_dim,
        g.latent_dim,
        g.hidden_size,
        g.intermediate_size,
        *(g.decoder_dim >> i for i in range(len(g.upsample_rates) + 1)),
    ]
    if any(count % 16 for count in channels):
        raise FormError(f"channels must be multiples of 16, and this decoder has {sorted({c for c in channels if c % 16})}")
    if g.num_attention_heads != g.num_key_value_heads:
        raise FormError(
            f"{g.num_attention_heads} query heads share {g.num_key_value_heads} key heads, and it knows no grouped-query attention"
        )
    if g.head_dim & (g.head_dim - 1) or g.head_dim < 16:
        raise FormError(f"head_dim is {g.head_dim}; it must be a power of two, 16 or more")


class CompiledForm(_PreparedForm):
    """The plain step through ``torch.compile``, one program for each shape. It is compiled before the capture."""

    name = "compiled"
    probed_frames = ()  # each shape takes its time to compile, and is checked before its capture

    def __init__(self, decoder: Code2WavDecoder) -> None:
        super().__init__(decoder)
        _check_compiled(decoder)
        self._step: Any = torch.compile(plain_step, fullgraph=True, dynamic=False)

    def continue_stream(self, arena: StateArena, codes: Tensor, places: Tensor) -> Tensor:
        """The step; compiled at the first call with a shape.

        Under a dispatch mode, as in the audited warm-up, it runs plain: torch (2.11) takes a compiled function that was called under
        one out of service for good.
        """
        if _get_current_dispatch_mode() is not None:
            return self._plain(arena, codes, places)
        out: Tensor = self._step(self._decoder, arena, codes, places)
        return out

    def _prepare(self, step: Callable[[], Tensor]) -> None:
        with torch._dynamo.config.patch(recompile_limit=_MOST_PROGRAMS, accumulated_recompile_limit=_MOST_PROGRAMS):
            step()


def _check_compiled(decoder: Code2WavDecoder) -> None:
    if decoder.device.type != "cuda":
        raise FormError("a graph of the cpu backend is made of aten operations, of which compiled code has none. Use a CUDA device")


@dataclass(frozen=True, slots=True)
class FormReport:
    """Which form a model uses.

    Attributes:
        asked: by the configuration.
        form: what runs.
        reason: why that is another one.
        error_ratio: of a form that was checked: its error over the plain form's, both against double precision.
    """

    asked: str
    form: str
    reason: str | None = None
    error_ratio: float | None = None

    def __str__(self) -> str:
        if self.reason is not None:
            return f"form {self.asked} is not used, {self.form} is: {self.reason}"
        checked = "" if self.error_ratio is None else f", its error {self.error_ratio:.2f} times the plain form's"
        return f"form {self.form}{checked}"


FORMS: dict[str, Callable[..., StepForm]] = {"plain": PlainForm, "fast": FastForm, "compiled": CompiledForm}


def choose_form(name: str, decoder: Code2WavDecoder, **options: Any) -> tuple[StepForm, FormReport]:
    """The form of that name if it can run here and is as exact as the plain one, else the plain one and the reason.

    Args:
        name: a key of :data:`FORMS`.
        decoder: what it runs.
        options: of the form.
    """
    if name == "plain":
        return PlainForm(decoder), FormReport(name, name)
    try:
        form = _made(name, decoder, options)
    except FormError as error:
        report = FormReport(name, "plain", str(error))
        logger.warning("%s", report)
        return PlainForm(decoder), report
    return form, FormReport(name, name, error_ratio=form.error_ratio)


def _made(name: str, decoder: Code2WavDecoder, options: dict[str, Any]) -> StepForm:
    try:
        form, arena = FORMS[name](decoder, **options), StateArena(decoder, 2)
        for frames in form.probed_frames:
            form.prepare(arena, 2, frames)
        form.checks_are_over()
        return form
    except FormError:
        raise
    except Exception as error:  # whatever it is, the plain form can do without it
        raise FormError(f"it could not be made: {type(error).__name__}: {error}") from error
