"""Check a function against the capture rules while it runs eagerly: every call, and where each of its tensors is from."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import torch
from torch import Tag, Tensor, UntypedStorage
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from .call import Call, storage_id, tensors_in, user_line
from .host_guard import host_access_refused
from .rules import check_call, check_results, no_refusal_swallowed, refuse

__all__ = ["CaptureAudit", "CheckedMode", "Origin", "Origins", "run_checked"]

Origin = Literal["static", "owned", "made"]


@dataclass(frozen=True, slots=True)
class Seat:
    """Where a tensor lies in memory, and how; keeps that memory."""

    tensor: Tensor
    storage: UntypedStorage
    nbytes: int
    geometry: tuple[int, torch.Size, tuple[int, ...]]  # offset, shape, strides

    @classmethod
    def of(cls, tensor: Tensor) -> Seat:
        """The present seat of ``tensor``."""
        storage = tensor.untyped_storage()
        return cls(tensor, storage, storage.nbytes(), _geometry(tensor))

    def left(self) -> bool:
        """Whether the tensor has moved (``Tensor.data = ...``) or changed its shape since, or its storage its size."""
        same = storage_id(self.tensor) == self.storage._cdata and self.storage.nbytes() == self.nbytes
        return not same or _geometry(self.tensor) != self.geometry

    def restore(self) -> None:
        """Seat the tensor here again. Bytes beyond a shrunken storage are not brought back."""
        if not self.left():
            return
        if self.storage.nbytes() != self.nbytes:
            self.storage.resize_(self.nbytes)
        with torch.inference_mode(self.tensor.is_inference()), torch.no_grad():
            self.tensor.set_(self.storage, *self.geometry)


def _geometry(tensor: Tensor) -> tuple[int, torch.Size, tuple[int, ...]]:
    return int(tensor.storage_offset()), tensor.shape, tensor.stride()


class Origins:
    """Where each storage is from: a static input, the model, or the captured function itself."""

    def __init__(self, static_inputs: Iterable[Tensor], owned: Iterable[Tensor]) -> None:
        self.static_inputs, self.owned = tuple(static_inputs), tuple(owned)
        self._from_outside = {id(tensor) for tensor in (*self.static_inputs, *self.owned)}
        self._origins: dict[int, Origin] = {storage_id(tensor): "owned" for tensor in self.owned}
        self._origins |= {storage_id(tensor): "static" for tensor in self.static_inputs}
        self._made: dict[int, StorageWeakRef] = {}
        self.seats = [Seat.of(tensor) for tensor in (*self.static_inputs, *self.owned)]

    def of(self, tensor: Tensor) -> Origin | None:
        """Origin of the memory behind ``tensor``; ``None`` if it is unknown."""
        return self._origins.get(storage_id(tensor))

    def add(self, results: Iterable[Tensor]) -> None:
        """Note the results of an operation; memory that is not yet known was made by it."""
        for tensor in results:
            identity = storage_id(tensor)
            if identity not in self._origins:
                self._origins[identity] = "made"
                # A weak reference keeps the identity from being given out again, but not the bytes.
                self._made[identity] = StorageWeakRef(tensor.untyped_storage())

    def check(self, call: Call) -> None:
        """Refuse arguments of unknown origin, and changes to the shape of a tensor from outside."""
        if call.lifts_constant:
            return
        for tensor in call.inputs:
            if self.of(tensor) is None:
                self._refuse_unknown(str(call.op), "uses", tensor)
        if Tag.inplace_view in call.op.tags and id(call.args[0]) in self._from_outside:
            refuse(str(call.op), "it changes the shape of a tensor from outside at every eager call, and a replay does not", "use a view")
        on_accelerator = any(tensor.device.type != "cpu" for tensor in call.inputs)
        if on_accelerator and call.name != "aten::copy_":
            for tensor in call.inputs:
                # A kernel takes a host number by value, so a replay would not see a new one.
                if tensor.device.type == "cpu" and self.of(tensor) == "static":
                    refuse(str(call.op), "it reads a static input in host memory by value", "put the static input on the device")

    def check_output(self, output: Any, where: str) -> None:
        """Refuse a returned tensor of unknown origin."""
        for tensor in tensors_in(output):
            if self.of(tensor) is None:
                self._refuse_unknown("the output", "is", tensor, where)

    def check_seats(self, where: str) -> None:
        """Refuse the function if it has moved a tensor from outside, which a replay would not do."""
        for seat in self.seats:
            if seat.left():
                refuse(
                    "Tensor.data = ...",
                    f"a static input, parameter or buffer ({tuple(seat.geometry[1])}, {seat.tensor.dtype}) has other memory or "
                    "another shape than before the call, and a graph keeps reading the old ones",
                    "write into the tensor with copy_",
                    where=where,
                )

    @staticmethod
    def _refuse_unknown(operation: str, verb: str, tensor: Tensor, where: str | None = None) -> None:
        refuse(
            operation,
            f"it {verb} a tensor made outside the captured function ({tuple(tensor.shape)}, {tensor.dtype}, {tensor.device}) "
            "that is neither a static input nor a parameter or buffer of the model",
            "allocate it in allocate_buffers and copy into it, or register it as a buffer",
            where=where,
        )


class _WithoutCompiler:
    """A dispatch function of a mode that torch need not keep its compiler away from while there is none.

    To do so torch imports the compiler at the mode's first call, which takes seconds, and asks the function for an attribute
    before. Where something else has imported it, the function is handled as torch wants.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "__dynamo_disable" and "torch._dynamo" not in sys.modules:
            return self._function
        raise AttributeError(name)


