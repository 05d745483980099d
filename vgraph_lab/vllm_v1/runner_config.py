"""The settings of this path's runner: what the scheduler may ask for, the KV cache, and which graphs there are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from annotated_types import Ge
from numpy.typing import NDArray
from pydantic import AfterValidator, BeforeValidator, PlainSerializer, PositiveInt, ValidationError

from vgraph_lab.config.validation import Settings, as_tuple, config_error
from vgraph_lab.errors import ConfigError, InputError

from .capture_sizes import adjust_cudagraph_sizes_for_spec_decode, checked_capture_sizes, default_capture_sizes
from .dispatcher import CudagraphDispatcher
from .modes import CUDAGraphMode

__all__ = ["RunnerConfig"]


def _mode(value: object) -> object:
    return CUDAGraphMode.parse(value) if isinstance(value, str) else value


def _sizes(sizes: tuple[int, ...] | None) -> tuple[int, ...] | None:
    if sizes is not None:
        checked_capture_sizes(sizes)
    return sizes


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

    With micro-batches, mode FULL runs decode eager between the two thresholds: see :class:`~vgraph_lab.vllm_v1.ParallelConfig`.

    Raises:
        ConfigError: a setting is unknown, malformed or out of range; names all that are.
    """

    cudagraph_mode: Annotated[CUDAGraphMode, BeforeValidator(_mode), PlainSerializer(str)] = CUDAGraphMode.FULL_AND_PIECEWISE
    enforce_eager: bool = False
    cudagraph_capture_sizes: Annotated[tuple[int, ...] | None, BeforeValidator(as_tuple), AfterValidator(_sizes)] = None
    max_num_seqs: PositiveInt = 8
    max_num_batched_tokens: PositiveInt = 64
    num_speculative_tokens: Annotated[int, Ge(0)] = 0
    block_size: PositiveInt = 16
    num_blocks: PositiveInt | None = None
    num_warmups: Annotated[int, Ge(0)] = 1
    weak_ref_output: bool = True
    debug: bool = False

    if not TYPE_CHECKING:  # so that type checkers see the fields

        def __init__(self, **settings: Any) -> None:
            try:
                super().__init__(**settings)
            except ValidationError as error:
                raise config_error(error, type(self)) from None

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

    def checked_lens(self, num_scheduled_tokens: Sequence[int]) -> NDArray[np.int64]:
        """Tokens of each request of a batch, if there can be such a batch [num_reqs].

        Raises:
            InputError: a number is not a whole one from 1; there is no request, or more of them or of their tokens than a batch may have.
        """
        given: Any = num_scheduled_tokens
        lens = given.tolist() if isinstance(given, np.ndarray) else given
        if not isinstance(lens, list | tuple) or not lens:
            raise InputError(f"a batch is a list with the tokens of each request, of one at least; got {given!r}.")
        for each in lens:
            if not isinstance(each, int | np.integer) or isinstance(each, bool) or each < 1:
                raise InputError(f"each request of a batch has a whole number of tokens from 1, got {each!r} in {given!r}.")
        if len(lens) > self.max_num_seqs or sum(lens) > self.max_num_batched_tokens:
            raise InputError(
                f"{len(lens)} requests with {sum(lens)} tokens do not run in one step: max_num_seqs is {self.max_num_seqs}, "
                f"max_num_batched_tokens {self.max_num_batched_tokens}."
            )
        return np.asarray(lens, np.int64)

    def check(self, max_model_len: int) -> None:
        """Refuse what does not go with a model.

        Raises:
            ConfigError: a batch of ``max_num_batched_tokens`` could not exist.
        """
        if self.max_num_batched_tokens > self.max_num_seqs * max_model_len:
            raise ConfigError(
                f"max_num_batched_tokens: {self.max_num_batched_tokens} tokens never meet, {self.max_num_seqs} requests (max_num_seqs) "
                f"of {max_model_len} tokens (max_model_len) have {self.max_num_seqs * max_model_len}."
            )
