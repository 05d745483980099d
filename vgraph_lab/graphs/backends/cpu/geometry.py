"""Tensors over given memory: the aliases that a recording works on, and the bytes that a tensor spans."""

from __future__ import annotations

import torch
from torch import Tensor, UntypedStorage

__all__ = ["alias", "byte_range", "byte_view", "bytes_needed", "same_bytes"]


def _extent(tensor: Tensor) -> int:
    """Elements from the first to behind the last one in memory, gaps included."""
    if tensor.numel() == 0:
        return 0
    last: int = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return last + 1


def bytes_needed(tensor: Tensor) -> int:
    """Bytes that a storage must have to hold ``tensor`` at its offset; 0 for a tensor without elements."""
    extent = _extent(tensor)
    return (int(tensor.storage_offset()) + extent) * tensor.element_size() if extent else 0


def byte_range(tensor: Tensor) -> tuple[int, int]:
    """Addresses ``[first, behind the last)`` that a non-empty tensor spans."""
    first = tensor.data_ptr()
    return first, first + _extent(tensor) * tensor.element_size()


def alias(tensor: Tensor, storage: UntypedStorage) -> Tensor:
    """A normal (never an inference) tensor with the geometry of ``tensor``, on ``storage``."""
    with torch.inference_mode(False):
        result = torch.empty(0, dtype=tensor.dtype, device="cpu").set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
        if tensor.is_conj():
            result = result.conj()
        if tensor.is_neg():
            result = torch._neg_view(result)
    return result


def byte_view(storage: UntypedStorage, nbytes: int) -> Tensor:
    """The first ``nbytes`` of ``storage`` as uint8."""
    with torch.inference_mode(False):
        return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage, 0, (nbytes,), (1,))


def same_bytes(left: Tensor, right: Tensor) -> bool:
    """Whether two uint8 tensors of one length, each at the beginning of its storage, are equal. Compares words where it can."""
    words = left.numel() // 8 * 8
    return torch.equal(left[:words].view(torch.int64), right[:words].view(torch.int64)) and torch.equal(left[words:], right[words:])
