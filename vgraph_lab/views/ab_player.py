"""The A/B player: all conditions of a sample run in lock step, and the listener switches between them without a gap."""

from __future__ import annotations

import logging
import math
from typing import Any

import anywidget
import traitlets as t
from pydantic import ValidationError
from pydantic.dataclasses import dataclass as checked_dataclass

from vgraph_lab.errors import InputError
from vgraph_lab.inspect.listening.audio_folder import check_known
from vgraph_lab.inspect.listening.audio_set import AudioSet
from vgraph_lab.inspect.listening.checks import is_number

from .html import script, style_sheet
from .levels import difference_between, gain_text, peak, shared_gain
from .players import DIFFERENCE_COLOUR, static_players, track_colours
from .refusal import RefusedError, refusing

__all__ = ["ABPlayer", "Heard", "Switch", "send_waveform"]

logger = logging.getLogger(__name__)

_PIECE_SAMPLES = 1 << 21  # 8 MiB a message: some proxies refuse large ones
_SHORTEST_REGION_S = 0.02


@checked_dataclass(frozen=True, slots=True)
class Heard:
    """A stretch that was played without a change.

    Attributes:
        sample: which sample.
        condition: which condition.
        is_difference: whether its difference from the reference was heard instead of itself.
        position_s: where in the sample the stretch began.
        seconds: how long it lasted, by the clock of the sound card.
    """

    sample: str
    condition: str
    is_difference: bool
    position_s: float
    seconds: float


@checked_dataclass(frozen=True, slots=True)
class Switch:
    """A change of condition while playing, in seconds of the Web Audio clock.

    Attributes:
        sample: which sample.
        before: what was heard before; a difference reads ``graph − eager``.
        after: what was heard afterwards.
        position_s: where in the sample the crossfade began.
        requested_s: when the listener asked for it.
        begins_s: when the crossfade began.
        ends_s: when only ``after`` was heard.
    """

    sample: str
    before: str
    after: str
    position_s: float
    requested_s: float
    begins_s: float
    ends_s: float

    @property
    def crossfade_ms(self) -> float:
        """Length of the linear crossfade. Both tracks run on through it, so nothing is missing and nothing is repeated."""
        return (self.ends_s - self.begins_s) * 1e3


