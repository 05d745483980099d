"""Graphs on an NVIDIA GPU: ``torch.cuda.CUDAGraph``, one private allocator pool per Manager."""

from .backend import CudaGraphBackend, cuda_device
from .pool import StreamOrderedLock, allocator_segments

__all__ = ["CudaGraphBackend", "StreamOrderedLock", "allocator_segments", "cuda_device"]
