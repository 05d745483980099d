"""The tour: run the notebooks headless and write what they show as one HTML file."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from time import perf_counter
from typing import Any, TypeAlias

import nbformat
import torch
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from tqdm import tqdm

from . import __version__
from .bench.record import check_writable
from .errors import InputError
from .inspect.streaming_summary import STREAMING_MIME, StreamingSummary
from .inspect.summary import SUMMARY_MIME, CaptureSummary
from .views.report_page import Chapter, report_page

__all__ = ["TourResult", "notebook_path", "run_tour"]

_PACKAGE = Path(__file__).resolve().parent
_NOTEBOOKS = ("01_capture.ipynb", "02_streaming.ipynb")

Summary: TypeAlias = CaptureSummary | StreamingSummary
_READERS: dict[str, Callable[[Any], Summary]] = {SUMMARY_MIME: CaptureSummary.from_json, STREAMING_MIME: StreamingSummary.from_json}


@dataclass(frozen=True, slots=True)
class TourResult:
    """What a tour found. Printing it gives each notebook's verdict and figures.

    Attributes:
        report: the HTML file.
        summaries: the figures that each notebook handed over, by its file name.
        seconds: wall time of the notebooks and the report.
    """

    report: Path
    summaries: Mapping[str, Summary]
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether every notebook's verdict is good."""
        return all(summary.passed for summary in self.summaries.values())

    def to_json(self) -> str:
        """The verdicts and figures by notebook, and where the report is, as JSON."""
        notebooks = {
            name: {"verdict": summary.verdict(), "passed": summary.passed, **summary.to_json()} for name, summary in self.summaries.items()
        }
        return json.dumps(
            {"passed": self.passed, "report": str(self.report), "seconds": round(self.seconds, 1), "notebooks": notebooks}, indent=1
        )

    def __str__(self) -> str:
        size_mb = self.report.stat().st_size / 1e6
        parts = [str(summary) for summary in self.summaries.values()]
        return "\n\n".join(parts) + f"\n{'report'.ljust(18)}  {self.report} ({size_mb:.1f} MB, {self.seconds:.0f} s)"


def notebook_path(name: str = _NOTEBOOKS[0]) -> Path:
    """A notebook of this package: ``notebooks/`` in a checkout, ``vgraph_lab/_notebooks`` in an installed wheel.

    Raises:
        InputError: this installation has no such notebook.
    """
    candidates = (_PACKAGE / "_notebooks" / name, _PACKAGE.parent / "notebooks" / name)
    for path in candidates:
        if path.is_file():
            return path
    raise InputError(f"there is no notebook {name}; looked for {' and '.join(map(str, candidates))}. Reinstall vgraph-lab.")


def run_tour(output: str | Path = Path("build/tour.html"), *, notebook: str | Path | None = None, timeout_s: float = 600) -> TourResult:
    """Execute notebooks, each in a kernel of this interpreter, and write a self-contained report.

    A notebook hands its figures over by displaying a :class:`~vgraph_lab.inspect.summary.CaptureSummary` or a
    :class:`~vgraph_lab.inspect.streaming_summary.StreamingSummary`.

    Args:
        output: the HTML file to write; it appears whole or not at all, and its folder is made.
        notebook: a single one in place of this package's.
        timeout_s: limit for one cell, in seconds.

    Raises:
        InputError: no such notebook, or it displays no summary.
        nbclient.exceptions.CellExecutionError: a cell raised. The report up to that cell is written all the same.
        nbclient.exceptions.CellTimeoutError: a cell took longer than ``timeout_s``.
    """
    start, output = perf_counter(), Path(output)
    paths = [notebook_path(name) for name in _NOTEBOOKS] if notebook is None else [Path(notebook)]
    for path in paths:
        if not path.is_file():
            raise InputError(f"{path} is not a notebook file.")
    check_writable(output, overwrite=True)  # a report is made anew
    chapters: list[Chapter] = []
    summaries: dict[str, Summary] = {}
    for path in paths:
        began = perf_counter()
        executed = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]  # nbformat is untyped
        try:
            _execute(executed, path, timeout_s)
        except CellExecutionError as error:
            figures = {"notebook": str(path), "error": f"{error.ename}: {error.evalue}"}
            verdict = "FAIL: a cell of the notebook raised an error"
            chapters.append(Chapter(executed, verdict, False, figures, _origin(path, perf_counter() - began)))
            _write(output, chapters)
            error.add_note(f"The report up to the failing cell is {output}")
            raise
        summary = summaries[path.name] = _handed_over(executed, path)
        chapters.append(Chapter(executed, summary.verdict(), summary.passed, summary.figures(), _origin(path, perf_counter() - began)))
    _write(output, chapters)
    return TourResult(output, summaries, perf_counter() - start)


def _execute(notebook: Any, path: Path, timeout_s: float) -> None:
    """Run all cells in place, in a kernel of this very interpreter whatever kernels the user has installed."""
    from jupyter_client.kernelspec import KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager

    specs = KernelSpecManager(kernel_dirs=[])  # no folders: only the native kernel, which is sys.executable
    kernel = AsyncKernelManager(kernel_name="python3", kernel_spec_manager=specs)
    cells = tqdm(total=len(notebook.cells), desc=path.stem, unit="cell", disable=None)  # on a terminal only

    def cell_done(cell_index: int, **_: Any) -> None:
        cells.update(cell_index + 1 - cells.n)

    client = NotebookClient(
        notebook,
        on_cell_executed=cell_done,
        km=kernel,
        timeout=timeout_s,
        store_widget_state=False,
        resources={"metadata": {"path": str(path.parent)}},
        extra_arguments=["--log-level=ERROR"],  # the kernel's own warnings are about remote access, and this one is local
    )
    with cells:
        client.execute(cleanup_kc=True)


def _handed_over(notebook: Any, path: Path) -> Summary:
    outputs = [output.get("data", {}) for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    found = [read(data[mime]) for data in outputs for mime, read in _READERS.items() if mime in data]
    if not found:
        raise InputError(
            f"{path.name} displays no summary ({', '.join(_READERS)}). "
            "End it with summarise(...) or summarise_streaming(...) as the value of a cell."
        )
    return found[-1]


def _origin(path: Path, seconds: float) -> str:
    when = f"{datetime.now().astimezone():%Y-%m-%d %H:%M %Z}"
    return (
        f"This is the notebook {path.name}, executed; “make lab” opens it to be changed and clicked. "
        f"Executed in {seconds:.0f} s on {when}: vgraph-lab {__version__}, torch {torch.__version__}, "
        f"Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    )


def _write(output: Path, chapters: Sequence[Chapter]) -> None:
    partial = output.with_name(output.name + ".partial")
    partial.write_text(report_page(chapters), encoding="utf-8")
    partial.replace(output)
