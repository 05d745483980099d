"""The CPU graph backend."""

from .arena import ArenaBlock, ArenaPool
from .backend import CpuGraphBackend
from .graph import CpuGraph

__all__ = ["ArenaBlock", "ArenaPool", "CpuGraph", "CpuGraphBackend"]
