"""The settings of this path's runner: what the scheduler may ask for, the KV cache, and which graphs there are."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, PlainSerializer, PositiveInt

from vgraph_lab.config.validation import Settings, as_tuple
from vgraph_lab.errors import ConfigError

from .capture_sizes import adjust_cudagraph_sizes_for_spec_decode, checked_capture_sizes, default_capture_sizes
from .dispatcher import CudagraphDispatcher
from .modes import CUDAGraphMode

__all__ = ["RunnerConfig"]


def _mode(value: object) -> object:
    return CUDAGraphMode.parse(value) if isinstance(value, str) else value


class RunnerConfig(Settings):
    """Names are those of vLLM's settings (0.25.1), from all of its sections.

    Attributes:
        cudagraph_mode: one of the five, as such or by name.
        enforce_eager: no graphs, whatever the mode says.
        cudagraph_capture_sizes: tokens of each graph; None for vLLM's own. Their order says nothing.
        max_num_seqs: requests that may be live.
        max_num_batched_tokens: tokens of a batch at most.
        num_speculative_tokens: of each decode step, beside the one that is certain.
        block_size: tokens of a KV cache block.
        num_blocks: blocks of the KV cache; None for as many as ``max_num_seqs`` requests of full length need.
        num_warmups: eager runs before each capture.
        weak_ref_output: let later graphs have the memory of a graph's output, which is read before they run.
        debug: check addresses at each replay.
    """

    cudagraph_mode: Annotated[CUDAGraphMode, BeforeValidator(_mode), PlainSerializer(str)] = CUDAGraphMode.FULL_AND_PIECEWISE
    enforce_eager: bool = False
    cudagraph_capture_sizes: Annotated[tuple[int, ...] | None, BeforeValidator(as_tuple)] = None
    max_num_seqs: PositiveInt = 8
    max_num_batched_tokens: PositiveInt = 64
    num_speculative_tokens: int = 0
    block_size: PositiveInt = 16
    num_blocks: PositiveInt | None = None
    num_warmups: int = 1
    weak_ref_output: bool = True
    debug: bool = False

    @property
    def mode(self) -> CUDAGraphMode:
        """``cudagraph_mode``, or NONE with ``enforce_eager``."""
        return CUDAGraphMode.NONE if self.enforce_eager else self.cudagraph_mode

    @property
    def uniform_decode_query_len(self) -> int:
        """Tokens of each request in a decode step."""
        return 1 + self.num_speculative_tokens

    def capture_sizes(self) -> list[int]:
        """The sizes that get graphs, ascending; none with mode NONE.

        Raises:
            ConfigError: configured ones are below 1, repeated, or beyond ``max_num_batched_tokens``.
        """
        query_len, most = self.uniform_decode_query_len, self.max_num_batched_tokens
        if self.cudagraph_capture_sizes is not None:
            sizes = checked_capture_sizes(self.cudagraph_capture_sizes, max_num_batched_tokens=most)
        else:
            sizes = default_capture_sizes(self.max_num_seqs, most, uniform_decode_query_len=query_len)
        if not self.mode:
            return []
        has_decode_graphs = self.mode.decode_mode() is CUDAGraphMode.FULL and self.mode.separate_routine()
        return adjust_cudagraph_sizes_for_spec_decode(sizes, query_len) if has_decode_graphs else sizes

    def dispatcher(self) -> CudagraphDispatcher:
        """The dispatcher of these settings.

        Raises:
            ConfigError: see :meth:`capture_sizes`.
        """
        return CudagraphDispatcher(
            self.mode,
            self.capture_sizes(),
            max_num_seqs=self.max_num_seqs,
            uniform_decode_query_len=self.uniform_decode_query_len,
            max_num_batched_tokens=self.max_num_batched_tokens,
        )

    def check(self, max_model_len: int) -> None:
        """Refuse what does not go with a model.

        Raises:
            ConfigError: a batch of ``max_num_batched_tokens`` could not exist, or numbers are negative.
        """
        if self.num_speculative_tokens < 0 or self.num_warmups < 0:
            raise ConfigError(
                f"num_speculative_tokens and num_warmups: must be 0 or more, got {self.num_speculative_tokens} and {self.num_warmups}."
            )
        if self.max_num_batched_tokens > self.max_num_seqs * max_model_len:
            raise ConfigError(
                f"max_num_batched_tokens: {self.max_num_batched_tokens} tokens never meet, {self.max_num_seqs} requests (max_num_seqs) "
                f"of {max_model_len} tokens (max_model_len) have {self.max_num_seqs * max_model_len}."
            )
