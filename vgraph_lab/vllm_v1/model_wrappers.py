"""Which wrappers a model gets, and which of them captures each shape at start-up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from .breakable import BreakableCUDAGraphWrapper
from .descriptor import BatchDescriptor
from .dispatcher import CudagraphDispatcher
from .modes import CUDAGraphMode
from .parallel import ParallelConfig
from .runner_config import RunnerConfig
from .ubatch import is_captured_in_ubatches
from .ubatch_wrapper import UBatchWrapper
from .wrapper import CUDAGraphOptions, CUDAGraphWrapper, Offloader
from .wrapper_graphs import WrapperGraphs

__all__ = ["EAGER_TARGET", "FULL_TARGET", "PIECEWISE_TARGET", "UBATCH_TARGET", "planned_graphs", "wrap_model"]

FULL_TARGET = "v1.full"
"""The wrapper of FULL graphs in tables. It is the outermost one, so that batches without a graph count there."""

UBATCH_TARGET = f"{FULL_TARGET}.ubatch"
"""FULL graphs of batches that are split."""

PIECEWISE_TARGET = "v1.piecewise"
"""The wrapper of breakable graphs in tables."""

EAGER_TARGET = "v1.eager"
"""Where batches count if there is no wrapper at all."""


def wrap_model(
    model: nn.Module,
    graphs: WrapperGraphs,
    config: RunnerConfig,
    parallel_config: ParallelConfig,
    modules: Sequence[nn.Module],
    static_tensors: Mapping[str, Tensor],
    offloader: Offloader | None,
    ubatch_options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """The wrappers that the mode needs, nested as in vLLM: FULL, or micro-batches, outside of PIECEWISE.

    Args:
        model: what to wrap.
        graphs: takes the wrappers.
        config: mode and options.
        parallel_config: whether batches are split.
        modules: others whose tensors the model reads in place: its KV cache.
        static_tensors: further tensors that it uses: its workspace.
        offloader: of its weights; not with micro-batches.
        ubatch_options: further arguments of ``UBatchWrapper``.
    """
    mode = config.mode
    shared: dict[str, Any] = {
        "cudagraph_options": CUDAGraphOptions(config.num_warmups, weak_ref_output=config.weak_ref_output, debug=config.debug),
        "modules": modules,
        "static_tensors": static_tensors,
    }
    wrapped: Callable[..., Any] = model
    if mode.has_piecewise_cudagraphs():
        wrapped = BreakableCUDAGraphWrapper(
            wrapped, graphs, CUDAGraphMode.PIECEWISE, target_id=PIECEWISE_TARGET, offloader=offloader, **shared
        )
    if parallel_config.use_ubatching:
        outer = CUDAGraphMode.FULL if mode.has_full_cudagraphs() else CUDAGraphMode.NONE
        return UBatchWrapper(wrapped, parallel_config, outer, graphs, target_id=FULL_TARGET, **shared, **(ubatch_options or {}))
    if mode.has_full_cudagraphs():
        wrapped = CUDAGraphWrapper(wrapped, CUDAGraphMode.FULL, graphs, target_id=FULL_TARGET, offloader=offloader, **shared)
    return wrapped


def planned_graphs(dispatcher: CudagraphDispatcher, parallel_config: ParallelConfig) -> list[tuple[str, BatchDescriptor]]:
    """What start-up captures, in order: PIECEWISE, then FULL, the largest first; each shape once.

    A shape that is large enough to be split is captured so, and otherwise whole. vLLM captures only decode shapes in micro-batches; here a
    mixed one is, too (mode FULL), since the graph finds out on the device where its requests are cut. One shape has one graph: in mode
    FULL, which does not tell decode from other batches, the threshold is that of the others.
    """
    return [(_target(mode, batch, parallel_config), batch) for mode, batches in dispatcher.get_capture_descs() for batch in batches]


def _target(mode: CUDAGraphMode, batch: BatchDescriptor, config: ParallelConfig) -> str:
    if mode is CUDAGraphMode.PIECEWISE:
        return PIECEWISE_TARGET
    return UBATCH_TARGET if is_captured_in_ubatches(config, batch) else FULL_TARGET
