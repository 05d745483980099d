"""What the fixtures here are made of: a JupyterLab server, and one notebook that is open in a browser."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Self

from playwright.sync_api import Browser, ConsoleMessage, Error, Locator, Page

__all__ = ["ROOT", "SCREENSHOTS", "STEP_S", "Lab", "OpenNotebook", "find_browser"]

ROOT = Path(__file__).parents[2]
SCREENSHOTS = ROOT / "build" / "screenshots"
_START_S, _RUN_S, STEP_S = 60, 240, 60
_THEMES = {"light": "JupyterLab Light", "dark": "JupyterLab Dark"}
_SETTINGS = {
    "@jupyterlab/notebook-extension/tracker": {"windowingMode": "none"},  # outputs that are not in view exist, too
    "@jupyterlab/apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
}


def find_browser() -> str | None:
    """``$CHROMIUM``, or the first Chromium on the path."""
    given = os.environ.get("CHROMIUM")
    return shutil.which(given) if given else next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Lab:
    """A JupyterLab server over a folder: no token, no state of the user's, this interpreter as its only kernel.

    Args:
        folder: has a folder ``notebooks``; settings and logs go beside it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder, folder / "jupyter.log"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        for name, values in _SETTINGS.items():
            file = self.folder / "settings" / f"{name}.jupyterlab-settings"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(values))
        places = {"CONFIG_DIR": "config", "DATA_DIR": "data", "RUNTIME_DIR": "runtime"}
        env = {name: value for name, value in os.environ.items() if name not in ("JUPYTER_PATH", "PYTEST_CURRENT_TEST")}
        env |= {f"JUPYTER_{name}": str(self.folder / place) for name, place in places.items()}
        env |= {f"JUPYTERLAB_{name.upper()}_DIR": str(self.folder / name) for name in ("settings", "workspaces")}
        env |= {
            "IPYTHONDIR": str(self.folder / "ipython"),
            "JUPYTER_PREFER_ENV_PATH": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
            "OMP_NUM_THREADS": "1",
        }
        options = {
            "ServerApp.ip": "127.0.0.1",
            "ServerApp.port": self.port,
            "ServerApp.port_retries": 0,
            "ServerApp.root_dir": self.folder / "notebooks",
            "ServerApp.open_browser": False,
            "IdentityProvider.token": "",
            "LabApp.expose_app_in_browser": True,
        }
        command = [sys.executable, "-m", "jupyterlab", "--allow-root", *(f"--{name}={value}" for name, value in options.items())]
        with self.log.open("w") as log:
            self._server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env, cwd=self.folder)
        deadline = time.monotonic() + _START_S
        while not self._answers():
            if self._server.poll() is not None or time.monotonic() > deadline:
                self._end()
                raise RuntimeError(f"JupyterLab did not start within {_START_S} s:\n{self.log.read_text()[-4000:]}")
            time.sleep(0.1)
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/api", timeout=5):
                return True
        except (urllib.error.URLError, OSError):
            return False

    def _end(self) -> None:
        self._server.terminate()
        try:
            self._server.wait(20)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()


