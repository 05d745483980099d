"""A real JupyterLab in a real browser.

``open_notebook`` opens copies of this repository's notebooks; they stay open until the file's last test is over::

    @pytest.fixture(scope="module")
    def opened(open_notebook):
        opened = open_notebook("01_capture.ipynb")         # a tab and a kernel of its own
        opened.run_all()                                   # waits for the last cell; a failed cell fails the test
        return opened

    NOTEBOOK = "01_capture.ipynb"                          # the same by the fixture of this name here, for all tests of a file

    def test_a_click_reaches_python(opened):
        panel = opened.output("panel = CapturePanel")      # outputs of the cell with this text
        panel.get_by_role("button", name="Capture").click()
        opened.wait_for("panel.report is not None")        # a condition in the kernel: what a click changes may come later
        opened.wait_for_value("panel.report.captured", 3)  # an expression in the kernel, as JSON
        assert opened.value("panel.target.is_bound")       # the same, without waiting
        opened.screenshots("01_capture", panel)            # build/screenshots/01_capture-light.png and -dark.png

Nothing sleeps for a fixed time: pages and kernels are asked until a condition holds. A test that fails tells the browser's console
and leaves a picture of the page. Errors of the package's own scripts fail a test even if all else went well.

The browser is the system's (``$CHROMIUM``, or a Chromium on the path). Without one, tests here skip; with CI=true they fail.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from live_notebook import ROOT, STEP_S, Lab, OpenNotebook, find_browser
from playwright.sync_api import Browser, expect, sync_playwright

OPEN = pytest.StashKey[list[OpenNotebook]]()
"""Notebooks that are open now."""

expect.set_options(timeout=1000 * STEP_S)  # as long as for all other conditions: the machine may be slow


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    if report.failed and Path(__file__).parent in item.path.parents:
        for notebook in item.session.stash.get(OPEN, []):
            picture = notebook.picture(f"failed-{item.name}-{report.when}")
            report.sections.append((f"browser console of {notebook.name}", "\n".join([*notebook.console[-60:], f"picture: {picture}"])))
    return report


@pytest.fixture(scope="session")
def chromium() -> str:
    """Path of the browser."""
    found = find_browser()
    if found is None:
        message = "no Chromium found. Install Debian's package chromium, or name a browser in $CHROMIUM."
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    return found


@pytest.fixture(scope="session")
def lab(chromium: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """One JupyterLab (per worker), on a free port, over a copy of the notebooks."""
    folder = tmp_path_factory.mktemp("lab")
    shutil.copytree(ROOT / "notebooks", folder / "notebooks", ignore=shutil.ignore_patterns(".ipynb_checkpoints"))
    (folder / "tests").mkdir()
    (folder / "tests" / "data").symlink_to(ROOT / "tests" / "data")
    with Lab(folder) as server:
        yield server


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[Browser]:
    """One Chromium per file: while playwright's loop runs in this thread, tests of other folders could not run one of their own."""
    with sync_playwright() as playwright:
        arguments = ["--no-sandbox", "--disable-dev-shm-usage", "--autoplay-policy=no-user-gesture-required"]
        started = playwright.chromium.launch(executable_path=chromium, args=arguments)
        yield started
        started.close()


@pytest.fixture(scope="module")
def open_notebook(lab: Lab, browser: Browser, request: pytest.FixtureRequest) -> Iterator[Callable[[str], OpenNotebook]]:
    """Opens a notebook by its file name, with a kernel of its own that ends with the file's last test."""
    opened = request.session.stash.setdefault(OPEN, [])

    def open_one(name: str) -> OpenNotebook:
        opened.append(OpenNotebook(lab, browser, name))
        opened[-1].load()
        return opened[-1]

    yield open_one
    while opened:
        opened.pop().close()


@pytest.fixture(scope="module")
def opened(open_notebook: Callable[[str], OpenNotebook], request: pytest.FixtureRequest) -> OpenNotebook:
    """The notebook that the file calls ``NOTEBOOK``, after a run, for all tests of the file."""
    notebook = open_notebook(request.module.NOTEBOOK)
    notebook.run_all()
    return notebook


@pytest.fixture(autouse=True)
def no_script_errors(request: pytest.FixtureRequest) -> Iterator[None]:
    """Errors of the package's own scripts fail the test in which they came."""
    yield
    found = [error for notebook in request.session.stash.get(OPEN, []) for error in notebook.take_script_errors()]
    assert found == [], "errors of the package's own scripts"
