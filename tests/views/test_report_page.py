"""The report page: everything inside, nothing cut off, nothing fetched, no holes where widgets were."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from vgraph_lab.views.report_page import Chapter, report_page

VIEW = "application/vnd.jupyter.widget-view+json"


class Page(HTMLParser):
    """What a page would fetch, and the text that it shows."""

    def __init__(self, markup: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.tags: list[str] = []
        self.feed(markup)
        styles = " ".join(re.findall(r"<style>(.*?)</style>", markup, re.DOTALL))
        self.fetched += re.findall(r"@import[^;]*|url\([^)]*\)", styles)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append(tag)
        address = found.get("src") or (found.get("href") if tag == "link" else None) or ""
        if address and not address.startswith("data:"):
            self.fetched.append(address)


def notebook(*cells: Any) -> Any:
    return new_notebook(cells=list(cells))


def output(data: dict[str, Any]) -> Any:
    return new_output("display_data", data=data)


def page(book: Any, **changes: Any) -> str:
    return report_page([chapter(book, **changes)])


def chapter(book: Any, **changes: Any) -> Chapter:
    return Chapter(book, **{"verdict": "PASS: all <good>", "passed": True, "figures": {"graphs": "3 & more"}, "origin": "here", **changes})


def test_summary_stands_below_the_title():
    markup = page(notebook(new_markdown_cell("# A title\n\nprose"), new_code_cell("1 + 1")))
    assert "<title>A title</title>" in markup
    assert markup.index("<h1") < markup.index("PASS: all &lt;good&gt;") < markup.index("prose")
    assert "<dt>graphs</dt><dd>3 &amp; more</dd>" in markup
    assert 'class="summary passed"' in markup
    assert 'class="summary failed"' in page(notebook(), passed=False)


def test_page_fetches_nothing_and_runs_no_script():
    cells = [new_markdown_cell("# T\n\n$x$ and ![a](attachment:b)"), new_code_cell("x", outputs=[output({"text/html": "<b>bold</b>"})])]
    found = Page(page(notebook(*cells[1:], new_markdown_cell("# T\n\nmath $x^2$"))))
    assert found.fetched == []
    assert "script" not in found.tags


def test_widgets_give_way_to_their_static_html():
    both, alone = {VIEW: {"model_id": "1"}, "text/html": "<i>static form</i>"}, {VIEW: {"model_id": "2"}, "text/plain": "VBox(children=())"}
    book = notebook(new_code_cell("panel", outputs=[output(both), output(alone)]))
    markup = page(book)
    assert "<i>static form</i>" in markup
    assert "VBox" not in markup
    assert "model_id" not in markup
    assert VIEW in book.cells[0].outputs[0].data  # the notebook itself is as it was


def test_long_outputs_are_whole():
    lines = "\n".join(f"line {number}" for number in range(3000))
    markup = page(notebook(new_code_cell("x", outputs=[new_output("stream", text=lines)])))
    assert "line 2999" in markup
    assert "max-height" not in markup


@pytest.mark.parametrize("scheme", ["prefers-color-scheme: dark", "color-scheme: light dark"])
def test_page_has_both_schemes(scheme):
    assert scheme in page(notebook())


def test_errors_are_shown():
    failed = new_output("error", ename="ValueError", evalue="bad", traceback=["\x1b[31mValueError\x1b[0m: bad"])
    markup = page(nbformat.from_dict(notebook(new_code_cell("x", outputs=[failed]))))
    assert "ValueError" in markup
    assert "\x1b" not in markup


def test_several_notebooks_are_chapters_with_links_to_them():
    one, two = (notebook(new_markdown_cell(f"# {title}\n\n## Same")) for title in ("First & best", "Second"))
    markup = report_page([chapter(one), chapter(two, passed=False, verdict="FAIL: bad")])
    assert "<title>vgraph_lab: the tour</title>" in markup
    contents = markup[markup.index("<nav") : markup.index("</nav>")]
    assert re.findall(r'<a href="#(.*?)">(.*?)</a> <b class="(.*?)">', contents) == [
        ("chapter-1", "First &amp; best", "passed"),
        ("chapter-2", "Second", "failed"),
    ]
    ids = re.findall(r' id="(.*?)"', markup)
    assert len(set(ids)) == len(ids)
    assert {"chapter-1", "chapter-2"} <= set(ids)
    assert markup.index("PASS: all") < markup.index("Second</h1>") < markup.index("FAIL: bad")
    assert "<nav" not in report_page([chapter(one)])