class OpenNotebook:
    """One notebook in a tab of its own, with a kernel of its own.

    Attributes:
        page: playwright's page.
        console: what the browser's console said so far.
    """

    def __init__(self, lab: Lab, browser: Browser, name: str) -> None:
        self.lab, self.name = lab, name
        self.console: list[str] = []
        self._script_errors: list[str] = []
        self._context = browser.new_context(viewport={"width": 1400, "height": 1500}, device_scale_factor=1.5)
        self._context.set_default_timeout(1000 * STEP_S)
        self.page: Page = self._context.new_page()
        self.page.on("console", self._hear)
        self.page.on("pageerror", self._hear_error)

    def load(self) -> None:
        """Open the notebook and wait for its kernel."""
        self.page.goto(f"{self.lab.url}/lab/workspaces/auto-{id(self)}/tree/{self.name}?reset")
        self.page.wait_for_function(
            """() => {
                const panel = window.jupyterapp?.shell.currentWidget;
                return panel?.context?.isReady && panel.sessionContext?.isReady && panel.sessionContext.session?.kernel?.status === 'idle';
            }"""
        )

    def close(self) -> None:
        """End the kernel, forget changes, close the tab."""
        try:
            self.page.evaluate("() => window.jupyterapp?.shell.currentWidget?.sessionContext?.shutdown()")
        except Error as error:  # the page may be what failed
            self.console.append(f"[close] {error}")
        self._context.close()

    # ------------------------------------------------------------------------------------------------ the kernel

    def run_all(self) -> None:
        """Run every cell and wait for the last one.

        Raises:
            AssertionError: a cell failed, or the notebook took too long.
        """
        self._evaluate("app.commands.execute('notebook:run-all-cells')", _RUN_S)
        failed = self.page.evaluate(
            """() => [...window.jupyterapp.shell.currentWidget.content.model.cells]
                .filter((cell) => cell.type === 'code')
                .flatMap((cell) => cell.sharedModel.getOutputs())
                .filter((output) => output.output_type === 'error')
                .map((output) => output.traceback.join('\\n'))"""
        )
        assert failed == [], f"{self.name} failed:\n" + "\n".join(failed)

    def python(self, code: str) -> str:
        """Run code in the kernel, now.

        What a click changes may come later: front ends hold a widget's messages back while an earlier one is on its way. Wait for
        it with :meth:`wait_for` or :meth:`wait_for_value`.

        Returns:
            What it printed.

        Raises:
            AssertionError: it raised; the message is its traceback.
        """
        status, text = self._evaluate(
            """(async () => {
                let text = '';
                const future = kernel.requestExecute({code, silent: false, store_history: false, stop_on_error: false});
                future.onIOPub = ({header, content}) => {
                    if (header.msg_type === 'stream' && content.name === 'stdout') text += content.text;
                    if (header.msg_type === 'error') text = content.traceback.join('\\n');
                };
                const reply = await future.done;
                return [reply.content.status, text];
            })()""",
            _RUN_S,
            code,
        )
        assert status == "ok", f"in the kernel of {self.name}:\n{code}\n{text}"
        return str(text)

    def value(self, expression: str) -> Any:
        """An expression's value, as JSON has it: tuples are lists."""
        return json.loads(self.python(f"import json as _json; print(_json.dumps({expression}))"))

    def wait_for(self, expression: str, timeout_s: float = STEP_S) -> None:
        """Wait until an expression in the kernel is true.

        Raises:
            AssertionError: it is not within that time.
        """
        deadline = time.monotonic() + timeout_s
        while not self.value(f"bool({expression})"):
            assert time.monotonic() < deadline, f"{expression} is not true after {timeout_s} s"
            self.page.wait_for_timeout(100)

    def wait_for_value(self, expression: str, expected: Any, timeout_s: float = STEP_S) -> None:
        """Wait until an expression in the kernel has this value, as JSON has it.

        Raises:
            AssertionError: it has another one after that time; the message says which.
        """
        deadline = time.monotonic() + timeout_s
        while (found := self.value(expression)) != expected:
            assert time.monotonic() < deadline, f"{expression} is {found!r} after {timeout_s} s, not {expected!r}"
            self.page.wait_for_timeout(100)

    def _evaluate(self, promise: str, timeout_s: float, code: str = "") -> Any:
        """A promise's value; ``app``, ``kernel`` and ``code`` are at hand. A promise that is not kept in time fails."""
        script = f"""async ([code, milliseconds]) => {{
            const app = window.jupyterapp, kernel = app.shell.currentWidget.sessionContext.session.kernel;
            const late = new Promise((_, fail) =>
                setTimeout(() => fail(new Error(`no answer in ${{milliseconds / 1000}} s`)), milliseconds));
            return await Promise.race([{promise}, late]);
        }}"""
        try:
            return self.page.evaluate(script, [code, 1000 * timeout_s])
        except Error as error:
            raise AssertionError(f"{self.name}: {error.message}") from None

    # ------------------------------------------------------------------------------------------------ the page

    def output(self, cell_text: str) -> Locator:
        """The outputs of the cell whose source holds this text."""
        return self.page.locator(".jp-CodeCell", has=self.page.locator(".jp-InputArea", has_text=cell_text)).locator(".jp-OutputArea").first

    def set_theme(self, theme: str) -> None:
        """``light`` or ``dark``; returns when the page has it."""
        self._evaluate(f"app.commands.execute('apputils:change-theme', {{theme: '{_THEMES[theme]}'}})", STEP_S)
        self.page.wait_for_function(f"() => document.body.dataset.jpThemeLight === '{str(theme == 'light').lower()}'")

    def screenshots(self, name: str, of: Locator | None = None) -> list[Path]:
        """``build/screenshots/<name>-light.png`` and ``-dark.png``, of an element or of the page."""
        found = []
        for theme in _THEMES:
            self.set_theme(theme)
            found.append(self.picture(f"{name}-{theme}", of))
        self.set_theme("light")
        return found

    def picture(self, name: str, of: Locator | None = None) -> Path:
        """One picture as it is now."""
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        path = SCREENSHOTS / f"{name}.png"
        try:
            (of or self.page).screenshot(path=path, animations="disabled")
        except Error as error:
            if of is not None:
                raise
            self.console.append(f"[no picture] {error}")
        return path

    def take_script_errors(self) -> list[str]:
        """Errors of this package's scripts that were not taken before."""
        found, self._script_errors = self._script_errors, []
        return found

    def _hear(self, message: ConsoleMessage) -> None:
        where = message.location.get("url", "")
        self.console.append(f"[{message.type}] {message.text} ({where})")
        if message.type == "error" and (where.startswith("blob:") or "anywidget" in message.text):
            self._script_errors.append(self.console[-1])

    def _hear_error(self, error: Error) -> None:
        self.console.append(f"[uncaught] {error.stack or error.message}")
        if "blob:" in self.console[-1] or "anywidget" in self.console[-1]:
            self._script_errors.append(self.console[-1])
