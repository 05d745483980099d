"""The root-model path of vLLM v1, read at 0.25.1: graph modes, dispatch, wrappers, micro-batches.

Names are vLLM's, so that who knows one finds the other; where an argument or an error differs, its docstring says so.
"""

from .breakable import BreakableCUDAGraphCapture, BreakableCUDAGraphWrapper, eager_break_during_capture
from .capture_sizes import adjust_cudagraph_sizes_for_spec_decode, checked_capture_sizes, default_capture_sizes, get_captured_lora_counts
from .descriptor import BatchDescriptor
from .dispatcher import CudagraphDispatcher, DispatchCandidate, DispatchExplanation
from .dp import DPAgreement, DPProposal, coordinate_batch_across_dp, synchronize_dp_ranks
from .execution import (
    BatchExecution,
    CUDAGraphStat,
    ExecutionExplanation,
    determine_batch_execution_and_padding,
    explain_batch_execution,
)
from .forward_context import (
    ForwardContext,
    get_forward_context,
    is_forward_context_available,
    override_forward_context,
    set_forward_context,
)
from .input_batch import ScheduledRequest
from .loaded_model import LoadedModel, SupportsVllmV1, supports_vllm_v1
from .model_runner import GPUModelRunner
from .modes import CUDAGraphMode
from .moe import ExpertExchange
from .monitor import cudagraph_capturing, set_cudagraph_capturing_enabled, validate_cudagraph_capturing_enabled
from .offloader import PrefetchOffloader
from .outputs import ModelRunnerOutput
from .paged_kv import AttentionMetadata, KVCache, split_attn_metadata
from .parallel import ParallelConfig
from .parity import ParityReport, StepParity, check_parity
from .runner_config import RunnerConfig
from .sm_control import SMControlContextManager, torch_compute_sms
from .ubatch import (
    UBatchSlice,
    UBatchSlices,
    check_ubatch_thresholds,
    is_last_ubatch_empty,
    maybe_create_ubatch_slices,
)
from .ubatch_trace import UBatchSpan, UBatchTrace, overlap_s
from .ubatch_wrapper import UBatchWrapper
from .ubatching import (
    UBatchContext,
    dbo_current_ubatch_id,
    dbo_enabled,
    dbo_get_previous_event,
    dbo_maybe_run_recv_hook,
    dbo_num_ubatches,
    dbo_register_recv_hook,
    dbo_span,
    dbo_switch_to_comm,
    dbo_switch_to_comm_sync,
    dbo_switch_to_compute,
    dbo_switch_to_compute_sync,
    dbo_yield,
    dbo_yield_and_switch_from_comm_to_compute,
    dbo_yield_and_switch_from_compute_to_comm,
    make_ubatch_contexts,
)
from .weak_ref import weak_ref_tensor, weak_ref_tensors
from .workload_model import WorkloadConfig, WorkloadModel
from .workspace import WorkspaceManager
from .wrapper import CUDAGraphOptions, CUDAGraphWrapper, Offloader
from .wrapper_graphs import WrapperGraphs

__all__ = [
    "AttentionMetadata",
    "BatchDescriptor",
    "BatchExecution",
    "BreakableCUDAGraphCapture",
    "BreakableCUDAGraphWrapper",
    "CUDAGraphMode",
    "CUDAGraphOptions",
    "CUDAGraphStat",
    "CUDAGraphWrapper",
    "CudagraphDispatcher",
    "DPAgreement",
    "DPProposal",
    "DispatchCandidate",
    "DispatchExplanation",
    "ExecutionExplanation",
    "ExpertExchange",
    "ForwardContext",
    "GPUModelRunner",
    "KVCache",
    "LoadedModel",
    "ModelRunnerOutput",
    "Offloader",
    "ParallelConfig",
    "ParityReport",
    "PrefetchOffloader",
    "RunnerConfig",
    "SMControlContextManager",
    "ScheduledRequest",
    "StepParity",
    "SupportsVllmV1",
    "UBatchContext",
    "UBatchSlice",
    "UBatchSlices",
    "UBatchSpan",
    "UBatchTrace",
    "UBatchWrapper",
    "WorkloadConfig",
    "WorkloadModel",
    "WorkspaceManager",
    "WrapperGraphs",
    "adjust_cudagraph_sizes_for_spec_decode",
    "check_parity",
    "check_ubatch_thresholds",
    "checked_capture_sizes",
    "coordinate_batch_across_dp",
    "cudagraph_capturing",
    "dbo_current_ubatch_id",
    "dbo_enabled",
    "dbo_get_previous_event",
    "dbo_maybe_run_recv_hook",
    "dbo_num_ubatches",
    "dbo_register_recv_hook",
    "dbo_span",
    "dbo_switch_to_comm",
    "dbo_switch_to_comm_sync",
    "dbo_switch_to_compute",
    "dbo_switch_to_compute_sync",
    "dbo_yield",
    "dbo_yield_and_switch_from_comm_to_compute",
    "dbo_yield_and_switch_from_compute_to_comm",
    "default_capture_sizes",
    "determine_batch_execution_and_padding",
    "eager_break_during_capture",
    "explain_batch_execution",
    "get_captured_lora_counts",
    "get_forward_context",
    "is_forward_context_available",
    "is_last_ubatch_empty",
    "make_ubatch_contexts",
    "maybe_create_ubatch_slices",
    "overlap_s",
    "override_forward_context",
    "set_cudagraph_capturing_enabled",
    "set_forward_context",
    "split_attn_metadata",
    "supports_vllm_v1",
    "synchronize_dp_ranks",
    "torch_compute_sms",
    "validate_cudagraph_capturing_enabled",
    "weak_ref_tensor",
    "weak_ref_tensors",
]
