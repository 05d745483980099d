"""What a capture explorer shows: a prediction as tiles, and a capture beside it."""

from __future__ import annotations

from typing import Any

import pandas as pd

from vgraph_lab.graphs.report import CaptureReport
from vgraph_lab.graphs.table import MIB
from vgraph_lab.inspect.planner.forecast import Forecast

from .html import escape, style_sheet

__all__ = ["outcome_html", "prediction_html"]

_ORIGINS = {"measured": "measured shapes", "modelled": "modelled", "unknown": "not known"}


def prediction_html(forecast: Forecast, schedule: str = "") -> str:
    """Markup of a forecast; every figure says where it comes from.

    Args:
        forecast: what to show.
        schedule: frames in words, where they are not chosen.
    """
    f = forecast.figures
    calls, waste = int(forecast.coverage["calls"].sum()), f["wasted_share"]
    audio_s = f["audio_s"] / f["audio_coverage"] if f["audio_coverage"] else None
    memory, times = _ORIGINS[forecast.memory_source], _ORIGINS[forecast.times_source]
    has_waste = waste is not None and not pd.isna(waste)
    tiles = [
        _tile("Calls in graphs", f"{100 * f['coverage']:.1f}", "%", f"{f['calls']:,} of {calls:,}", f["coverage"]),
        _tile("Audio in graphs", f"{100 * f['audio_coverage']:.1f}", "%", _seconds(f["audio_s"], audio_s), f["audio_coverage"]),
        _tile("Padding", f"{100 * waste:.1f}" if has_waste else "–", "%" if has_waste else "", "of computed frames", waste),
        _tile("Memory", *_known(f["charge_bytes"], lambda value: f"{value / MIB:,.1f}", "MiB"), memory),
        _tile("Capture time", *_known(f["capture_s"], lambda value: f"{value:,.2f}", "s"), memory),
        _tile("Time saved", *_known(f["saved_share"], lambda value: f"{100 * value:+.1f}".replace("-", "−"), "%"), times),
    ]
    split = (
        f" {forecast.split_calls:,} calls have more rows than any graph: they count as not in graphs here, and a runner splits them into "
        "more calls that fit."
        if forecast.split_calls
        else ""
    )
    why = f" What is not known: {forecast.why_unknown.rstrip('.')}. Measure costs." if forecast.why_unknown else ""
    return (
        f"<style>{style_sheet('capture_explorer.css')}</style>"
        f"<div>Predicted for {_sizes(forecast, schedule)}</div>"
        f'<div class="vgl-tiles">{"".join(tiles)}</div>'
        f'<p class="vgl-sources">Calls, audio and padding follow the Routines’ rule and are exact for these calls as they came. Time '
        f"saved is against eager.{escape(split + why)}</p>"
    )


def outcome_html(forecast: Forecast, comparison: pd.DataFrame, report: CaptureReport) -> str:
    """Markup of a capture beside its prediction, and the report.

    Args:
        forecast: of the sizes that were captured; those in the fields may be others by now.
        comparison: of :func:`~vgraph_lab.inspect.planner.outcome.compare_outcome`.
        report: of the same capture.
    """
    rows = "".join(
        f'<tr><th scope="row" class="vgl-text">{escape(row["figure"])}</th>'
        f"<td>{_value(row, 'predicted')}</td><td>{_value(row, 'outcome')}</td><td>{_value(row, 'difference', signed=True)}</td>"
        f'<td class="vgl-text">{escape("exact rule" if row["source"] == "rule" else _ORIGINS[row["source"]])}</td></tr>'
        for row in comparison.to_dict("records")
    )
    head = "".join(
        f'<th scope="col"{css}>{name}</th>'
        for name, css in (
            ("", ' class="vgl-text"'),
            ("predicted", ""),
            ("outcome", ""),
            ("difference", ""),
            ("prediction by", ' class="vgl-text"'),
        )
    )
    return (
        f"<style>{style_sheet('capture_explorer.css')}</style>"
        '<table class="vgl-table vgl-outcome"><caption>'
        f"Prediction and outcome of {_sizes(forecast)}</caption>"
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
        f'<p class="vgl-sources">Outcome: graphs, memory and seconds of this capture; calls as the Routines resolve them with the graphs '
        f"that exist.</p><details><summary>{escape(report.headline())}</summary>{report._repr_html_()}</details>"
    )


def _sizes(forecast: Forecast, schedule: str = "") -> str:
    f = forecast.figures
    sizes = [f"rows {', '.join(map(str, f['batch_sizes']))}"]
    sizes += [f"frames {', '.join(map(str, f['frame_sizes']))}"] if f["frame_sizes"] else [schedule] if schedule else []
    return f"<strong>{f['graphs']} graph{'' if f['graphs'] == 1 else 's'}</strong>: {escape('; '.join(sizes))}"


def _tile(name: str, value: str, unit: str, origin: str, share: float | None = None) -> str:
    width = "" if share is None or pd.isna(share) else f"width:{100 * share:.1f}%"
    bar = f'<div class="vgl-bar" aria-hidden="true"><span style="{width}"></span></div>' if width else ""
    return (
        f'<div class="vgl-tile" role="group"><div class="vgl-name">{escape(name)}</div>'
        f'<div class="vgl-value">{escape(value)}<small>{escape(unit)}</small></div>{bar}'
        f'<div class="vgl-origin">{escape(origin)}</div></div>'
    )


def _known(value: Any, words: Any, unit: str) -> tuple[str, str]:
    return ("–", "") if value is None or pd.isna(value) else (words(value), unit)


def _seconds(served: float, total: float | None) -> str:
    if total is None:
        return "none"
    digits = 0 if total >= 100 else 1
    return f"{served:,.{digits}f} of {total:,.{digits}f}\N{NO-BREAK SPACE}s"


def _value(row: dict[Any, Any], column: str, *, signed: bool = False) -> str:
    value, unit = row[column], row["unit"]
    if pd.isna(value):
        return "–"
    sign = "+" if signed and value else ""
    if unit.startswith("%"):
        text = f"{value:{sign}.1f} %"
    elif unit:
        text = f"{value:{sign},.2f} {unit}"
    else:
        text = f"{value:{sign},.0f}"
    return escape(text.replace("-", "−"))
