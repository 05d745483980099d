"""What a person looks at: tables, plots, players, progress and panels. They take data, and hold no policy."""

from . import plots
from .capture_panel import CapturePanel
from .players import ABPair, ab_players
from .progress import capture_progress
from .style import Chart, chart
from .tables import show_table
from .transitions import transition_chart

__all__ = ["ABPair", "CapturePanel", "Chart", "ab_players", "capture_progress", "chart", "plots", "show_table", "transition_chart"]
