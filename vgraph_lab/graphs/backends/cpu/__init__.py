"""The CPU graph backend."""

from .arena import ArenaPool
from .backend import CpuGraphBackend
from .graph import CpuGraph

__all__ = ["ArenaPool", "CpuGraph", "CpuGraphBackend"]
