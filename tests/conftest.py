"""Shared by all tests: one thread per process (they run in parallel), and the tiny checkpoint."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import settings

import vgraph_lab as vg
from vgraph_lab.qwen3_tts.decoder import Code2WavDecoder

torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported: kernels are then functions of CPU tensors
settings.register_profile("any", deadline=None)  # how long something takes is the machine's business
settings.register_profile("ci", deadline=None, derandomize=True)  # a run that fails must fail again; elsewhere, new examples each time
settings.load_profile("ci" if os.environ.get("CI") == "true" else "any")

TINY = Path(__file__).parent / "data" / "tiny-12hz"


@pytest.fixture(scope="session")
def tiny_folder() -> Path:
    """A small random checkpoint in the published layout, with golden vectors beside it."""
    return TINY


@pytest.fixture(scope="session")
def tiny_decoder() -> Code2WavDecoder:
    return vg.load_decoder(TINY)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """In CI a skipped test is a failure, unless it needs a GPU: CI has none."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("CI") != "true" or reporter is None:
        return
    forgotten = [report.nodeid for report in reporter.stats.get("skipped", []) if "cuda" not in report.keywords]
    if forgotten:
        reporter.write_line(f"CI runs every test that needs no GPU, but these were skipped: {', '.join(forgotten)}", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
