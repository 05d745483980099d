"""The root-model path of vLLM v1, read at 0.25.1: graph modes, dispatch, wrappers, micro-batches.

Names are vLLM's, so that who knows one finds the other; where an argument or an error differs, its docstring says so.
"""

from .breakable import BreakableCUDAGraphCapture, BreakableCUDAGraphWrapper, eager_break_during_capture
from .capture_sizes import adjust_cudagraph_sizes_for_spec_decode, checked_capture_sizes, default_capture_sizes, get_captured_lora_counts
from .descriptor import BatchDescriptor
from .dispatcher import CudagraphDispatcher, DispatchCandidate, DispatchExplanation
from .dp import DPAgreement, DPProposal, coordinate_batch_across_dp, synchronize_dp_ranks
from .forward_context import (
    ForwardContext,
    get_forward_context,
    is_forward_context_available,
    override_forward_context,
    set_forward_context,
)
from .modes import CUDAGraphMode
from .monitor import cudagraph_capturing, set_cudagraph_capturing_enabled, validate_cudagraph_capturing_enabled
from .parallel import ParallelConfig
from .ubatch import (
    UBatchSlice,
    UBatchSlices,
    check_ubatch_thresholds,
    is_last_ubatch_empty,
    maybe_create_ubatch_slices,
)
from .wrapper import CUDAGraphOptions, CUDAGraphWrapper, Offloader, WrapperGraphs

__all__ = [
    "BatchDescriptor",
    "BreakableCUDAGraphCapture",
    "BreakableCUDAGraphWrapper",
    "CUDAGraphMode",
    "CUDAGraphOptions",
    "CUDAGraphWrapper",
    "CudagraphDispatcher",
    "DPAgreement",
    "DPProposal",
    "DispatchCandidate",
    "DispatchExplanation",
    "ForwardContext",
    "Offloader",
    "ParallelConfig",
    "UBatchSlice",
    "UBatchSlices",
    "WrapperGraphs",
    "adjust_cudagraph_sizes_for_spec_decode",
    "check_ubatch_thresholds",
    "checked_capture_sizes",
    "coordinate_batch_across_dp",
    "cudagraph_capturing",
    "default_capture_sizes",
    "eager_break_during_capture",
    "get_captured_lora_counts",
    "get_forward_context",
    "is_forward_context_available",
    "is_last_ubatch_empty",
    "maybe_create_ubatch_slices",
    "override_forward_context",
    "set_cudagraph_capturing_enabled",
    "set_forward_context",
    "synchronize_dp_ranks",
    "validate_cudagraph_capturing_enabled",
]