class ABPlayer(anywidget.AnyWidget):
    """A live player for an :class:`~vgraph_lab.inspect.listening.audio_set.AudioSet`; the keys are listed by ``?``.

    Audio goes to the browser as float32, sample by sample as it is needed, and is played at its own sample rate: every
    condition as it is, all of them with one gain, nothing normalised. A difference from the reference is amplified by the
    dB in its label. All attributes may be set from Python, too, and those that are read show what the listener did.

    In a static page there are players of the first samples instead, as far as ``static_bytes`` go.

    A widget lives as long as the kernel and keeps its AudioSet, or until ``close()``, which also takes it out of the page.

    Args:
        audio_set: what is compared; its first condition is the reference.
        static_seconds: the static form holds no more than this of a sample.
        static_bytes: nor more than this of audio in all, counted before base64, which adds a third.

    Attributes:
        sample: name of the sample.
        condition: name of the condition that is heard.
        is_difference: whether its difference from the reference is heard instead.
        position_s: position in seconds; while playing a few times per second.
        region_s: (from, to) in seconds, or None. It is looped if ``is_looping``.
        is_looping: whether the region, or without one the whole sample, is repeated.
        is_playing: whether it plays. Browsers allow that only after a click or a key in the page.
        audio_state: what the browser says: ``idle``, ``running``, ``suspended``.
        ready_ms: time from the first look until the first sample could be played, 0 before.
        loaded_ms: time until the other samples were there, too (sets above 64 MB are fetched as they are chosen).

    Raises:
        InputError: no AudioSet, or limits that are not positive. Setting an attribute to what does not exist raises it,
            too, and changes nothing.
    """

    _esm = script("audio_engine.js", "audio_canvas.js", "ab_session.js", "ab_pictures.js", "ab_player.js")
    _css = style_sheet("ab_player.css")

    _index = t.Dict().tag(sync=True)
    sample = t.Unicode().tag(sync=True)
    condition = t.Unicode().tag(sync=True)
    is_difference = t.Bool(False).tag(sync=True)
    position_s = t.Float(0.0).tag(sync=True)
    region_s = t.Tuple(t.Float(), t.Float(), allow_none=True, default_value=None).tag(sync=True)
    is_looping = t.Bool(False).tag(sync=True)
    is_playing = t.Bool(False).tag(sync=True)
    audio_state = t.Unicode("idle").tag(sync=True)
    ready_ms = t.Float(0.0).tag(sync=True)
    loaded_ms = t.Float(0.0).tag(sync=True)

    def __init__(self, audio_set: AudioSet, *, static_seconds: float = 5.0, static_bytes: int = 3_000_000) -> None:
        if not isinstance(audio_set, AudioSet):
            raise InputError(f"ABPlayer takes an AudioSet, got {type(audio_set).__name__}. AudioSet.from_waveforms() makes one.")
        if not (math.isfinite(static_seconds) and static_seconds > 0 and static_bytes > 0):
            raise InputError(f"static_seconds and static_bytes must be positive, got {static_seconds} and {static_bytes}.")
        self._audio, self._static_limits = audio_set, (static_seconds, static_bytes)
        self._heard: list[Heard] = []
        self._switches: list[Switch] = []
        super().__init__(_index=_index_of(audio_set), sample=audio_set.samples[0], condition=audio_set.conditions[0])
        self.on_msg(self._on_message)

    # ------------------------------------------------------------------------------------------------ what was heard

    @property
    def audio_set(self) -> AudioSet:
        """What is compared."""
        return self._audio

    @property
    def played(self) -> tuple[Heard, ...]:
        """What was heard, stretch by stretch. ``pandas.DataFrame(player.played)`` is a table of it."""
        return tuple(self._heard)

    @property
    def switches(self) -> tuple[Switch, ...]:
        """Every change of condition while playing, with its times."""
        return tuple(self._switches)

    def play(self) -> None:
        """Start, if the browser allows it; ``audio_state`` tells."""
        self.is_playing = True

    def pause(self) -> None:
        """Stop where it is."""
        self.is_playing = False

    # ------------------------------------------------------------------------------------------------------- checks

    @t.validate("sample")
    @refusing
    def _known_sample(self, proposal: t.Bunch) -> str:
        check_known("sample", proposal.value, self._audio.samples)
        return str(proposal.value)

    @t.validate("condition")
    @refusing
    def _known_condition(self, proposal: t.Bunch) -> str:
        check_known("condition", proposal.value, self._audio.conditions)
        return str(proposal.value)

    @t.validate("is_difference")
    @refusing
    def _possible_difference(self, proposal: t.Bunch) -> bool:
        if proposal.value and (why := self._no_difference()):
            raise InputError(why)
        return bool(proposal.value)

    @t.validate("position_s")
    @refusing
    def _position_inside(self, proposal: t.Bunch) -> float:
        duration = self._audio.duration_s(self.sample)
        if not 0 <= proposal.value <= duration + 1e-6:
            raise InputError(f"position_s is {proposal.value}; {self.sample} goes from 0 to {duration:.3f} s.")
        return min(float(proposal.value), duration)

    @t.validate("region_s")
    @refusing
    def _region_inside(self, proposal: t.Bunch) -> tuple[float, float] | None:
        if proposal.value is None:
            return None
        (start, end), duration = proposal.value, self._audio.duration_s(self.sample)
        if not (start >= 0 and end <= duration + 1e-6 and end - start >= _SHORTEST_REGION_S - 1e-9):
            raise InputError(
                f"region_s is ({start}, {end}); it lies within 0 and {duration:.3f} s and has {_SHORTEST_REGION_S} s at least. "
                "None takes the region away."
            )
        return float(start), min(float(end), duration)

    @t.observe("sample")
    def _from_the_start(self, _: object) -> None:
        self.set_trait("region_s", None)
        self.position_s = 0.0
        self._drop_difference()

    @t.observe("condition")
    def _drop_difference(self, _: object = None) -> None:
        if self.is_difference and self._no_difference():
            self.is_difference = False

    def _no_difference(self) -> str:
        """Why the present condition has no difference track; empty if it has one."""
        reference = self._audio.conditions[0]
        if self.condition == reference:
            return f"{reference} is the reference and does not differ from itself. Choose another condition first."
        lengths = [len(self._audio.waveform(name, self.sample)) for name in (reference, self.condition)]
        if lengths[0] != lengths[1]:
            return f"{self.condition} of {self.sample} has {lengths[1]} samples and {reference} {lengths[0]}: there is no difference track."
        return ""

    # ----------------------------------------------------------------------------------------------------- messages

    def set_state(self, sync_data: dict[str, Any]) -> None:
        """What the browser reports. It may still speak of a sample that Python has just left: such times are cut.

        Raises:
            InputError: what it reports does not exist, or is none at all. Nothing was changed.
        """
        duration, region = self._audio.duration_s(sync_data.get("sample", self.sample)), sync_data.get("region_s")
        if region is not None and not (isinstance(region, (list, tuple)) and len(region) == 2 and all(map(is_number, region))):
            raise InputError(f"the browser reports the region {region!r}; two numbers of seconds are needed, or None.")
        if is_number(sync_data.get("position_s")):
            sync_data["position_s"] = min(max(sync_data["position_s"], 0.0), duration)
        if region is not None and region[1] > duration + 1e-6:
            sync_data["region_s"] = None
        try:
            super().set_state(sync_data)
        except RefusedError:
            raise
        except t.TraitError as error:
            raise InputError(f"the browser reports what cannot be: {error}") from None

    def _on_message(self, _: object, content: Any, buffers: object) -> None:
        facts = dict(content) if isinstance(content, dict) else {}
        kind = facts.pop("kind", None)
        try:
            if kind == "fetch":
                self._send_clip(facts.get("sample"))
            elif kind == "heard":
                self._heard.append(Heard(**facts))
            elif kind == "switch":
                self._switches.append(Switch(**facts))
            else:
                logger.warning("ABPlayer ignores a message that it does not know: %r", content)
        except ValidationError as error:
            logger.warning("ABPlayer ignores a damaged message, %r: %s", content, error)

    def _send_clip(self, sample: Any) -> None:
        try:
            waveforms = [self._audio.waveform(condition, sample) for condition in self._audio.conditions]
        except InputError as error:
            self.send({"kind": "refused", "sample": sample, "message": str(error)})
            return
        found = [difference_between(waveforms[0], waveform) for waveform in waveforms[1:]]
        differences: list[dict[str, Any]] = [{"gain_db": None, "peak": 0.0, "label": "the reference"}]
        differences += [{"gain_db": None if d.samples is None else d.gain_db, "peak": d.level, "label": d.label} for d in found]
        self.send({"kind": "clip", "sample": sample, "differences": differences})
        for track, waveform in enumerate(waveforms):
            send_waveform(self, waveform, {"sample": sample, "track": track})

    # ------------------------------------------------------------------------------------------------------- static

    def _repr_mimebundle_(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """The live widget where there is one, and plain players for static pages."""
        seconds, limit = self._static_limits
        data, metadata = super()._repr_mimebundle_(**kwargs) or ({}, {})
        static = static_players(self._audio, max_seconds=seconds, max_bytes=limit).markup
        return {**data, "text/plain": repr(self), "text/html": static}, metadata

    def __repr__(self) -> str:
        heard = f"{self.condition} − {self._audio.conditions[0]}" if self.is_difference else self.condition
        return f"ABPlayer({self._audio!r}, {self.sample}: {heard} at {self.position_s:.2f} s)"


def send_waveform(widget: anywidget.AnyWidget, waveform: Any, name: dict[str, Any]) -> None:
    """Send a float32 waveform [n] as binary messages of kind ``piece``, little-endian, each with ``name`` and its offset."""
    for offset in range(0, len(waveform), _PIECE_SAMPLES):
        piece = waveform[offset : offset + _PIECE_SAMPLES].astype("<f4")
        widget.send({"kind": "piece", **name, "offset": offset}, buffers=[piece.tobytes()])


def _index_of(audio: AudioSet) -> dict[str, Any]:
    peaks = {sample: max(peak(audio.waveform(condition, sample)) for condition in audio.conditions) for sample in audio.samples}
    gain = shared_gain(audio.waveform(condition, sample) for condition in audio.conditions for sample in audio.samples)
    colours = track_colours(len(audio.conditions))
    return {
        "sampleRate": audio.sample_rate,
        "gain": gain,
        "gainText": gain_text(gain),
        "conditions": [{"name": name, "colour": colour} for name, colour in zip(audio.conditions, colours, strict=True)],
        "differenceColour": DIFFERENCE_COLOUR,
        "samples": [
            {
                "name": sample,
                "detail": audio.detail(sample),
                "lengths": [len(audio.waveform(condition, sample)) for condition in audio.conditions],
                "seams": list(audio.seams(sample)),
                "peak": peaks[sample],
            }
            for sample in audio.samples
        ],
    }
