"""Tables and measures: what was captured, whether calls hit it, and whether it sounds the same."""

from .anatomy import Anatomy, anatomy
from .anatomy_diff import AnatomyDiff, anatomy_diff
from .audio import EXACT, Tolerance, Verdict, WaveformDifference, tolerance_for, verdict, waveform_difference
from .coverage import Drift, coverage_summary, coverage_table, drift, uncovered_shapes
from .entries import entries_table
from .ledger import estimate_table, ledger_table
from .listening.abx import ABXResult, ABXTest, ABXTrial
from .listening.audio_set import AudioSet
from .listening.binomial import trials_needed
from .listening.filters import with_anchor
from .listening.limits import ListeningLimits, limits_for
from .listening.mushra import MushraResult, MushraTest
from .listening.seams import seam_table
from .listening.table import audio_set_of, listening_table
from .parity import Comparison, compare_with_eager, parity_table
from .recording import Recording, read_memory, record
from .records import CaptureFigures, MemoryReading
from .request_life import RequestLife, play_request, state_table
from .segments import segments_table
from .stream_calls import calls_between
from .stream_parity import StreamComparison, chunk_differences, compare_streams
from .streaming_summary import StreamingSummary, summarise_streaming
from .summary import CaptureSummary, summarise
from .timeline import Timeline, timeline_table
from .transitions import transition_table

__all__ = [
    "EXACT",
    "ABXResult",
    "ABXTest",
    "ABXTrial",
    "Anatomy",
    "AnatomyDiff",
    "AudioSet",
    "CaptureFigures",
    "CaptureSummary",
    "Comparison",
    "Drift",
    "ListeningLimits",
    "MemoryReading",
    "MushraResult",
    "MushraTest",
    "Recording",
    "RequestLife",
    "StreamComparison",
    "StreamingSummary",
    "Timeline",
    "Tolerance",
    "Verdict",
    "WaveformDifference",
    "anatomy",
    "anatomy_diff",
    "audio_set_of",
    "calls_between",
    "chunk_differences",
    "compare_streams",
    "compare_with_eager",
    "coverage_summary",
    "coverage_table",
    "drift",
    "entries_table",
    "estimate_table",
    "ledger_table",
    "limits_for",
    "listening_table",
    "parity_table",
    "play_request",
    "read_memory",
    "record",
    "seam_table",
    "segments_table",
    "state_table",
    "summarise",
    "summarise_streaming",
    "timeline_table",
    "tolerance_for",
    "transition_table",
    "trials_needed",
    "uncovered_shapes",
    "verdict",
    "waveform_difference",
    "with_anchor",
]
