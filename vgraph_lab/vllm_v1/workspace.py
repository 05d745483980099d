"""Scratch memory that all layers share: it grows while shapes are still being found out, and not afterwards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod

import torch
from torch import Tensor

from vgraph_lab.errors import InputError, LifecycleError
from vgraph_lab.graphs.backends import is_capturing

__all__ = ["WorkspaceManager"]

_ALIGNMENT_BYTES = 256


class WorkspaceManager:
    """One buffer per micro-batch, all of one size. Each caller gets the beginning: nothing in it outlives the caller's own use.

    Counterpart of ``vllm.v1.worker.workspace.WorkspaceManager`` (0.25.1). A graph has the buffer's address baked in, so the
    buffer must have its final size when captures begin: run the largest batch first. Growing inside a capture is refused, since
    the new memory would belong to that graph; growing after :meth:`lock` is refused, since captured graphs would go on using the
    old memory beside the new.

    Args:
        device: where.
        num_ubatches: buffers; micro-batches run at the same time and must not share one.
        current_ubatch: which of them the calling thread uses.
    """

    def __init__(self, device: torch.device, *, num_ubatches: int = 1, current_ubatch: Callable[[], int] = lambda: 0) -> None:
        self.device = device
        self._buffers = self._allocate(0, num_ubatches)
        self.current_ubatch = current_ubatch
        self._is_locked = False

    @property
    def nbytes(self) -> int:
        """Bytes reserved, of all micro-batches together."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def tensors(self) -> Mapping[str, Tensor]:
        """The buffers of now by name, as graphs know them. Those that are still empty are left out."""
        return {f"workspace[{number}]": buffer for number, buffer in enumerate(self._buffers) if buffer.nbytes}

    def divide(self, num_ubatches: int, current_ubatch: Callable[[], int]) -> None:
        """Have a buffer for each of so many micro-batches from now on; arguments are the constructor's.

        Raises:
            LifecycleError: the workspace is locked.
        """
        if self._is_locked:
            raise LifecycleError("the workspace is locked, captured graphs have its address. Divide it before the captures.")
        size = max(buffer.nbytes for buffer in self._buffers)
        self._buffers = self._allocate(size, num_ubatches)
        self.current_ubatch = current_ubatch

    def is_locked(self) -> bool:
        """Whether it grows no more."""
        return self._is_locked

    def lock(self) -> None:
        """Refuse to grow from now on. Call it after the captures."""
        self._is_locked = True

    def unlock(self) -> None:
        """Allow it to grow again: the graphs are gone."""
        self._is_locked = False

    def get_simultaneous(self, *shapes_and_dtypes: tuple[tuple[int, ...], torch.dtype]) -> list[Tensor]:
        """Tensors that do not overlap, with unknown content, for use until the next call.

        Args:
            shapes_and_dtypes: of each.

        Raises:
            InputError: a size is negative.
            LifecycleError: they need more than is reserved, and the workspace is locked, or a capture is under way.
        """
        if any(size < 0 for shape, _ in shapes_and_dtypes for size in shape):
            raise InputError(f"sizes of a workspace are 0 or more, got {[shape for shape, _ in shapes_and_dtypes]}.")
        begins, end = [], 0
        for shape, dtype in shapes_and_dtypes:
            begins.append(end)
            end += -(-prod(shape) * dtype.itemsize // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        buffer = self._at_least(end)
        return [
            buffer[begin : begin + prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for begin, (shape, dtype) in zip(begins, shapes_and_dtypes, strict=True)
        ]

    def _at_least(self, nbytes: int) -> Tensor:
        number = self.current_ubatch()
        buffer = self._buffers[number]
        if buffer.nbytes >= nbytes:
            return buffer
        told = f"{nbytes:,} bytes of workspace are asked for, {buffer.nbytes:,} are reserved"
        if self._is_locked:
            raise LifecycleError(
                f"{told}, and it is locked: captured graphs have its address. Run the largest batch before the captures "
                "(the runner's profile_run does), or lower max_num_batched_tokens."
            )
        if is_capturing():
            raise LifecycleError(
                f"{told}, and it cannot grow inside a capture: the memory would belong to that graph. "
                "Run a batch of this size eagerly before the captures."
            )
        # All of them grow: a batch that is whole before the captures may be split afterwards.
        self._buffers = self._allocate(nbytes, len(self._buffers))
        return self._buffers[number]

    def _allocate(self, nbytes: int, count: int) -> list[Tensor]:
        with torch.inference_mode(mode=False):  # they are written in and outside of that mode
            return [torch.empty(nbytes, dtype=torch.uint8, device=self.device) for _ in range(count)]
