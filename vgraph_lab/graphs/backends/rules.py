"""What may not live in a captured graph, and why. The rules know no backend: they read one aten call at a time."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

import torch
from torch import Tag, Tensor

from vgraph_lab.errors import CaptureRefusedError

from .call import Call, user_line

__all__ = ["capture_conditions", "check_call", "check_results", "garbage_collection_paused", "no_refusal_swallowed", "refuse"]

_thread = threading.local()


def refuse(operation: str, why: str, hint: str = "", *, where: str | None = None) -> NoReturn:
    """Raise :class:`~vgraph_lab.errors.CaptureRefusedError` at ``where``, by default the user's current line."""
    refusal = (operation, why, where or user_line(), hint)
    if getattr(_thread, "first_refusal", None) is None:
        _thread.first_refusal = refusal
    raise CaptureRefusedError(*refusal)


@contextmanager
def no_refusal_swallowed() -> Iterator[None]:
    """Raise the block's first refusal again if the block caught it: it then took another path than it takes eagerly.

    What is kept is the error's plain data; the error object would keep the frames of the block alive.
    """
    outer, _thread.first_refusal = getattr(_thread, "first_refusal", None), None
    try:
        yield
        if _thread.first_refusal is not None:
            raise CaptureRefusedError(*_thread.first_refusal)
    finally:
        _thread.first_refusal = outer


@contextmanager
def capture_conditions() -> Iterator[None]:
    """What warm-up and capture have in common on every device: no autograd, and no cache of autocast's weight casts.

    A cached cast made outside would be read by the graph after its memory is gone; one made inside would be read by
    the caller after it was overwritten.
    """
    cached = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)
    try:
        with torch.no_grad():
            yield
    finally:
        torch.set_autocast_cache_enabled(cached)
        torch.clear_autocast_cache()


