"""Executed notebooks as one self-contained HTML page: audio, charts and styles inside, nothing fetched."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import nbformat

from .html import escape, style_sheet

__all__ = ["Chapter", "report_page"]

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


@dataclass(frozen=True, slots=True)
class Chapter:
    """One executed notebook of a page.

    Attributes:
        notebook: nbformat 4. It is not changed.
        verdict: the line below its title.
        passed: the colour of that line.
        figures: shown below it, by name.
        origin: what ran where, in one line.
    """

    notebook: Any
    verdict: str
    passed: bool
    figures: Mapping[str, str]
    origin: str

    @property
    def title(self) -> str:
        """The notebook's first heading."""
        cells = (cell for cell in self.notebook.cells if cell.cell_type == "markdown")
        lines = (line for cell in cells for line in cell.source.splitlines())
        return next((line.removeprefix("# ") for line in lines if line.startswith("# ")), "vgraph_lab")


def report_page(chapters: Sequence[Chapter]) -> str:
    """The page: executed notebooks below each other, each with its verdict, and links to them if there are several.

    Live widgets are replaced by the static HTML that they bring along. Nothing is cut off: outputs have no scroll boxes
    and tables all their rows.

    Args:
        chapters: at least one.
    """
    several = len(chapters) > 1
    bodies = [_body(chapter, f"chapter-{number}") for number, chapter in enumerate(chapters, start=1)]
    return _PAGE.format(
        title="vgraph_lab: the tour" if several else escape(chapters[0].title),
        styles=style_sheet("report.css") + _code_colours(),
        body=(_contents(chapters) if several else "") + "\n".join(bodies),
    )


def _contents(chapters: Sequence[Chapter]) -> str:
    links = (
        f'<li><a href="#chapter-{number}">{escape(chapter.title)}</a> <b class="{_state(chapter)}">{_state(chapter)}</b></li>'
        for number, chapter in enumerate(chapters, start=1)
    )
    return f'<nav aria-label="Notebooks"><ol>{"".join(links)}</ol></nav>'


def _state(chapter: Chapter) -> str:
    return "passed" if chapter.passed else "failed"


def _body(chapter: Chapter, name: str) -> str:
    from nbconvert import HTMLExporter  # slow to import, and needed here only

    options = {"exclude_input_prompt": True, "exclude_output_prompt": True, "exclude_anchor_links": True}
    exporter = HTMLExporter(template_name="basic", **options)  # type: ignore[no-untyped-call]  # nbconvert is untyped
    body, _ = exporter.from_notebook_node(_without_live_widgets(chapter.notebook))
    body = re.sub(r'(<h[1-6] id=")', rf"\g<1>{name}-", body)  # notebooks may have headings of the same name
    summary = _SUMMARY.format(
        state=_state(chapter),
        verdict=escape(chapter.verdict),
        figures="".join(f"<dt>{escape(name)}</dt><dd>{escape(words)}</dd>" for name, words in chapter.figures.items()),
        origin=escape(chapter.origin),
    )
    before, heading, after = body.partition("</h1>")  # below the title, if there is one
    body = before + heading + summary + after if heading else summary + body
    return f'<section id="{name}" class="chapter">{body}</section>'


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


def _code_colours() -> str:
    from pygments.formatters import HtmlFormatter  # type: ignore[import-untyped]  # ships no types

    light, dark = (HtmlFormatter(style=style).get_style_defs(".highlight") for style in ("default", "github-dark"))
    return f"{light}\n@media (prefers-color-scheme: dark) {{ {dark} }}\n.highlight {{ background: none; }}"
