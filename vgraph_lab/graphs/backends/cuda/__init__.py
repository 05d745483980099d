"""Graphs on an NVIDIA GPU: ``torch.cuda.CUDAGraph``, one private allocator pool per Manager."""

from .backend import CudaGraphBackend

__all__ = ["CudaGraphBackend"]
