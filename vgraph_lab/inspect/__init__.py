"""Tables and measures: what was captured, whether calls hit it, and whether it sounds the same."""

from .audio import EXACT, Tolerance, Verdict, WaveformDifference, tolerance_for, verdict, waveform_difference
from .coverage import coverage_summary, coverage_table
from .entries import entries_table
from .parity import Comparison, compare_with_eager, parity_table
from .summary import CaptureSummary, summarise

__all__ = [
    "EXACT",
    "CaptureSummary",
    "Comparison",
    "Tolerance",
    "Verdict",
    "WaveformDifference",
    "compare_with_eager",
    "coverage_summary",
    "coverage_table",
    "entries_table",
    "parity_table",
    "summarise",
    "tolerance_for",
    "verdict",
    "waveform_difference",
]
