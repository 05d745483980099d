"""A/B players: eager, graph and their difference, at honest levels.

Eager and graph of all pairs are played with one shared gain, which is 1 unless a sample exceeds full scale; nothing is
normalised. A difference is labelled with its true level; where it is amplified to be heard at all, the label says by
how much. Players are plain HTML with the audio inside, so they work in a static page, too. Starting a player pauses
the others of its pair and goes on where they were, so that eager and graph can be compared at any spot.
"""

from __future__ import annotations

import base64
import io
import math
import wave
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from vgraph_lab.errors import InputError
from vgraph_lab.inspect.parity import Comparison
from vgraph_lab.inspect.stream_parity import StreamComparison

from .html import Html, escape, styled
from .levels import Samples, difference_gain_db, difference_label, difference_track, peak, shared_gain
from .plots import waveforms
from .style import COLOURS, chart

__all__ = ["ABPair", "ab_players", "wav_data_uri"]

_PAUSE_OTHERS = (
    "for(const a of this.closest('.vgl-ab').querySelectorAll('audio'))if(a!==this&&!a.paused){a.pause();this.currentTime=a.currentTime}"
)


@dataclass(frozen=True, slots=True)
class ABPair:
    """What one set of players compares.

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
    """Players for each pair, below each other.

    Args:
        pairs: what to compare; all share one gain, so that levels can be compared between pairs, too.
        sample_rate: in Hz.
        max_seconds: longer items are cut, and say so. Difference levels are those of the whole item.
        show_waveforms: draw eager, graph and difference above the players.

    Raises:
        InputError: no pairs, a sample rate or limit that is not positive, or a waveform with several channels, no
            samples, NaN or infinity, or another length than its partner. The message names the pair.
    """
    if not pairs:
        raise InputError("there is nothing to compare: pass at least one ABPair.")
    if sample_rate <= 0 or not max_seconds > 0:
        raise InputError(f"sample_rate and max_seconds must be positive, got {sample_rate} and {max_seconds}.")
    tracks = [_tracks(pair) for pair in pairs]
    gain = shared_gain(waveform for eager, graph, _ in tracks for waveform in (eager, graph))
    sections = [_section(pair, *track, sample_rate, gain, max_seconds, show_waveforms) for pair, track in zip(pairs, tracks, strict=True)]
    note = (
        f"Both tracks of all pairs are played with one gain, {_gain_text(gain)}, and are not normalised. Starting a player "
        "pauses the others of its pair and takes over their position."
    )
    return styled("".join(sections) + f'<p class="vgl-quiet">{note}</p>')


def _tracks(pair: ABPair) -> tuple[Samples, Samples, Samples]:
    try:
        return difference_track(pair.eager, pair.graph)
    except InputError as error:
        raise InputError(f"{pair.label}: {error}") from None


def _gain_text(gain: float) -> str:
    return "0 dB" if gain == 1 else f"{20 * math.log10(gain):.1f} dB because a sample exceeds full scale".replace("-", "−")


def _section(
    pair: ABPair,
    eager: Samples,
    graph: Samples,
    difference: Samples,
    sample_rate: int,
    gain: float,
    max_seconds: float,
    show_waveforms: bool,
) -> str:
    seconds, kept = len(eager) / sample_rate, math.ceil(max_seconds * sample_rate)
    cut = f"the first {max_seconds:.2f} s of {seconds:.2f} s" if len(eager) > kept else f"{seconds:.2f} s"
    lines = "".join(f"<div>{escape(line)}</div>" for line in pair.detail.splitlines())
    picture = ""
    if show_waveforms:
        picture = chart(partial(waveforms, names=pair.names), eager, graph, sample_rate, size_in=(8.6, 2.2)).to_svg()
    level = peak(difference)
    heard = {
        "eager": _player(pair.label, pair.names[0], wav_data_uri(eager[:kept] * gain, sample_rate)),
        "graph": _player(pair.label, pair.names[1], wav_data_uri(graph[:kept] * gain, sample_rate)),
        "difference": '<div class="vgl-silent">nothing to hear</div>',
    }
    gains = dict.fromkeys(("eager", "graph"), f"gain {_gain_text(gain)}")
    captions = {**gains, "difference": difference_label(level)}
    if level > 0:
        amplified = difference[:kept] * 10 ** (difference_gain_db(level) / 20)
        heard["difference"] = _player(pair.label, "difference", wav_data_uri(amplified, sample_rate))
    names = {"eager": pair.names[0], "graph": pair.names[1], "difference": "difference"}
    figures = "".join(
        f'<figure class="vgl-track" style="--vgl-track:{COLOURS[name]}"><figcaption><b>{escape(names[name])}</b>'
        f'<div class="vgl-quiet">{escape(captions[name])}</div></figcaption>{heard[name]}</figure>'
        for name in heard
    )
    return (
        f'<section class="vgl-ab" aria-label="{escape(pair.label)}"><header><strong>{escape(pair.label)}</strong> '
        f'<span class="vgl-quiet">{cut}</span><div class="vgl-quiet">{lines}</div></header>'
        f'<div class="vgl-chart">{picture}</div><div class="vgl-tracks">{figures}</div></section>'
    )


def _player(label: str, track: str, source: str) -> str:
    return (
        f'<audio controls preload="metadata" aria-label="{escape(label)}, {track}" data-track="{track}" '
        f'onplay="{escape(_PAUSE_OTHERS)}" src="{source}"></audio>'
    )


def wav_data_uri(samples: Samples, sample_rate: int) -> str:
    """A mono waveform within ±1 as a 16-bit WAV in a data URI.

    Raises:
        InputError: a sample exceeds full scale; it would be clipped. Apply a gain first.
    """
    if peak(samples) > 1 + 1e-9:
        raise InputError(f"a sample of {peak(samples):.3f} exceeds full scale and would be clipped. Apply shared_gain() first.")
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(sample_rate)
        file.writeframes(np.clip(np.rint(samples * 32767), -32767, 32767).astype("<i2").tobytes())
    return "data:audio/wav;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
