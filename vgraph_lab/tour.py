"""The tour: run the first notebook headless and write what it shows as one HTML file."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import dataclass
from datetime import datetime
from errno import EISDIR
from pathlib import Path
from time import perf_counter
from typing import Any

import nbformat
import torch
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from tqdm import tqdm

from . import __version__
from .errors import InputError
from .inspect.summary import SUMMARY_MIME, CaptureSummary
from .views.report_page import report_page

__all__ = ["TourResult", "check_writable", "notebook_path", "run_tour"]

_PACKAGE = Path(__file__).resolve().parent
_FIRST = "01_capture.ipynb"


@dataclass(frozen=True, slots=True)
class TourResult:
    """What a tour found. Printing it gives ten lines.

    Attributes:
        report: the HTML file.
        summary: the figures that the notebook handed over.
        seconds: wall time of the notebook and the report.
    """

    report: Path
    summary: CaptureSummary
    seconds: float

    @property
    def passed(self) -> bool:
        """The notebook's verdict."""
        return self.summary.passed

    def to_json(self) -> str:
        """The figures, the verdict and where the report is, as JSON."""
        found = {"verdict": self.summary.verdict(), "passed": self.passed, "report": str(self.report), "seconds": round(self.seconds, 1)}
        return json.dumps({**found, **self.summary.to_json()}, indent=1)

    def __str__(self) -> str:
        size_mb = self.report.stat().st_size / 1e6
        return f"{self.summary}\n{'report'.ljust(18)}  {self.report} ({size_mb:.1f} MB, {self.seconds:.0f} s)"


def notebook_path(name: str = _FIRST) -> Path:
    """A notebook of this package: ``notebooks/`` in a checkout, ``vgraph_lab/_notebooks`` in an installed wheel.

    Raises:
        InputError: this installation has no such notebook.
    """
    candidates = (_PACKAGE / "_notebooks" / name, _PACKAGE.parent / "notebooks" / name)
    for path in candidates:
        if path.is_file():
            return path
    raise InputError(f"there is no notebook {name}; looked for {' and '.join(map(str, candidates))}. Reinstall vgraph-lab.")


def check_writable(output: Path) -> None:
    """Find out before the work is done, not after it; makes the folder and leaves no file.

    Raises:
        InputError: a file cannot be written there.
    """
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        if output.is_dir():
            raise IsADirectoryError(EISDIR, "it is a folder")
        probe = output.with_name(output.name + ".partial")
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise InputError(f"{output} cannot be written: {error.strerror}. Choose another --output.") from error


def run_tour(output: str | Path = Path("build/tour.html"), *, notebook: str | Path | None = None, timeout_s: float = 600) -> TourResult:
    """Execute a notebook in a kernel of this interpreter and write a self-contained report.

    The notebook hands its figures over by displaying a :class:`~vgraph_lab.inspect.summary.CaptureSummary`.

    Args:
        output: the HTML file to write; it appears whole or not at all, and its folder is made.
        notebook: which one; the first of this package by default.
        timeout_s: limit for one cell, in seconds.

    Raises:
        InputError: no such notebook, or it displays no summary.
        nbclient.exceptions.CellExecutionError: a cell raised. The report up to that cell is written all the same.
        nbclient.exceptions.CellTimeoutError: a cell took longer than ``timeout_s``.
    """
    start = perf_counter()
    path, output = Path(notebook) if notebook is not None else notebook_path(), Path(output)
    if not path.is_file():
        raise InputError(f"{path} is not a notebook file.")
    check_writable(output)
    executed = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    try:
        _execute(executed, path.parent, timeout_s)
    except CellExecutionError as error:
        failed = {"notebook": str(path), "error": f"{error.ename}: {error.evalue}"}
        _write(
            output,
            path.name,
            executed,
            verdict="FAIL: a cell of the notebook raised an error",
            passed=False,
            figures=failed,
            seconds=perf_counter() - start,
        )
        error.add_note(f"The report up to the failing cell is {output}")
        raise
    summary = _handed_over(executed, path)
    seconds = perf_counter() - start
    _write(output, path.name, executed, verdict=summary.verdict(), passed=summary.passed, figures=summary.figures(), seconds=seconds)
    return TourResult(output, summary, perf_counter() - start)


def _execute(notebook: Any, folder: Path, timeout_s: float) -> None:
    """Run all cells in place, in a kernel of this very interpreter whatever kernels the user has installed."""
    from jupyter_client.kernelspec import KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager

    specs = KernelSpecManager(kernel_dirs=[])  # no folders: only the native kernel, which is sys.executable
    kernel = AsyncKernelManager(kernel_name="python3", kernel_spec_manager=specs)
    cells = tqdm(total=len(notebook.cells), desc="cells", unit="cell", disable=None)  # on a terminal only

    def cell_done(cell_index: int, **_: Any) -> None:
        cells.update(cell_index + 1 - cells.n)

    client = NotebookClient(
        notebook,
        on_cell_executed=cell_done,
        km=kernel,
        timeout=timeout_s,
        store_widget_state=False,
        resources={"metadata": {"path": str(folder)}},
        extra_arguments=["--log-level=ERROR"],  # the kernel's own warnings are about remote access, and this one is local
    )
    # Threads that wait should sleep: spinning ones starve each other, threefold and more, where cores are shared.
    with cells:
        client.execute(env={"OMP_WAIT_POLICY": "PASSIVE", **os.environ}, cleanup_kc=True)


def _handed_over(notebook: Any, path: Path) -> CaptureSummary:
    outputs = (output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs)
    found = [output.data[SUMMARY_MIME] for output in outputs if SUMMARY_MIME in output.get("data", {})]
    if not found:
        raise InputError(f"{path.name} displays no summary ({SUMMARY_MIME}). End it with summarise(...) as the value of a cell.")
    return CaptureSummary.from_json(found[-1])


def _write(output: Path, name: str, notebook: Any, *, verdict: str, passed: bool, figures: dict[str, str], seconds: float) -> None:
    when = f"{datetime.now().astimezone():%Y-%m-%d %H:%M %Z}"
    origin = (
        f"This is the notebook {name}, executed; `make lab` opens it to be changed and clicked. "
        f"Executed in {seconds:.0f} s on {when}: vgraph-lab {__version__}, torch {torch.__version__}, "
        f"Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    )
    page = report_page(notebook, verdict=verdict, passed=passed, figures=figures, origin=origin)
    partial = output.with_name(output.name + ".partial")
    partial.write_text(page, encoding="utf-8")
    partial.replace(output)
