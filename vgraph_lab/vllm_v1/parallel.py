"""Data-parallel ranks and micro-batches: the settings of this path that concern more than one rank."""

from __future__ import annotations

from dataclasses import dataclass, fields

from vgraph_lab.errors import ConfigError

__all__ = ["ParallelConfig"]


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """The fields of ``vllm.config.ParallelConfig`` (0.25.1) that decide about micro-batches, with vLLM's defaults.

    Attributes:
        data_parallel_size: ranks that must agree on every step.
        data_parallel_rank: this one.
        enable_dbo: split batches in two ("dual batch overlap").
        ubatch_size: split batches into this many parts; 0 or 1: do not, unless ``enable_dbo`` does.
        dbo_decode_token_threshold: smallest uniform decode batch that is split, in tokens.
        dbo_prefill_token_threshold: smallest other batch that is split, in tokens.

    A shape has one FULL graph, whole or in micro-batches, and batches of the other kind run eager. In mode FULL, decode and other batches
    share their shapes, and the prefill threshold says how each is captured: so decode between the two thresholds runs eager there.
    FULL_DECODE_ONLY and FULL_AND_PIECEWISE have graphs of their own for decode. With any mode, a batch below its threshold runs eager if
    the shape that it is padded to reaches it.

    Raises:
        ConfigError: a setting is out of range, or micro-batches are on with a single rank.
    """

    data_parallel_size: int = 1
    data_parallel_rank: int = 0
    enable_dbo: bool = False
    ubatch_size: int = 0
    dbo_decode_token_threshold: int = 32
    dbo_prefill_token_threshold: int = 512

    def __post_init__(self) -> None:
        for name in (each.name for each in fields(self) if each.name != "enable_dbo"):
            value, least = getattr(self, name), int(name == "data_parallel_size")
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(f"{name}: must be a whole number from {least}, got {value!r}.")
        if self.data_parallel_rank >= self.data_parallel_size:
            raise ConfigError(
                f"data_parallel_rank: {self.data_parallel_rank} is not one of the {self.data_parallel_size} ranks, "
                f"which count from 0 to {self.data_parallel_size - 1}."
            )
        if self.enable_dbo and self.ubatch_size > 2:
            raise ConfigError(f"ubatch_size: {self.ubatch_size} with enable_dbo, which means two parts. Leave one of them out.")
        if self.use_ubatching and self.data_parallel_size == 1:
            raise ConfigError(
                f"{self.num_ubatches} micro-batches with data_parallel_size=1: they hide the exchange between data-parallel ranks behind "
                "computation, and one rank exchanges nothing. Use two ranks or more, or leave enable_dbo and ubatch_size out."
            )

    @property
    def use_ubatching(self) -> bool:
        """Whether batches may be split at all."""
        return self.enable_dbo or self.ubatch_size > 1

    @property
    def num_ubatches(self) -> int:
        """Into how many parts; 1 if they are not split."""
        return 2 if self.enable_dbo else max(self.ubatch_size, 1)
