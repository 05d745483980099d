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
    """The first notebook alone: each is executed and compared by nbval, too."""
    return run_tour(tmp_path_factory.mktemp("tour") / "new" / "folder" / "tour.html", notebook=notebook_path())


def write(path: Path, *sources: str) -> Path:
    book = new_notebook(cells=[new_markdown_cell("# Small"), *map(new_code_cell, sources)])
    nbformat.write(book, path)
    return path


def test_tour_passes_and_says_so_in_ten_lines(result):
    assert result.passed
    assert result.summaries["01_capture.ipynb"].verdict() == VERDICT
    lines = str(result).splitlines()
    assert len(lines) == 10
    assert [line.split("  ")[0].strip() for line in lines[1:]] == [
        "graphs", "memory", "calls", "hit rate", "padding", "speed", "largest difference", "after clean-up", "report",
    ]  # fmt: skip
    assert str(result.report) in lines[-1]
    told = json.loads(result.to_json())
    assert told["passed"] is True
    assert told["notebooks"]["01_capture.ipynb"]["graphs_captured"] == 3
    assert told["notebooks"]["01_capture.ipynb"]["verdict"] == VERDICT


def test_figures_are_those_of_the_clips(result):
    """49 to 78 frames against buckets of 50, 56 and 69: counted by hand from the manifest's codes."""
    found = result.summaries["01_capture.ipynb"]
    assert (found.exact_hits, found.padded_hits, found.fallbacks, found.errors) == (7, 11, {"shape_not_covered": 2}, 0)
    assert found.wasted_share == pytest.approx(48 / (1021 + 48))
    assert found.pool_bytes > 0
    assert 0 < found.largest_difference <= 1e-5


def test_report_holds_audio_and_needs_nothing_else(result):
    page = result.report.read_text(encoding="utf-8")
    assert VERDICT in page
    assert page.count("data:audio/wav;base64,") == 10  # two of the four differences are silent
    assert page.count("silent: identical") >= 2
    assert page.count("<b>eager (fallback)</b>") == 1
    assert page.count("<b>graph</b>") == 3
    for fetched in ('src="http', "<link", "@import", "<script", "url(http", "widget-view"):
        assert fetched not in page
    assert list(result.report.parent.iterdir()) == [result.report]


def summary_cell(passed: bool) -> str:
    """Source of a cell that displays a streaming summary as a notebook's own code would."""
    return (
        "from vgraph_lab.inspect import StreamingSummary\n"
        f"StreamingSummary('cpu', 2, 2, 1.0, 0, 0, 0, {{'a.b': 1}}, {{}}, 0, 1, {int(passed)}, {{'exact hit': 2}}, 2, 0.0, {{}}, 0)"
    )


@pytest.mark.parametrize("passed", [True, False])
def test_a_tour_has_a_chapter_per_notebook(tmp_path, monkeypatch, passed):
    (tmp_path / "notebooks").mkdir()
    for name, good in (("one.ipynb", True), ("two.ipynb", passed)):
        write(tmp_path / "notebooks" / name, summary_cell(good), f"print('I am {name}')")
    monkeypatch.setattr(tour, "_PACKAGE", tmp_path / "vgraph_lab")
    monkeypatch.setattr(tour, "_NOTEBOOKS", ("one.ipynb", "two.ipynb"))
    found = run_tour(tmp_path / "out.html")
    assert list(found.summaries) == ["one.ipynb", "two.ipynb"]
    assert found.passed is passed
    page = (tmp_path / "out.html").read_text()
    assert page.index("I am one.ipynb") < page.index("I am two.ipynb")
    assert ("FAIL: " in page) is not passed
    assert str(found).count("graphs captured") == 2


def test_a_notebook_that_fails_keeps_the_chapters_before_it(tmp_path, monkeypatch):
    (tmp_path / "notebooks").mkdir()
    write(tmp_path / "notebooks" / "one.ipynb", summary_cell(True))
    write(tmp_path / "notebooks" / "two.ipynb", "print('so far')", "1 / 0")
    monkeypatch.setattr(tour, "_PACKAGE", tmp_path / "vgraph_lab")
    monkeypatch.setattr(tour, "_NOTEBOOKS", ("one.ipynb", "two.ipynb"))
    with pytest.raises(CellExecutionError, match="ZeroDivisionError"):
        run_tour(tmp_path / "out.html")
    page = (tmp_path / "out.html").read_text()
    assert page.index("PASS: 2/2 graphs captured") < page.index("FAIL: a cell of the notebook raised an error") < page.index("so far")


def test_the_tour_runs_the_first_notebooks_of_this_package():
    """Those that hand over a summary. The others are for reading and are run by nbval."""
    names = [notebook_path(name).name for name in tour._NOTEBOOKS]
    assert names == [path.name for path in NOTEBOOKS][: len(names)]
    assert len(names) == 2


def test_a_failing_cell_leaves_a_report_up_to_it(tmp_path):
    book = write(tmp_path / "bad.ipynb", "print('before')", "1 / 0", "print('after')")
    others = psutil.Process().children()  # what earlier tests of this process keep, as a fork server
    with pytest.raises(CellExecutionError, match="ZeroDivisionError") as raised:
        run_tour(tmp_path / "out.html", notebook=book)
    assert str(tmp_path / "out.html") in raised.value.__notes__[0]
    page = (tmp_path / "out.html").read_text()
    assert "FAIL: a cell of the notebook raised an error" in page
    assert "ZeroDivisionError" in page
    assert "before" in page
    assert set(psutil.Process().children()) <= set(others)  # the kernel is gone, too


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
