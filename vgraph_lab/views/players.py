"""Players in plain HTML: every condition of a sample and its difference from the reference, at honest levels.

All tracks of a page are played with one shared gain, which is 1 unless a sample exceeds full scale; nothing is
normalised. A difference is labelled with its true level; where it is amplified to be heard at all, the label says by
how much. The audio is inside the page, so it works in reports, too. Starting a player pauses the others of its sample
and goes on where they were, so that conditions can be compared at any spot. :class:`~vgraph_lab.views.ab_player.ABPlayer`
is the live form.
"""

from __future__ import annotations

import base64
import io
import itertools
import math
import wave
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vgraph_lab.errors import InputError
from vgraph_lab.inspect.listening.audio_set import AudioSet
from vgraph_lab.inspect.parity import Comparison
from vgraph_lab.inspect.stream_parity import StreamComparison

from .html import Html, escape, styled
from .levels import Difference, Samples, difference_between, difference_track, gain_text, peak, shared_gain
from .style import COLOURS
from .track_picture import Lane, track_picture

__all__ = ["DIFFERENCE_COLOUR", "ABPair", "ab_players", "static_players", "track_colours", "wav_data_uri"]

DIFFERENCE_COLOUR = COLOURS["difference"]

_COLOURS = (COLOURS["eager"], COLOURS["graph"], "#1d9a7f", "#7a66d9", "#a0692f", "#b0559a", "#6b8e23", "#7d8590")
_BYTES_PER_SAMPLE = 2

_PAUSE_OTHERS = (
    "for(const a of this.closest('.vgl-ab').querySelectorAll('audio'))if(a!==this&&!a.paused){a.pause();this.currentTime=a.currentTime}"
)


def track_colours(count: int) -> list[str]:
    """Colours of that many conditions, the reference first. With more than eight they repeat; names tell them apart."""
    return list(itertools.islice(itertools.cycle(_COLOURS), count))