class CheckedMode(TorchDispatchMode, ABC):
    """A dispatch mode that checks each call against the rules and hands the allowed ones to :meth:`run`."""

    supports_higher_order_operators = True  # they are let in to be refused with the user's line

    def __init__(self, origins: Origins) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.origins = origins

    @_WithoutCompiler
    def __torch_dispatch__(self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(op, OpOverload):
            refuse(str(op), "a higher-order operator runs Python that no graph records", "call its branches directly")
        call = Call.of(op, args, kwargs)
        check_call(call)
        if _is_composite(call):
            with self:
                return op._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
        self.origins.check(call)
        result = self.run(call)
        self.origins.add(tensors_in(result))
        return result

    @abstractmethod
    def run(self, call: Call) -> Any:
        """Execute an allowed call and return its result."""

    def execute(self, call: Call) -> Any:
        """Run the operation itself; refuse results that no graph can hold, and tensors resized by being written to."""
        before = [Seat.of(tensor) for tensor in call.written]
        try:
            result = call.op(*call.args, **call.kwargs)
        except RuntimeError as error:
            if call.written and "not resizable" in str(error):
                _refuse_resize(call)
            raise
        check_results(call, tensors_in(result))
        reshapes = Tag.inplace_view in call.op.tags  # Tensor.squeeze_ and its like touch no memory
        if not reshapes and any(seat.left() for seat in before):
            _refuse_resize(call)
        return result

    def check_end(self, output: Any, where: str) -> None:
        """Refuse what only shows when the captured function, which starts at ``where``, has returned ``output``."""
        self.origins.check_output(output, where)
        self.origins.check_seats(where)


class CaptureAudit(CheckedMode):
    """Checks and runs each call, and records nothing. Works on any device.

    Args:
        static_inputs: the buffers through which inputs change between replays.
        owned: parameters and buffers of the model.
    """

    def __init__(self, static_inputs: Iterable[Tensor], owned: Iterable[Tensor]) -> None:
        super().__init__(Origins(static_inputs, owned))

    def run(self, call: Call) -> Any:
        """Execute the call eagerly."""
        return self.execute(call)


def run_checked(function: Callable[[], Any], mode: CheckedMode) -> Any:
    """Run ``function`` under ``mode`` and with host access refused; return what it returns.

    Raises:
        CaptureRefusedError: a call, or the output, breaks a capture rule, even where ``function`` caught that.
    """
    with no_refusal_swallowed(), host_access_refused(), mode:
        output = function()
        mode.check_end(output, user_line(function))
    return output


def _refuse_resize(call: Call) -> NoReturn:
    hint = "give the out= tensor its final shape"
    refuse(str(call.op), "it resizes a tensor that it writes to, and a graph's addresses are fixed", hint)


def _is_composite(call: Call) -> bool:
    """Whether the call is a composition of others that autograd would have taken apart before; under inference mode it does not.

    The composition is the C++ one: Python decompositions differ from it in the last bits.
    """
    device = next((tensor.device.type for tensor in call.inputs if tensor.device.type != "cpu"), "cpu")
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    name: str = call.op.name()
    return has_kernel(name, "CompositeImplicitAutograd") and not has_kernel(name, device.upper())