@contextmanager
def garbage_collection_paused() -> Iterator[None]:
    """Keep the garbage collector from running on its own: what it frees inside a capture would change the pool's layout."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


_KEEP_ON_DEVICE = "keep the decision on the device (torch.where, masks), or compute it before the capture and pass it as a Python number"
_MASKED = {"aten::index", "aten::_unsafe_index", "aten::index_put", "aten::index_put_", "aten::_unsafe_index_put", "aten::_index_put_impl_"}
_RESEATING = {"aten::resize_", "aten::resize_as_", "aten::set_", "aten::resize", "aten::resize_as", "aten::set"}
# Operations that torch does not tag although they read these values on the host.
_UNTAGGED_SHAPES = {"aten::_pack_padded_sequence": "the shape of its output depends on tensor data (the lengths)"}
# The fixed size is given by the caller, so the shape does not depend on data although the operation is tagged so.
_SIZED: dict[str, Callable[[Call], bool]] = {
    "aten::repeat_interleave": lambda call: call.argument("output_size") is not None,
    "aten::one_hot": lambda call: call.argument("num_classes", -1) != -1,
}


def check_call(call: Call) -> None:
    """Refuse ``call`` if no graph can hold it.

    Raises:
        CaptureRefusedError: naming the operation, the rule and the user's line.
    """
    name, tags = call.name, call.op.tags
    if Tag.data_dependent_output in tags:
        if name in {"aten::_local_scalar_dense", "aten::item"}:
            refuse(
                "Tensor.item()", "the host would wait for the value (float(), int(), bool() and formatting do the same)", _KEEP_ON_DEVICE
            )
        refuse(str(call.op), "the host would wait for a result that depends on tensor data", _KEEP_ON_DEVICE)
    if name in _UNTAGGED_SHAPES:
        refuse(str(call.op), _UNTAGGED_SHAPES[name], "pad to a fixed length and mask, and leave packing to the caller")
    if name in _MASKED:
        _check_indices(call)
    elif Tag.dynamic_output_shape in tags and not (name in _SIZED and _SIZED[name](call)):
        refuse(str(call.op), "the shape of its output depends on tensor data", "use a form of fixed size, e.g. a mask and torch.where")
    if name == "aten::_linalg_check_errors":
        refuse(str(call.op), "it reads an error code on the host", "use the *_ex form of the linear algebra function")
    if call.lifts_constant:
        _check_constant(call)
    if name in _RESEATING:
        refuse(str(call.op), "it gives a tensor another memory, and a graph's addresses are fixed", "allocate the final size first")
    _check_layouts(call.op, call.inputs)
    _check_devices(call)
    _check_generators(call)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in call.inputs):
        refuse(
            str(call.op),
            "autograd is recording",
            "do not enable gradients inside the captured function (torch.enable_grad, or autocast with cache_enabled=True)",
        )


def check_results(call: Call, results: list[Tensor]) -> None:
    """Refuse results that a graph cannot hold: other layouts than dense ones."""
    _check_layouts(call.op, results)


def _check_indices(call: Call) -> None:
    """Indices must be numbers: a boolean mask selects a number of elements that depends on data."""
    indices = call.argument("indices") or ()
    if not any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices):
        return
    value = call.argument("values")
    # One mask and one host value is a masked fill, which needs no selection.
    fills = value is not None and len(indices) == 1 and value.numel() == 1 and value.device.type == "cpu"
    if not fills:
        refuse(
            f"{call.op} with a boolean mask",
            "the number of selected elements depends on tensor data",
            "use torch.where or Tensor.masked_fill",
        )


def _check_constant(call: Call) -> None:
    """A constant made from Python data: one number can be held by the graph, anything larger is a copy from host memory."""
    constant = call.args[0]
    if constant.numel() == 0 or (constant.dim() == 0 and constant.device.type == "cpu"):
        return
    refuse(
        "torch.tensor()",
        "it copies Python or NumPy data from host memory (torch.as_tensor and index lists do the same)",
        "make it once in allocate_buffers, or compute it with torch.arange, torch.full and the like",
    )


def _check_layouts(op: object, tensors: list[Tensor]) -> None:
    for tensor in tensors:
        if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
            refuse(str(op), f"it works on {type(tensor).__name__}, a tensor type with a dispatch of its own", "unwrap it first")
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
            kind = "nested" if tensor.is_nested else "quantized" if tensor.is_quantized else str(tensor.layout)
            refuse(str(op), f"it works on a {kind} tensor", "use dense strided tensors")


def _check_generators(call: Call) -> None:
    """Only the default generators: CUDA lets no other one into a graph, and whether one was seeded inside would not show."""
    for leaf in call.leaves:
        if isinstance(leaf, torch.Generator) and _address(leaf) not in _default_generators():
            refuse(
                f"{call.op} with generator=",
                "it draws from a random generator of its own, whose seeding inside the function a replay would not repeat",
                "draw from the default generator, or draw before the call and pass the numbers in as a static input",
            )


def _default_generators() -> set[int]:
    on_devices = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    return {_address(generator) for generator in (torch.default_generator, *on_devices)}


def _address(generator: torch.Generator) -> int:
    """Identity of a generator: a dispatched call carries another Python object of the same one."""
    return int(generator._cdata)  # type: ignore[attr-defined]  # missing in torch's stub


def _check_devices(call: Call) -> None:
    """On an accelerator: host memory takes no part, except that a 0-dim host tensor may be read as a number."""
    on_device = [tensor for tensor in call.inputs if tensor.device.type != "cpu"]
    target = call.argument("device") if call.name == "aten::_to_copy" else None
    if target is not None and call.inputs and torch.device(target).type != call.inputs[0].device.type:
        source = call.inputs[0].device.type
        refuse(str(call.op), f"it copies from {source} to {torch.device(target).type} memory", "keep every tensor on the capturing device")
    if not on_device or len(on_device) == len(call.inputs):
        return
    written = {id(tensor) for tensor in call.written}
    for tensor in call.inputs:
        if tensor.device.type != "cpu" or (tensor.dim() == 0 and id(tensor) not in written):
            continue
        if call.name == "aten::copy_" and call.argument("non_blocking") and tensor.is_pinned():
            continue  # an asynchronous copy from or to pinned memory is a node like any other
        refuse(
            str(call.op),
            f"it touches host memory ({tuple(tensor.shape)}, {tensor.dtype}) together with a tensor on {on_device[0].device}",
            "keep every tensor on the capturing device",
        )