def static_players(
    audio_set: AudioSet,
    *,
    samples: Sequence[str] | None = None,
    names: Mapping[str, Sequence[str]] | None = None,
    max_seconds: float = 20.0,
    max_bytes: int | None = None,
    show_waveforms: bool = True,
) -> Html:
    """Players for each sample, below each other.

    Args:
        audio_set: what is compared; all of it shares one gain, so that levels can be compared between samples, too.
        samples: which of its samples, in this order; all by default.
        names: sample → what its conditions are called there, where that is not their name.
        max_seconds: longer samples are cut, and say so. Levels of differences are those of the whole sample.
        max_bytes: limit of the 16-bit audio of all players (a page needs a third more, as base64). Samples that do not fit
            are left out, and the page says which; the first one is cut to fit.
        show_waveforms: draw the tracks above the players.

    Raises:
        InputError: a sample that the set does not have, or a limit that is not positive.
    """
    if not max_seconds > 0 or (max_bytes is not None and max_bytes <= 0):
        raise InputError(f"max_seconds and max_bytes must be positive, got {max_seconds} and {max_bytes}.")
    chosen = list(audio_set.samples if samples is None else samples)
    if not chosen:
        raise InputError("there is nothing to compare: name at least one sample.")
    gain = shared_gain(audio_set.waveform(condition, sample) for sample in chosen for condition in audio_set.conditions)
    sections: list[str] = []
    left = math.inf if max_bytes is None else max_bytes // _BYTES_PER_SAMPLE
    for sample in chosen:
        found = _Sample.of(audio_set, sample, (names or {}).get(sample, audio_set.conditions), gain)
        kept = math.ceil(max_seconds * audio_set.sample_rate)
        if not sections and found.cost(kept) > left:
            kept = max(1, int(left // found.tracks))
        if sections and found.cost(kept) > left:
            break
        left -= found.cost(kept)
        sections.append(found.section(kept, show_waveforms))
    missing = chosen[len(sections) :]
    note = (
        f"All tracks but the differences are played with one gain, {gain_text(gain)}, and are not normalised. Starting a player "
        "pauses the others of its sample and takes over their position."
    )
    if missing and max_bytes:
        note += f" Left out to keep this page below {max_bytes / 1e6:g} MB of audio: {', '.join(missing)}."
    return styled("".join(sections) + f'<p class="vgl-quiet">{escape(note)}</p>')


@dataclass(frozen=True, slots=True)
class _Track:
    role: str  # data-track: the condition, or "difference"
    name: str
    colour: str
    caption: str
    samples: Samples  # as played
    silence: str = ""  # what is said in place of a player


@dataclass(frozen=True, slots=True)
class _Sample:
    label: str
    detail: str
    heard: list[_Track]
    sample_rate: int
    seams: tuple[int, ...]

    @classmethod
    def of(cls, audio: AudioSet, sample: str, names: Sequence[str], gain: float) -> _Sample:
        waveforms = [audio.waveform(condition, sample) for condition in audio.conditions]
        seconds = [f"{len(waveform) / audio.sample_rate:.3f} s, " if len(waveform) != len(waveforms[0]) else "" for waveform in waveforms]
        heard = [
            _Track(condition, name, colour, f"{length}gain {gain_text(gain)}", waveform * gain)
            for condition, name, colour, length, waveform in zip(
                audio.conditions, names, track_colours(len(names)), seconds, waveforms, strict=True
            )
        ]
        for name, waveform in zip(names[1:], waveforms[1:], strict=True):
            found: Difference = difference_between(waveforms[0], waveform)
            silence = "no difference track" if found.samples is None else "nothing to hear" if found.is_silent else ""
            title = "difference" if len(names) == 2 else f"{name} − {names[0]}"
            heard.append(_Track("difference", title, DIFFERENCE_COLOUR, found.label, found.played, silence))
        return cls(sample, audio.detail(sample), heard, audio.sample_rate, audio.seams(sample))

    @property
    def tracks(self) -> int:
        return sum(not track.silence for track in self.heard)

    def cost(self, kept: int) -> int:
        return sum(min(len(track.samples), kept) for track in self.heard if not track.silence)

    def section(self, kept: int, show_waveforms: bool) -> str:
        length = max(len(track.samples) for track in self.heard)
        seconds = length / self.sample_rate
        cut = f"the first {kept / self.sample_rate:.2f} s of {seconds:.2f} s" if length > kept else f"{seconds:.2f} s"
        lines = "".join(f"<div>{escape(line)}</div>" for line in self.detail.splitlines())
        picture = f'<div class="vgl-chart">{self._picture()}</div>' if show_waveforms else ""
        figures = "".join(
            f'<figure class="vgl-track" style="--vgl-track:{track.colour}"><figcaption><b>{escape(track.name)}</b>'
            f'<div class="vgl-quiet">{escape(track.caption)}</div></figcaption>{self._player(track, kept)}</figure>'
            for track in self.heard
        )
        return (
            f'<section class="vgl-ab" aria-label="{escape(self.label)}"><header><strong>{escape(self.label)}</strong> '
            f'<span class="vgl-quiet">{cut}</span><div class="vgl-quiet">{lines}</div></header>'
            f'{picture}<div class="vgl-tracks">{figures}</div></section>'
        )

    def _player(self, track: _Track, kept: int) -> str:
        if track.silence:
            return f'<div class="vgl-silent">{track.silence}</div>'
        source = wav_data_uri(track.samples[:kept], self.sample_rate)
        return (
            f'<audio controls preload="metadata" aria-label="{escape(self.label)}, {escape(track.name)}" data-track="{escape(track.role)}" '
            f'onplay="{escape(_PAUSE_OTHERS)}" src="{source}"></audio>'
        )

    def _picture(self) -> str:
        level = max(peak(track.samples) for track in self.heard if track.role != "difference")
        lanes = [
            Lane(track.name, track.caption.split(", "), track.colour, track.samples, peak(track.samples))
            if track.role == "difference"
            else Lane(track.name, [], track.colour, track.samples, level)
            for track in self.heard
            if len(track.samples)
        ]
        return track_picture(lanes, self.sample_rate, self.seams)


# ------------------------------------------------------------------------------------------------------ eager and graph


@dataclass(frozen=True, slots=True)
class ABPair:
    """Two waveforms of one item, for :func:`ab_players`.

    Attributes:
        label: name of the item.
        eager: waveform [samples] (or [1, 1, samples]), full scale ±1.
        graph: likewise, of the same length.
        detail: a line below the label: what is said, by whom, how the call was served.
        names: what the two tracks are called, where they are not eager and graph.
    """

    label: str
    eager: Any
    graph: Any
    detail: str = ""
    names: tuple[str, str] = ("eager", "graph")

    @classmethod
    def of(cls, comparison: Comparison, detail: str = "") -> ABPair:
        """The pair of a comparison; its route and verdict are appended to ``detail``. A fallback is not called a graph."""
        facts = f"{comparison.route} · {comparison.verdict}"
        names = ("eager", "eager (fallback)" if comparison.outcome == "fallback" else "graph")
        return cls(comparison.name, comparison.eager, comparison.graph, f"{detail}\n{facts}" if detail else facts, names)

    @classmethod
    def of_stream(cls, comparison: StreamComparison, detail: str = "") -> ABPair:
        """The pair of a streamed request; what became of its chunks is appended to ``detail``."""
        facts = f"{comparison.life.route()} · {comparison.text}"
        names = ("eager", "graph" if comparison.life.is_all_hits else "graph + eager")
        return cls(comparison.name, comparison.eager, comparison.graph, f"{detail}\n{facts}" if detail else facts, names)


def ab_players(pairs: Sequence[ABPair], sample_rate: int, *, max_seconds: float = 20.0, show_waveforms: bool = True) -> Html:
    """:func:`static_players` of pairs: eager, graph and their difference.

    Args:
        pairs: what to compare, each under a label of its own.
        sample_rate: in Hz.
        max_seconds: see :func:`static_players`.
        show_waveforms: likewise.

    Raises:
        InputError: no pairs, two of one label, a sample rate or limit that is not positive, or a waveform with several
            channels, no samples, NaN or infinity, or another length than its partner. The message names the pair.
    """
    labels = [pair.label for pair in pairs]
    if not pairs or len(set(labels)) < len(labels):
        raise InputError(f"at least one ABPair is needed, and no label twice; got {labels}.")
    waveforms: dict[str, dict[str, Any]] = {"eager": {}, "graph": {}}
    for pair in pairs:
        try:
            waveforms["eager"][pair.label], waveforms["graph"][pair.label], _ = difference_track(pair.eager, pair.graph)
        except InputError as error:
            raise InputError(f"{pair.label}: {error}") from None
    details = {pair.label: pair.detail for pair in pairs if pair.detail}
    audio_set = AudioSet.from_waveforms(waveforms, sample_rate, details=details)
    names = {pair.label: pair.names for pair in pairs}
    return static_players(audio_set, names=names, max_seconds=max_seconds, show_waveforms=show_waveforms)


def wav_data_uri(samples: Samples, sample_rate: int) -> str:
    """A mono waveform within ±1 as a 16-bit WAV in a data URI.

    Raises:
        InputError: a sample exceeds full scale; it would be clipped. Apply a gain first.
    """
    if peak(samples) > 1 + 1e-6:
        raise InputError(f"a sample of {peak(samples):.3f} exceeds full scale and would be clipped. Apply shared_gain() first.")
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(sample_rate)
        file.writeframes(np.clip(np.rint(samples * 32767), -32767, 32767).astype("<i2").tobytes())
    return "data:audio/wav;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
