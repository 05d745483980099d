"""An executed notebook as one self-contained HTML page: audio, charts and styles inside, nothing fetched."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import nbformat

from .html import escape, style_sheet

__all__ = ["report_page"]

_WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{styles}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""

_SUMMARY = """<aside class="summary {state}" aria-label="Summary">
<p class="verdict">{verdict}</p>
<dl>{figures}</dl>
<p class="origin">{origin}</p>
</aside>
"""


def report_page(notebook: Any, *, verdict: str, passed: bool, figures: Mapping[str, str], origin: str) -> str:
    """The page.

    Live widgets are replaced by the static HTML that they bring along. Nothing is cut off: outputs have no scroll boxes
    and tables all their rows.

    Args:
        notebook: an executed notebook (nbformat 4). It is not changed.
        verdict: the line below the title.
        passed: its colour.
        figures: shown below it, by name.
        origin: what ran where, in one line.
    """
    from nbconvert import HTMLExporter  # slow to import, and needed here only

    static = _without_live_widgets(notebook)
    exporter = HTMLExporter(template_name="basic", exclude_input_prompt=True, exclude_output_prompt=True, exclude_anchor_links=True)  # type: ignore[no-untyped-call]
    body, _ = exporter.from_notebook_node(static)
    summary = _SUMMARY.format(
        state="passed" if passed else "failed",
        verdict=escape(verdict),
        figures="".join(f"<dt>{escape(name)}</dt><dd>{escape(words)}</dd>" for name, words in figures.items()),
        origin=escape(origin),
    )
    before, heading, after = body.partition("</h1>")  # below the title, if there is one
    body = before + heading + summary + after if heading else summary + body
    return _PAGE.format(title=escape(_title(static)), styles=style_sheet("report.css") + _code_colours(), body=body)


def _without_live_widgets(notebook: Any) -> Any:
    static = nbformat.from_dict(notebook)  # type: ignore[no-untyped-call]  # nbformat is untyped; this is a deep copy
    for cell in static.cells:
        if cell.cell_type == "code":
            cell.source = "\n".join(line for line in cell.source.splitlines() if not line.startswith("# NBVAL_"))  # test markers
            cell.outputs = [output for output in cell.outputs if _make_static(output)]
    return static


def _make_static(output: Any) -> bool:
    """Drop an output's live view; False if nothing worth showing is left."""
    data = output.get("data", {})
    if data.pop(_WIDGET_VIEW, None) is None:
        return True
    return "text/html" in data


def _title(notebook: Any) -> str:
    lines = (line for cell in notebook.cells if cell.cell_type == "markdown" for line in cell.source.splitlines())
    return next((line.removeprefix("# ") for line in lines if line.startswith("# ")), "vgraph_lab")


def _code_colours() -> str:
    from pygments.formatters import HtmlFormatter  # type: ignore[import-untyped]

    light, dark = (HtmlFormatter(style=style).get_style_defs(".highlight") for style in ("default", "github-dark"))
    return f"{light}\n@media (prefers-color-scheme: dark) {{ {dark} }}\n.highlight {{ background: none; }}"
