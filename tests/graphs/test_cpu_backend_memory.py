"""The machine's memory, on systems that report it in different ways."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from vgraph_lab.errors import BackendError
from vgraph_lab.graphs.backends.cpu import CpuGraphBackend, host_memory


def test_every_source_reports_the_same_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    first = CpuGraphBackend().memory()
    assert first.total_bytes == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < first.free_bytes <= first.total_bytes
    assert (first.allocated_bytes, first.reserved_bytes) == (0, 0)
    monkeypatch.setattr(host_memory, "_MEMINFO", Path("/nowhere/meminfo"))
    second = CpuGraphBackend().memory()
    assert second.total_bytes == first.total_bytes
    assert 0 < second.free_bytes <= second.total_bytes


def _no_sysconf(name: str) -> int:
    raise ValueError(f"unrecognized configuration name {name}")


def test_psutil_is_asked_last_and_its_absence_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "_MEMINFO", Path("/nowhere/meminfo"))
    monkeypatch.setattr(os, "sysconf", _no_sysconf)
    monkeypatch.setitem(sys.modules, "psutil", SimpleNamespace(virtual_memory=lambda: SimpleNamespace(available=3, total=5)))
    memory = CpuGraphBackend().memory()
    assert (memory.free_bytes, memory.total_bytes) == (3, 5)
    monkeypatch.setitem(sys.modules, "psutil", None)
    with pytest.raises(BackendError, match="pip install psutil"):
        CpuGraphBackend().memory()
