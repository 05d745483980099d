"""The machine's memory."""

from __future__ import annotations

import os
from pathlib import Path

from vgraph_lab.errors import BackendError
from vgraph_lab.graphs.backends.base import DeviceMemory

__all__ = ["host_memory"]

_MEMINFO = Path("/proc/meminfo")


def host_memory() -> DeviceMemory:
    """Free and total bytes of the machine; torch's CPU allocator keeps no count of its own, so those fields are 0.

    Raises:
        BackendError: the system does not say.
    """
    if _MEMINFO.exists():  # MemAvailable counts the page cache as free, which sysconf does not
        kibibytes = {key: int(rest.split()[0]) for key, rest in (line.split(":", 1) for line in _MEMINFO.read_text().splitlines())}
        free, total = kibibytes["MemAvailable"] * 1024, kibibytes["MemTotal"] * 1024
        return DeviceMemory(free, total, allocated_bytes=0, reserved_bytes=0)
    try:
        page = os.sysconf("SC_PAGE_SIZE")
        free, total = os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page
    except (AttributeError, ValueError, OSError) as error:
        return _psutil_memory(error)
    return DeviceMemory(free, total, allocated_bytes=0, reserved_bytes=0)


def _psutil_memory(cause: Exception) -> DeviceMemory:
    try:
        import psutil  # type: ignore[import-untyped]  # ships no types
    except ImportError:
        raise BackendError("this system does not report its memory; install psutil, which can ask it: pip install psutil") from cause
    memory = psutil.virtual_memory()
    return DeviceMemory(memory.available, memory.total, allocated_bytes=0, reserved_bytes=0)
