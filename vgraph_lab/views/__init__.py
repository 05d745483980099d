"""What a person looks at: tables, plots, players, progress and panels. They take data, and hold no policy."""

from . import plots
from .ab_player import ABPlayer
from .blind_test import BlindTest
from .capture_explorer import CaptureExplorer
from .capture_panel import CapturePanel
from .coverage_picker import CoverageMap
from .players import ABPair, ab_players, static_players
from .progress import capture_progress
from .style import Chart, chart
from .tables import show_table
from .transitions import transition_chart

__all__ = [
    "ABPair",
    "ABPlayer",
    "BlindTest",
    "CaptureExplorer",
    "CapturePanel",
    "Chart",
    "CoverageMap",
    "ab_players",
    "capture_progress",
    "chart",
    "plots",
    "show_table",
    "static_players",
    "transition_chart",
]
