"""The shared suites on the CUDA backend."""

from contracts.backend import BackendContract
from contracts.lifecycle import LifecycleContract


class TestBackend(BackendContract):
    pass


class TestLifecycle(LifecycleContract):
    pass
