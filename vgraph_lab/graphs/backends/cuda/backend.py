"""Capturing on a CUDA device, and putting everything back when a capture fails."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.cuda import _POOL_HANDLE

from vgraph_lab.errors import BackendError, CaptureError
from vgraph_lab.graphs.backends.audit import CaptureAudit, run_checked
from vgraph_lab.graphs.backends.base import BackendName, DeviceMemory, GraphPool
from vgraph_lab.graphs.backends.rules import capture_conditions

from .graph import CudaCapturedGraph
from .pool import CudaPool

__all__ = ["CUDA_ERRORS", "CudaGraphBackend", "clear_workspaces", "cuda_device", "driver_refusal", "end_capture"]

CUDA_ERRORS: tuple[type[BaseException], ...] = (torch.AcceleratorError, torch.OutOfMemoryError)
"""What torch raises where the driver, or the allocator, refuses."""


def cuda_device(device: str | torch.device = "cuda") -> torch.device:
    """A CUDA device with its index, if it is there.

    Raises:
        BackendError: no CUDA device, or not that one.
    """
    if not torch.cuda.is_available():
        raise BackendError("the cuda backend needs an NVIDIA GPU and a CUDA build of torch; neither is found here. Use backend 'cpu'.")
    wanted = torch.device(device)
    index = torch.cuda.current_device() if wanted.index is None else wanted.index
    if wanted.type != "cuda" or index >= torch.cuda.device_count():
        raise BackendError(f"{device} is not a CUDA device of this machine. Accepted: cuda:0 … cuda:{torch.cuda.device_count() - 1}.")
    return torch.device("cuda", index)


class CudaGraphBackend:
    """CUDA graphs on one device.

    Captures run on a side stream in thread-local error mode, so that other threads may go on using the device.

    **Workspaces.** cuBLAS needs scratch memory. torch allocates it at the first matrix product of a thread on a stream,
    keeps it for that pair, and every graph captured later by that thread on that stream has its address baked in. Where
    it comes from is an accident: from the pool of whichever graph was captured first, or from ordinary memory if an eager
    run came before. Either way one owner's end is every graph's end: the first graph's reset gives its pool away
    (https://github.com/vllm-project/vllm-omni/issues/6457), and whoever clears the workspaces (torch's compiler does, and
    newer versions of torch do when any graph is reset, https://github.com/pytorch/pytorch/issues/193402) takes the
    ordinary memory from under all of them.

    So each capture starts and ends without a workspace: it allocates its own, in its own pool, and leaves it there as free
    memory. That memory stays mapped while any graph of the pool lives; later graphs of the pool may use it, too, which is
    what sharing a pool means, and only one of them replays at a time. No reset and no clearing can take it away. The price:
    the workspace (32 MiB on Hopper) counts as memory of the pool, once.

    Args:
        device: ``cuda`` or ``cuda:N``.

    Attributes:
        stream: where warm-ups and captures run.

    Raises:
        BackendError: no CUDA device, or not that one.
    """

    name: BackendName = "cuda"

    def __init__(self, device: str | torch.device = "cuda") -> None:
        self.device = cuda_device(device)
        self.stream = torch.cuda.Stream(self.device)

    def create_pool(self) -> CudaPool:
        """A fresh pool. It takes no memory until the first capture."""
        return CudaPool(self.device)

    def warm_up(self, function: Callable[[], Any], *, static_inputs: Iterable[Tensor], owned: Iterable[Tensor], audit: bool) -> Any:
        """Run ``function`` eagerly on the capture stream; see :class:`~vgraph_lab.graphs.backends.base.GraphBackend`."""
        with torch.cuda.device(self.device):
            caller = torch.cuda.current_stream()
            self.stream.wait_stream(caller)
            with torch.cuda.stream(self.stream), capture_conditions():
                output = run_checked(function, CaptureAudit(static_inputs, owned)) if audit else function()
            caller.wait_stream(self.stream)
        return output

    def capture(
        self, function: Callable[[], Any], pool: GraphPool, *, static_inputs: Iterable[Tensor], owned: Iterable[Tensor]
    ) -> tuple[CudaCapturedGraph, Any]:
        """Capture ``function`` into ``pool``; see :class:`~vgraph_lab.graphs.backends.base.GraphBackend`.

        What the function reads is checked by an audited :meth:`warm_up`; the driver cannot tell.
        """
        if not isinstance(pool, CudaPool) or pool.device != self.device:
            raise CaptureError(f"the pool is not one of this backend ({self.device}). Use the one that create_pool() returned.")
        if self.is_capturing():
            raise CaptureError("this stream is being captured already; captures do not nest.")
        with torch.cuda.device(self.device):
            torch.cuda.synchronize()
            with torch.cuda.stream(self.stream), capture_conditions():
                handle = pool.acquire()
                graph, output, refusal = self._record(function, pool, handle)
            if graph is None:
                # Raised outside all handlers: a chained traceback would keep the failed capture's tensors alive.
                raise CaptureError(refusal)
            captured = CudaCapturedGraph(graph, pool, handle)
            try:
                graph.instantiate()
            except BaseException:
                captured.reset()
                raise
        return captured, output

    def _record(self, function: Callable[[], Any], pool: CudaPool, handle: _POOL_HANDLE) -> tuple[torch.cuda.CUDAGraph | None, Any, str]:
        """The graph and the output; or no graph and the reason, with everything unwound."""
        graph, output, refusal = torch.cuda.CUDAGraph(keep_graph=True), None, ""
        clear_workspaces()  # of the warm-ups: the graph must not refer to memory outside of its pool
        try:
            graph.capture_begin(pool=handle, capture_error_mode="thread_local")
            output = function()
            end_capture(graph)
        except CUDA_ERRORS as error:
            refusal = driver_refusal(error)
            del output
            self.unwind(graph, pool, handle)
        except BaseException:
            self.unwind(graph, pool, handle)
            raise
        else:
            clear_workspaces()  # else the next warm-up would run in the pool, and the pool could not be emptied
            return graph, output, refusal
        return None, None, refusal

    def unwind(self, graph: torch.cuda.CUDAGraph, pool: CudaPool, handle: _POOL_HANDLE) -> None:
        """Put back what a failed capture has changed; called on its stream. It matches the pool's ``acquire``.

        If the driver has invalidated the capture (the function synchronised behind torch's back) or refuses its end (work
        on another stream was not joined), torch 2.11 leaves its end half done: the allocator goes on recording into the
        pool, the pool keeps a reference, and the default generator believes that it is still captured. Each is undone here.
        The pinned-memory allocator's share cannot be undone from Python, so later captures go to a new handle
        (:meth:`CudaPool.abandon`).
        """
        is_valid = False
        with suppress(RuntimeError):  # torch has done the one half, the other follows
            if torch.cuda.is_current_stream_capturing():  # else its end, or its beginning, has failed already
                end_capture(graph)
                is_valid = True
        clear_workspaces()
        graph.reset()
        if is_valid:
            pool.release(handle)
            return
        pool.abandon(handle)
        torch._C._cuda_endAllocateToPool(self.device.index, handle)
        torch._C._cuda_releasePool(self.device.index, handle)
        healing = torch.cuda.CUDAGraph()  # a capture that ends well sets the generator free again
        healing.capture_begin(capture_error_mode="thread_local")
        torch.zeros(1, device=self.device)
        healing.capture_end()
        healing.reset()
        torch.cuda.empty_cache()

    def is_capturing(self) -> bool:
        """Whether the current stream of the device is being captured."""
        if torch.cuda.current_device() == self.device.index:
            return bool(torch.cuda.is_current_stream_capturing())
        with torch.cuda.device(self.device):
            return bool(torch.cuda.is_current_stream_capturing())

    def memory(self) -> DeviceMemory:
        """The driver's free and total bytes and the caching allocator's counts."""
        free, total = torch.cuda.mem_get_info(self.device)
        return DeviceMemory(free, total, torch.cuda.memory_allocated(self.device), torch.cuda.memory_reserved(self.device))

    def synchronize(self) -> None:
        """Wait for all work on the device."""
        torch.cuda.synchronize(self.device)

    def release_cached_memory(self) -> None:
        """Return cuBLAS workspaces and unused segments of the caching allocator to the driver."""
        with torch.cuda.device(self.device):
            torch.cuda.synchronize()  # a product that is still running may use its workspace
            clear_workspaces()
            torch.cuda.empty_cache()


def clear_workspaces() -> None:
    """Drop the cuBLAS workspaces of all threads and streams; each makes itself a new one when it needs it."""
    torch._C._cuda_clearCublasWorkspaces()


def end_capture(graph: torch.cuda.CUDAGraph) -> None:
    """End a capture. That a graph is empty is the caller's to judge; torch's warning of it has no place to point at."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
        graph.capture_end()


def driver_refusal(error: BaseException) -> str:
    """What one of :data:`CUDA_ERRORS` says, and the user's line, as the message of a ``CaptureError``."""
    return f"CUDA refused the capture: {str(error).splitlines()[0]}\n  at {_where(error)}"


def _where(error: BaseException) -> str:
    """The innermost line of an error's traceback that is neither torch's nor the graph framework's."""
    ours, theirs = str(Path(__file__).parents[2]), str(Path(torch.__file__).parent)
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((ours, theirs)):
            return f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}"
    return "an unknown line"
