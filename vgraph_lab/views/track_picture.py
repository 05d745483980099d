"""Waveforms of several tracks below each other as one small SVG, made without a plotting library: it costs milliseconds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .html import escape
from .levels import Samples

__all__ = ["Lane", "track_picture"]

_COLUMNS, _LEFT, _WIDTH, _LANE, _AXIS = 560, 152, 714, 50, 26  # 20 bold letters fit on the left


@dataclass(frozen=True, slots=True)
class Lane:
    """One track of a picture.

    Attributes:
        name: written beside it.
        notes: further lines below the name.
        colour: of the waveform.
        samples: waveform [samples].
        full: the lane is filled by the next round figure from this amplitude on, which is written below its name.
    """

    name: str
    notes: Sequence[str]
    colour: str
    samples: Samples
    full: float


def track_picture(lanes: Sequence[Lane], sample_rate: int, seams: Sequence[int] = ()) -> str:
    """The picture, on one time axis, in the text colour of the page.

    Args:
        lanes: at least one; their lengths may differ.
        sample_rate: in Hz.
        seams: sample positions at which chunks meet, drawn as dashed lines.
    """
    length = max(1, *(len(lane.samples) for lane in lanes))
    height = _LANE * len(lanes) + _AXIS
    parts = [_lane(lane, index, length) for index, lane in enumerate(lanes)]
    parts += [_seam(_x(seam, length), _LANE * len(lanes)) for seam in seams]
    parts.append(_axis(length, sample_rate, _LANE * len(lanes), bool(seams)))
    names = ", ".join(lane.name for lane in lanes)
    label = f"Waveforms of {names}; {length / sample_rate:.2f} s" + (f", {len(seams)} chunk seams" if seams else "")
    return (
        f'<svg role="img" aria-label="{escape(label)}" viewBox="0 0 {_WIDTH} {height}" width="100%" '
        f'font-family="inherit" font-size="11.5" fill="currentColor">{"".join(parts)}</svg>'
    )


def _x(position: float, length: int) -> float:
    return _LEFT + (_WIDTH - _LEFT - 6) * position / length


def _lane(lane: Lane, index: int, length: int) -> str:
    middle, half, full = _LANE * (index + 0.5), _LANE / 2 - 2, _round_up(lane.full)
    notes = [*lane.notes[:-1], ", ".join([*lane.notes[-1:], f"±{full:g}"])] if lane.full else lane.notes
    top, name = middle - 6 * len(notes) + 4, escape(_short(lane.name))
    text = f'<text x="{_LEFT - 12}" y="{top:.1f}" text-anchor="end" font-weight="600">{name}</text>'
    for line, note in enumerate(notes, start=1):
        y = top + 12.5 * line
        text += f'<text x="{_LEFT - 12}" y="{y:.1f}" text-anchor="end" font-size="9.8" opacity="0.8">{escape(note)}</text>'
    zero = f'<path d="M{_LEFT} {middle}H{_x(length, length):.1f}" stroke="currentColor" opacity="0.25" fill="none"/>'
    edges = np.linspace(0, len(lane.samples), min(_COLUMNS, len(lane.samples)) + 1).astype(int)
    low, high = (middle - half * f.reduceat(lane.samples, edges[:-1]) / full for f in (np.minimum, np.maximum))
    xs = [_x(edge, length) for edge in (edges[:-1] + edges[1:]) / 2]
    upper = [f"{x:.1f} {y - 0.3:.1f}" for x, y in zip(xs, high, strict=True)]
    lower = [f"{x:.1f} {y + 0.3:.1f}" for x, y in zip(reversed(xs), low[::-1], strict=True)]
    return text + zero + f'<path d="M{"L".join(upper + lower)}Z" fill="{lane.colour}" stroke="{lane.colour}" stroke-width="0.5"/>'


def _seam(x: float, height: float) -> str:
    return f'<path d="M{x:.1f} 0V{height}" stroke="currentColor" stroke-dasharray="3 3" opacity="0.6" fill="none"/>'


def _axis(length: int, sample_rate: int, top: float, has_seams: bool) -> str:
    seconds = length / sample_rate
    step = next(s * 10.0**e for e in range(-6, 6) for s in (1, 2, 5) if s * 10.0**e >= seconds / 8)
    parts = [f'<path d="M{_LEFT} {top}H{_x(length, length):.1f}" stroke="currentColor" opacity="0.6" fill="none"/>']
    for tick in range(math.floor(seconds / step + 1e-9) + 1):
        x = _x(tick * step * sample_rate, length)
        parts.append(f'<path d="M{x:.1f} {top}v4" stroke="currentColor" opacity="0.6"/>')
        parts.append(f'<text x="{x:.1f}" y="{top + 15}" text-anchor="middle" font-size="9.8" opacity="0.85">{tick * step:g}</text>')
    title = "s · ┆ chunk seams" if has_seams else "s"
    parts.append(f'<text x="{_LEFT - 12}" y="{top + 15}" text-anchor="end" font-size="9.8" opacity="0.85">{title}</text>')
    return "".join(parts)


def _short(name: str) -> str:
    return name if len(name) <= 20 else name[:19] + "…"


def _round_up(level: float) -> float:
    """The next round figure; 1 for nothing."""
    if level <= 0:
        return 1.0
    decade = 10.0 ** math.floor(math.log10(level))
    return next(step * decade for step in (1, 1.5, 2, 3, 4, 5, 6, 8, 10) if step * decade >= level * (1 - 1e-9))
