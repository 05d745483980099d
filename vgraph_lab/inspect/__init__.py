"""Tables and measures: what was captured, whether calls hit it, and whether it sounds the same."""

from .audio import EXACT, Tolerance, Verdict, WaveformDifference, tolerance_for, verdict, waveform_difference
from .coverage import coverage_summary, coverage_table
from .entries import entries_table
from .parity import Comparison, compare_with_eager, parity_table
from .request_life import RequestLife, play_request, state_table
from .stream_calls import calls_between
from .stream_parity import StreamComparison, chunk_differences, compare_streams
from .streaming_summary import StreamingSummary, summarise_streaming
from .summary import CaptureSummary, summarise
from .transitions import transition_table

__all__ = [
    "EXACT",
    "CaptureSummary",
    "Comparison",
    "RequestLife",
    "StreamComparison",
    "StreamingSummary",
    "Tolerance",
    "Verdict",
    "WaveformDifference",
    "calls_between",
    "chunk_differences",
    "compare_streams",
    "compare_with_eager",
    "coverage_summary",
    "coverage_table",
    "entries_table",
    "parity_table",
    "play_request",
    "state_table",
    "summarise",
    "summarise_streaming",
    "tolerance_for",
    "transition_table",
    "verdict",
    "waveform_difference",
]
