"""Finding callables that bring CUDA graphs of their own: ``torch.compile(mode="reduce-overhead")`` and its like.

Such a callable captures on its own schedule, into its own pool. Inside a capture of ours it would break both.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from vgraph_lab.errors import CaptureError

from .routine import Routine

__all__ = ["refuse_own_cudagraphs"]


def refuse_own_cudagraphs(routine: Routine[Any]) -> None:
    """Look at a Routine's attributes and modules.

    Raises:
        CaptureError: one of them is compiled with cudagraph trees; names it and the cure.
    """
    held = {f"{type(routine).__name__}.{name}": value for name, value in vars(routine).items()}
    held |= {type(module).__name__: module for module in routine.captured_modules()}
    for name, value in held.items():
        parts = value.named_modules(prefix=name) if isinstance(value, nn.Module) else [(name, value)]
        for path, part in parts:
            if _has_own_cudagraphs(part):
                raise CaptureError(
                    f"{path} is compiled with CUDA graphs of its own (mode='reduce-overhead' or triton.cudagraphs). "
                    "Compile it with mode='default' or 'max-autotune-no-cudagraphs'; the Manager captures the graph."
                )


def _has_own_cudagraphs(part: Any) -> bool:
    config = getattr(getattr(part, "dynamo_ctx", None), "compiler_config", None)  # an OptimizedModule
    for compiled in (part, getattr(part, "_compiled_call_impl", None)):  # a compiled function; Module.compile()
        if config is None and compiled is not None and "get_compiler_config" in getattr(compiled, "__dict__", {}):
            config = compiled.get_compiler_config()
    return bool(config and config.get("triton.cudagraphs"))
