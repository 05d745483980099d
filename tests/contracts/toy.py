"""A small model with a Routine whose every step is recorded and can be made to fail."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vgraph_lab.errors import FallbackReason, InputError
from vgraph_lab.graphs import Buffers, Descriptor, Resolution, Routine, Target

WIDTH = 8


class ToyModel(nn.Module):
    """x [B, T, WIDTH] → two matrix products with an addition between; large enough for a GEMM workspace."""

    def __init__(self, device: torch.device | str = "cpu", hidden: int = 64) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.first = nn.Parameter(torch.randn(WIDTH, hidden, generator=generator).to(device))
        self.second = nn.Parameter(torch.randn(hidden, WIDTH, generator=generator).to(device))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.first).tanh() @ self.second


class ToyRoutine(Routine[Any]):
    """Pads rows and frames on the right, like a decoder does.

    Args:
        model: what to capture.
        descriptors: known to ``resolve``.
        events: every step appends to it.
        fail: step name → exception to raise there (``forward`` fails in warm-ups too, ``capture`` only in a capture).
        is_capturing: asked to tell the two apart.
    """

    def __init__(
        self,
        model: ToyModel,
        descriptors: Sequence[Descriptor],
        events: list[str] | None = None,
        *,
        is_capturing: Callable[[], bool] = lambda: False,
    ) -> None:
        self.model, self.descriptors, self.is_capturing = model, list(descriptors), is_capturing
        self.events = [] if events is None else events
        self.fail: dict[str, BaseException] = {}
        self.fail_for: set[Descriptor] | None = None
        self.declines = False
        self.output: Callable[[Tensor], Any] = lambda y: y

    def step(self, name: str, descriptor: Descriptor | None = None) -> None:
        self.events.append(f"{name} {descriptor}" if descriptor else name)
        if name in self.fail and (self.fail_for is None or descriptor in self.fail_for):
            raise self.fail[name]

    def captured_modules(self) -> Iterable[nn.Module]:
        return (self.model,)

    def validate_runtime_inputs(self, x: Tensor, state: str = "") -> None:
        self.step("validate")
        if x.dim() != 3 or x.shape[-1] != WIDTH:
            raise InputError(f"x must be [B, T, {WIDTH}], got {list(x.shape)}")

    def resolve(self, x: Tensor, state: str = "") -> Resolution:
        self.step("resolve")
        key = Descriptor(x.shape[0], x.shape[1], state)
        same = [d for d in self.descriptors if d.state == state]
        covering = sorted((d for d in same if d.batch_size >= key.batch_size and d.frames >= key.frames), key=lambda d: d.work)
        return Resolution(key, tuple(covering), FallbackReason.SHAPE_NOT_COVERED if same else FallbackReason.STATE_NOT_COVERED)

    def make_descriptor(self, key: Descriptor) -> Descriptor | None:
        self.step("make_descriptor", key)
        return None if self.declines else key

    def allocate_buffers(self, descriptor: Descriptor) -> Buffers:
        self.step("allocate", descriptor)
        return {"x": torch.zeros(descriptor.batch_size, descriptor.frames, WIDTH, device=self.model.first.device)}

    def prepare_for_capture(self, descriptor: Descriptor, buffers: Buffers) -> None:
        self.step("prepare", descriptor)
        buffers["x"].fill_(0.5)

    def forward_for_capture(self, descriptor: Descriptor, buffers: Buffers) -> Any:
        self.step("capture" if self.is_capturing() else "forward", descriptor)
        return self.output(self.model(buffers["x"]))

    def copy_runtime_inputs(self, descriptor: Descriptor, buffers: Buffers, x: Tensor, state: str = "") -> None:
        self.step("copy", descriptor)
        buffers["x"].fill_(0)
        buffers["x"][: x.shape[0], : x.shape[1]].copy_(x)

    def output_after_replay(self, descriptor: Descriptor, buffers: Buffers, output: Any, x: Tensor, state: str = "") -> Any:
        self.step("materialise", descriptor)
        if isinstance(output, Tensor):
            return output[: x.shape[0], : x.shape[1]]
        return output

    def eager_call(self, x: Tensor, state: str = "") -> Any:
        self.events.append("eager")
        with torch.no_grad():
            return self.output(self.model(x.to(self.model.first.device)))


def toy_target(
    device: torch.device | str,
    *descriptors: Descriptor,
    target_id: str = "toy.main",
    events: list[str] | None = None,
    is_capturing: Callable[[], bool] = lambda: False,
    clone_output: bool = True,
    hidden: int = 64,
) -> Target[Any]:
    """A Target over a fresh ToyModel; ``target.routine`` is its ToyRoutine."""
    routine = ToyRoutine(ToyModel(device, hidden), descriptors, events, is_capturing=is_capturing)
    return Target(target_id, routine, descriptors, clone_output=clone_output)
