"""Compile every kernel launch of one fast step for a GPU that need not be there; print what became of each, as JSON.

Run without TRITON_INTERPRET: a process in which kernels are interpreted cannot compile them.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vgraph_lab.qwen3_tts import incremental_forms
from vgraph_lab.qwen3_tts.checkpoint import random_decoder
from vgraph_lab.qwen3_tts.fast import kernels, products
from vgraph_lab.qwen3_tts.fast.tiles import tile_by_rule
from vgraph_lab.qwen3_tts.geometry import DecoderGeometry
from vgraph_lab.qwen3_tts.incremental_state import StateArena

TYPES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int32: "*i32", torch.int64: "*i64"}
OPTIONS = ("num_warps", "num_stages")


class Recorded:
    """Stands for a kernel and notes its launches instead."""

    def __init__(self, kernel: Any, launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]]) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **constants: self.launches.append((self.kernel, args, constants))

    def warmup(self, *args: Any, grid: Any, **constants: Any) -> None:
        self.launches.append((self.kernel, args, constants))


def compiled(kernel: Any, args: tuple[Any, ...], constants: dict[str, Any], target: GPUTarget) -> tuple[Any, Any]:
    given = dict(zip(kernel.arg_names, args, strict=False)) | {name: constants[name] for name in kernel.arg_names if name in constants}
    fixed = {param.name: given[param.name] for param in kernel.params if param.is_constexpr}
    signature, attributes = {}, {}
    for place, param in enumerate(kernel.params):
        value = given[param.name]
        if param.is_constexpr:
            signature[param.name] = "constexpr"
            continue
        is_tensor = isinstance(value, torch.Tensor)
        signature[param.name] = TYPES[value.dtype] if is_tensor else "fp32" if isinstance(value, float) else "i32"
        if is_tensor or (isinstance(value, int) and value % 16 == 0 and param.name not in (kernel.do_not_specialize or ())):
            attributes[(place,)] = [["tt.divisibility", 16]]
    key = (
        kernel.__name__,
        tuple(signature.items()),
        tuple(sorted(fixed.items())),
        tuple(attributes),
        tuple(constants.get(o) for o in OPTIONS),
    )
    return key, lambda: triton.compile(
        ASTSource(kernel, signature, fixed, attributes),
        target=target,
        options={option: constants[option] for option in OPTIONS if option in constants},
    )


def main(capability: int) -> None:
    incremental_forms._NEEDS_CUDA = False
    launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
    for name in kernels.__all__:
        setattr(kernels, name, Recorded(getattr(kernels, name), launches))
    geometry = DecoderGeometry(
        codebook_size=16, codebook_dim=64, num_quantizers=4, latent_dim=128, hidden_size=64, intermediate_size=128, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, head_dim=64, sliding_window=72, max_position_embeddings=256,
        upsampling_ratios=(2,), upsample_rates=(4, 3), decoder_dim=384,
    )  # fmt: skip
    decoder = random_decoder(geometry, dtype=torch.bfloat16)
    from vgraph_lab.qwen3_tts.fast.step import FastStep

    step = FastStep(decoder, lambda problem, run: run(tile_by_rule(problem), compile_only=True))
    with torch.no_grad():
        step(StateArena(decoder, 1), torch.zeros(1, 4, 25, dtype=torch.int64), torch.zeros(1, 2, dtype=torch.int64))
    assert products.kernels is kernels
    target, done = GPUTarget("cuda", capability, 32), {}
    for kernel, args, constants in launches:
        key, work = compiled(kernel, args, constants, target)
        if key not in done:
            binary = work()
            done[key] = {
                "kernel": kernel.__name__,
                "rows": constants.get("BM"),
                "warps": constants.get("num_warps"),
                "shared": binary.metadata.shared,
                "wgmma": binary.asm["ptx"].count("wgmma.mma_async"),
            }
    print(json.dumps(list(done.values())))


main(int(sys.argv[1]))
