"""Tables and measures: what was captured, whether calls hit it, and whether it sounds the same."""

from .anatomy import Anatomy, anatomy
from .audio import EXACT, Tolerance, Verdict, WaveformDifference, tolerance_for, verdict, waveform_difference
from .coverage import Drift, coverage_summary, coverage_table, drift, uncovered_shapes
from .entries import entries_table
from .ledger import estimate_table, ledger_table
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
    "Anatomy",
    "CaptureFigures",
    "CaptureSummary",
    "Comparison",
    "Drift",
    "MemoryReading",
    "Recording",
    "RequestLife",
    "StreamComparison",
    "StreamingSummary",
    "Timeline",
    "Tolerance",
    "Verdict",
    "WaveformDifference",
    "anatomy",
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
    "parity_table",
    "play_request",
    "read_memory",
    "record",
    "segments_table",
    "state_table",
    "summarise",
    "summarise_streaming",
    "timeline_table",
    "tolerance_for",
    "transition_table",
    "uncovered_shapes",
    "verdict",
    "waveform_difference",
]
