"""The graph modes of vLLM v1: what is captured, and for which batches."""

from __future__ import annotations

from enum import Enum

from vgraph_lab.errors import ConfigError, did_you_mean

__all__ = ["CUDAGraphMode"]


class CUDAGraphMode(Enum):
    """How batches meet graphs. Names and values are those of ``vllm.config.CUDAGraphMode`` (0.25.1).

    The first three are also runtime modes: what one batch runs as. The last two are pairs of runtime modes, one for
    uniform decode batches and one for all others ("mixed"); each pair needs a routine of its own for either kind.
    """

    NONE = 0  # eager
    PIECEWISE = 1  # graphs between the attention operations, which stay eager; any number of requests
    FULL = 2  # one graph for the whole step, attention included; a fixed number of requests
    FULL_DECODE_ONLY = (2, 0)  # FULL for uniform decode, eager otherwise
    FULL_AND_PIECEWISE = (2, 1)  # FULL for uniform decode, PIECEWISE otherwise

    @classmethod
    def parse(cls, name: str) -> CUDAGraphMode:
        """The mode of that name, in upper or lower case.

        Raises:
            ConfigError: there is none; names the nearest.
        """
        if isinstance(name, str) and name.upper() in cls.__members__:
            return cls[name.upper()]
        hint = did_you_mean(name.upper(), cls.__members__) if isinstance(name, str) else ""
        raise ConfigError(f"cudagraph_mode: {name!r} is no graph mode.{hint} Accepted: {', '.join(cls.__members__)}.")

    def separate_routine(self) -> bool:
        """Whether uniform decode batches and mixed ones run in different modes."""
        return isinstance(self.value, tuple)

    def decode_mode(self) -> CUDAGraphMode:
        """The runtime mode of uniform decode batches."""
        return CUDAGraphMode(self._pair[0])

    def mixed_mode(self) -> CUDAGraphMode:
        """The runtime mode of all other batches: prefill, and prefill with decode."""
        return CUDAGraphMode(self._pair[1])

    def has_mode(self, mode: CUDAGraphMode) -> bool:
        """Whether some batch may run in a runtime mode.

        Raises:
            ConfigError: ``mode`` is not a runtime mode.
        """
        if not mode.is_valid_runtime_mode():
            raise ConfigError(f"has_mode asks for a runtime mode, not for the pair {mode}. Accepted: NONE, PIECEWISE, FULL.")
        return mode.value in self._pair

    def requires_piecewise_compilation(self) -> bool:
        """Whether the model must be split at its attention operations."""
        return self.has_mode(CUDAGraphMode.PIECEWISE)

    def max_cudagraph_mode(self) -> CUDAGraphMode:
        """The larger of the two runtime modes: NONE < PIECEWISE < FULL."""
        return CUDAGraphMode(max(self._pair))

    def has_full_cudagraphs(self) -> bool:
        """Whether some batch may run as one graph."""
        return self.max_cudagraph_mode() is CUDAGraphMode.FULL

    def has_piecewise_cudagraphs(self) -> bool:
        """Whether some batch may run as graphs between eager operations."""
        return self.requires_piecewise_compilation()

    @classmethod
    def valid_runtime_modes(cls) -> frozenset[CUDAGraphMode]:
        """What one batch can run as: NONE, PIECEWISE, FULL."""
        return frozenset({cls.NONE, cls.PIECEWISE, cls.FULL})

    def is_valid_runtime_mode(self) -> bool:
        """Whether one batch can run as this."""
        return not self.separate_routine()

    @property
    def _pair(self) -> tuple[int, int]:
        return self.value if isinstance(self.value, tuple) else (self.value, self.value)

    def __str__(self) -> str:
        return self.name

    def __bool__(self) -> bool:
        return self is not CUDAGraphMode.NONE
