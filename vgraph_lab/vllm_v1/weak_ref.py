"""Tensors that do not keep their memory: how a graph refers to what later graphs of its pool may overwrite.

Counterpart of ``vllm.utils.torch_utils.weak_ref_tensors`` (0.25.1). A graph's memory stays mapped as long as the graph lives.
But as long as a tensor holds a block of the pool, no later capture can have that block, although only one graph of a pool runs at a
time. A weak reference gives the block free and goes on reading it.

**What is safe.** Say that a weakly held tensor is read by R, whatever that is: a later piece of the model, a break, the caller.

* *Address*: valid until the graph that made it is reset. R must be gone by then, or not read any more.
* *Content*: valid from the replay that writes it until the next replay, or capture, of another graph of the pool that was captured
  when nobody held the tensor strongly any more. So R reads the right content in every replay if somebody held the tensor strongly
  during the capture until R had read it. Python's references do that by themselves for everything inside the model: what a later
  piece or a break reads is still a local variable when that piece is captured or the break runs.
* For the *caller* this means: a result is good until the next batch. To keep it, copy it (``clone_output``).

Not safe, and therefore held strongly: static inputs, the model's parameters and buffers, and whatever does not lie in the pool.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vgraph_lab.graphs.structure import map_tensors

__all__ = ["weak_ref_tensor", "weak_ref_tensors"]


def weak_ref_tensor(tensor: Tensor) -> Tensor:
    """The same memory, dtype, shape and strides, in a storage that owns nothing. Without elements, the tensor itself."""
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        return tensor
    with torch.inference_mode(False), torch.no_grad():
        borrowed = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), tensor.device, storage.nbytes())
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return empty.set_(borrowed, tensor.storage_offset(), tensor.size(), tensor.stride())


def weak_ref_tensors(value: Any) -> Any:
    """The same structure with every tensor replaced by :func:`weak_ref_tensor` of it."""
    return map_tensors(weak_ref_tensor, value)
