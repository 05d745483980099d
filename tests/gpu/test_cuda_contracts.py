"""The shared suites on the CUDA backend."""

from contracts.backend import BackendContract
from contracts.generation import GenerationContract
from contracts.lifecycle import LifecycleContract
from contracts.profile import ProfileContract


class TestBackend(BackendContract):
    pass


class TestLifecycle(LifecycleContract):
    pass


class TestGeneration(GenerationContract):
    pass


class TestProfile(ProfileContract):
    pass
