"""A Manager keeps what its capture reported, and what the device held when it began."""

from __future__ import annotations

import pytest
from contracts.toy import toy_target

from vgraph_lab.config import VocoderGraphSettings
from vgraph_lab.errors import LifecycleError
from vgraph_lab.graphs import CaptureProgress, Descriptor, VocoderCUDAGraphManager
from vgraph_lab.graphs.backends.base import DeviceMemory
from vgraph_lab.graphs.backends.cpu import CpuGraphBackend

SMALL, LARGE = Descriptor(1, 4), Descriptor(2, 8)


class CountingBackend(CpuGraphBackend):
    """Its n-th reading has n free bytes, so that every reading tells when it was taken."""

    def __init__(self) -> None:
        super().__init__()
        self.readings = 0

    def memory(self) -> DeviceMemory:
        self.readings += 1
        return DeviceMemory(self.readings, 1000, 0, 0)


def manager_on(backend: CpuGraphBackend, **settings: object) -> VocoderCUDAGraphManager:
    target = toy_target("cpu", SMALL, LARGE, is_capturing=backend.is_capturing)
    return VocoderCUDAGraphManager(backend, [target], VocoderGraphSettings.from_dict(settings))


def test_before_a_capture_there_is_neither(cpu_backend):
    manager = manager_on(cpu_backend)
    manager.profile_memory()
    assert manager.report is None
    assert manager.memory_before is None


def test_both_are_kept_and_outlive_clear():
    manager = manager_on(CountingBackend())
    report = manager.capture()
    before = manager.memory_before
    assert manager.report is report
    manager.clear()
    assert manager.report is report
    assert manager.memory_before is before
    assert report.captured == 2


def test_the_device_is_read_before_anything_is_captured():
    backend = CountingBackend()
    manager = manager_on(backend)
    seen: list[int] = []

    def look(progress: CaptureProgress) -> None:
        seen.append(backend.readings)

    report = manager.capture(look)
    assert manager.memory_before == DeviceMemory(1, 1000, 0, 0)
    assert seen[0] == 1, "the first Descriptor comes after the reading"
    assert report.free_bytes > 1


def test_a_capture_that_is_rolled_back_leaves_no_report(cpu_backend):
    manager = manager_on(cpu_backend)

    def abort(progress: CaptureProgress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        manager.capture(abort)
    assert manager.report is None


def test_a_capture_that_is_refused_changes_nothing():
    manager = manager_on(CountingBackend())
    report, before = manager.capture(), manager.memory_before
    with pytest.raises(LifecycleError, match="capture"):
        manager.capture()
    assert (manager.report, manager.memory_before) == (report, before)
    manager.clear()


def test_notes_of_routines_are_in_the_report(cpu_backend, monkeypatch):
    manager = manager_on(cpu_backend)
    routine = manager.targets["toy.main"].routine
    monkeypatch.setattr(type(routine), "notes", lambda self: ["first note", "second note"], raising=False)
    report = manager.capture()
    assert report.notes == ("first note", "second note")
    assert str(report).splitlines()[-2:] == ["first note", "second note"]


def test_notes_that_raise_roll_the_capture_back(cpu_backend, monkeypatch):
    def failing(self):
        raise ValueError("no note")

    manager = manager_on(cpu_backend)
    target = manager.targets["toy.main"]
    monkeypatch.setattr(type(target.routine), "notes", failing, raising=False)
    with pytest.raises(ValueError, match="no note"):
        manager.capture()
    assert (manager.report, manager.entries(), target.is_bound, manager.pool.reserved_bytes) == (None, [], False, 0)
