"""The graph framework. It knows no model: Targets and Routines come from outside, graphs and policy live here."""

from .backends import choose_backend, create_backend
from .descriptor import Descriptor
from .entry import CaptureCost, GraphEntry, Rejection
from .generation import Retirement
from .manager import ManagerState, VocoderCUDAGraphManager
from .profile import MemoryProfile, ProfileLine
from .progress import CaptureProgress
from .report import CaptureOutcome, CaptureReport
from .routine import Buffers, Resolution, Routine
from .stats import CallKind, Recorder, StatsSink, StatsSnapshot
from .target import Target, VocoderGraphHandle

__all__ = [
    "Buffers",
    "CallKind",
    "CaptureCost",
    "CaptureOutcome",
    "CaptureProgress",
    "CaptureReport",
    "Descriptor",
    "GraphEntry",
    "ManagerState",
    "MemoryProfile",
    "ProfileLine",
    "Recorder",
    "Rejection",
    "Resolution",
    "Retirement",
    "Routine",
    "StatsSink",
    "StatsSnapshot",
    "Target",
    "VocoderCUDAGraphManager",
    "VocoderGraphHandle",
    "choose_backend",
    "create_backend",
]
