"""The tour: the real notebook once, and small ones for what can go wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest
from nbclient.exceptions import CellExecutionError, CellTimeoutError
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from vgraph_lab import tour
from vgraph_lab.errors import InputError
from vgraph_lab.tour import TourResult, notebook_path, run_tour

VERDICT = (
    "PASS: 3/3 graphs captured; 20/20 utterances equal eager "
    "(7 exact hits and 2 fallbacks bit for bit, 11 padded hits within tolerance); pool released"
)


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> TourResult:
    return run_tour(tmp_path_factory.mktemp("tour") / "new" / "folder" / "tour.html")


def write(path: Path, *sources: str) -> Path:
    book = new_notebook(cells=[new_markdown_cell("# Small"), *map(new_code_cell, sources)])
    nbformat.write(book, path)
    return path


def test_tour_passes_and_says_so_in_ten_lines(result):
    assert result.passed
    assert result.summary.verdict() == VERDICT
    lines = str(result).splitlines()
    assert len(lines) == 10
    assert [line.split("  ")[0].strip() for line in lines[1:]] == [
        "graphs", "memory", "calls", "hit rate", "padding", "speed", "largest difference", "after clean-up", "report",
    ]  # fmt: skip
    assert str(result.report) in lines[-1]
    assert json.loads(result.to_json())["graphs_captured"] == 3


def test_figures_are_those_of_the_clips(result):
    """49 to 78 frames against buckets of 50, 56 and 69: counted by hand from the manifest's codes."""
    found = result.summary
    assert (found.exact_hits, found.padded_hits, found.fallbacks, found.errors) == (7, 11, {"shape_not_covered": 2}, 0)
    assert found.wasted_share == pytest.approx(48 / (1021 + 48))
    assert found.pool_bytes > 0
    assert 0 < found.largest_difference <= 1e-5


def test_report_holds_audio_and_needs_nothing_else(result):
    page = result.report.read_text(encoding="utf-8")
    assert VERDICT in page
    assert page.count("data:audio/wav;base64,") == 10  # two of the four differences are silent
    assert page.count("silent: identical") >= 2
    for fetched in ('src="http', "<link", "@import", "<script", "url(http", "widget-view"):
        assert fetched not in page
    assert list(result.report.parent.iterdir()) == [result.report]


def test_a_failing_cell_leaves_a_report_up_to_it(tmp_path):
    book = write(tmp_path / "bad.ipynb", "print('before')", "1 / 0", "print('after')")
    with pytest.raises(CellExecutionError, match="ZeroDivisionError") as raised:
        run_tour(tmp_path / "out.html", notebook=book)
    assert str(tmp_path / "out.html") in raised.value.__notes__[0]
    page = (tmp_path / "out.html").read_text()
    assert "FAIL: a cell of the notebook raised an error" in page
    assert "ZeroDivisionError" in page
    assert "before" in page
    assert psutil.Process().children() == []  # the kernel is gone, too


def test_a_notebook_without_summary_fails_and_keeps_the_last_report(tmp_path):
    output = tmp_path / "out.html"
    output.write_text("the last one")
    with pytest.raises(InputError, match="displays no summary"):
        run_tour(output, notebook=write(tmp_path / "none.ipynb", "1 + 1"))
    assert output.read_text() == "the last one"


def test_a_cell_that_takes_too_long_fails(tmp_path):
    with pytest.raises(CellTimeoutError):
        run_tour(tmp_path / "out.html", notebook=write(tmp_path / "slow.ipynb", "import time; time.sleep(60)"), timeout_s=1)


def test_the_kernel_is_this_interpreter(tmp_path, monkeypatch):
    """Whatever kernels a user has installed under the name python3."""
    spec = tmp_path / "kernels" / "python3"
    spec.mkdir(parents=True)
    (spec / "kernel.json").write_text(json.dumps({"argv": ["/bin/false"], "display_name": "trap", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    with pytest.raises(InputError, match="displays no summary"):  # it ran
        run_tour(tmp_path / "out.html", notebook=write(tmp_path / "x.ipynb", "import sys; assert 'vgraph_lab' not in sys.modules"))


def test_missing_notebooks_fail(tmp_path, monkeypatch):
    with pytest.raises(InputError, match="is not a notebook file"):
        run_tour(tmp_path / "out.html", notebook=tmp_path / "none.ipynb")
    with pytest.raises(InputError, match=r"looked for .*_notebooks.* and "):
        notebook_path("99_nothing.ipynb")


def test_an_installed_notebook_is_found_first(tmp_path, monkeypatch):
    monkeypatch.setattr(tour, "_PACKAGE", tmp_path / "vgraph_lab")
    for folder in ("vgraph_lab/_notebooks", "notebooks"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "notebooks" / "01_capture.ipynb").touch()
    assert notebook_path() == tmp_path / "notebooks" / "01_capture.ipynb"
    (tmp_path / "vgraph_lab" / "_notebooks" / "01_capture.ipynb").touch()
    assert notebook_path() == tmp_path / "vgraph_lab" / "_notebooks" / "01_capture.ipynb"


NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebooks_are_kept_clean(path):
    """Outputs cleared but for the verdict that nbval compares; prose before each short cell; a kernelspec."""
    book: Any = nbformat.read(path, as_version=4)
    nbformat.validate(book)
    assert book.metadata.kernelspec.name == "python3"
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    checked = [cell for cell in code if "NBVAL_CHECK_OUTPUT" in cell.source]
    assert len(checked) == 1
    (verdict,) = checked[0].outputs
    assert verdict.text.startswith("PASS: ")
    assert checked[0].execution_count == len(code)
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code if cell is not checked[0])
    assert max(len(cell.source.splitlines()) for cell in code) <= 9
    assert book.cells[0].cell_type == "markdown"
    assert book.cells[0].source.startswith("# ")
