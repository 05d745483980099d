"""Compile every kernel launch of one fast step for a GPU that need not be there; print what became of each, as JSON.

Run without TRITON_INTERPRET: a process in which kernels are interpreted cannot compile them.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from vgraph_lab.qwen3_tts import incremental_forms
from vgraph_lab.qwen3_tts.checkpoint import random_decoder
from vgraph_lab.qwen3_tts.fast import kernels, launch, matrix_kernels, resident_kernels, units
from vgraph_lab.qwen3_tts.fast.products import Run
from vgraph_lab.qwen3_tts.fast.step import FastStep
from vgraph_lab.qwen3_tts.fast.tiles import RESIDENT, Problem, candidates, tile_by_rule
from vgraph_lab.qwen3_tts.geometry import DecoderGeometry
from vgraph_lab.qwen3_tts.incremental_state import StateArena

TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32", torch.int64: "i64"}
OPTIONS = ("num_warps", "num_stages", "launch_pdl")
MANY_ROWS = 16_000
LAUNCHED = {
    kernels: ("attend", "depthwise_norm", "embed", "move_histories", "sum_taps"),
    matrix_kernels: ("convolve", "residual_unit"),
    resident_kernels: ("resident_unit",),
}
# Residual units of 192 channels in two kernels, and of 96 in one.
GEOMETRY = DecoderGeometry(
    codebook_size=16, codebook_dim=64, num_quantizers=4, latent_dim=128, hidden_size=64, intermediate_size=128, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=2, head_dim=64, sliding_window=72, max_position_embeddings=256,
    upsampling_ratios=(2,), upsample_rates=(4, 3), decoder_dim=384,
)  # fmt: skip


class Recorded:
    """Stands for a kernel and notes its launches instead."""

    def __init__(self, kernel: Any, launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]]) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **constants: self.launches.append((self.kernel, args, constants))

    def warmup(self, *args: Any, grid: Any, **constants: Any) -> None:
        self.launches.append((self.kernel, args, constants))


_MEMORY = r"\b(?:ld\.global|st\.global|ld\.volatile|cp\.async|atom|red)\.[\w.:]+"  # a prefetch changes and returns nothing


def choose(problem: Problem, run: Run) -> None:
    """By rule. Beside that: what there is without the resident kernel, what takes columns that are no power of two, and all with norms."""
    tiles, many = [tile_by_rule(problem)], candidates(replace(problem, rows=MANY_ROWS))
    if tiles[0] == RESIDENT:
        tiles.append(candidates(problem)[1])
    tiles += [tile for tile in many if "n" in problem.kind or (tile.more and tile != RESIDENT and problem.kind == "s")]
    for tile in tiles:
        run(tile, compile_only=True)


def type_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "*" + TYPES[value.dtype]
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{TYPES[value.base.dtype]}{list(value.block_shape)},{value.layout!r}>"
    return "fp32" if isinstance(value, float) else "i32"


def compiled(
    kernel: Any, args: tuple[Any, ...], constants: dict[str, Any], target: GPUTarget
) -> tuple[object, Callable[[], dict[str, Any]]]:
    """What tells one program from another, and its compilation."""
    given = {param.name: param.default for param in kernel.params if param.has_default}
    given |= dict(zip(kernel.arg_names, args, strict=False)) | {name: constants[name] for name in kernel.arg_names if name in constants}
    fixed = {param.name: given[param.name] for param in kernel.params if param.is_constexpr}
    signature, attributes = {}, {}
    for place, param in enumerate(kernel.params):
        value = given[param.name]
        signature[param.name] = "constexpr" if param.is_constexpr else type_of(value)
        is_aligned = isinstance(value, int) and value % 16 == 0 and param.name not in (kernel.do_not_specialize or ())
        if not param.is_constexpr and (isinstance(value, torch.Tensor) or is_aligned):
            attributes[(place,)] = [["tt.divisibility", 16]]
    options = {option: constants[option] for option in OPTIONS if option in constants}
    source = GluonASTSource if kernel.is_gluon() else ASTSource

    def work() -> dict[str, Any]:
        binary = triton.compile(source(kernel, signature, fixed, attributes), target=target, options=options)
        ptx = binary.asm["ptx"]
        return {
            "kernel": kernel.__name__,
            "rows": fixed.get("BM"),
            "more": fixed.get("MORE", 0),
            "norm": fixed.get("NORM", False),
            "warps": options.get("num_warps"),
            "shared": binary.metadata.shared,
            "early": binary.metadata.launch_pdl,
            "waits": ptx.count("griddepcontrol.wait"),
            "lets_start": ptx.count("griddepcontrol.launch_dependents"),
            "touches_before_its_turn": re.findall(_MEMORY, ptx.partition("griddepcontrol.wait")[0]),
            "wgmma": ptx.count("wgmma.mma_async"),
        }

    return (kernel.__name__, *(tuple(each.items()) for each in (signature, fixed, options)), tuple(attributes)), work


def main(capability: int) -> None:
    incremental_forms._NEEDS_CUDA = False
    launch._starts_early = lambda device: capability >= 90
    units.can_be_resident = lambda weights: capability == 90
    units.multiprocessors = lambda device: 132
    launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
    for module, names in LAUNCHED.items():
        for name in names:
            setattr(module, name, Recorded(getattr(module, name), launches))
    decoder = random_decoder(GEOMETRY, dtype=torch.bfloat16)
    with torch.no_grad():
        codes, places = torch.zeros(1, 4, 25, dtype=torch.int64), torch.zeros(1, 2, dtype=torch.int64)
        FastStep(decoder, choose)(StateArena(decoder, 1), codes, places)
    works = dict(compiled(kernel, args, constants, GPUTarget("cuda", capability, 32)) for kernel, args, constants in launches)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        print(json.dumps(list(pool.map(lambda work: work(), works.values()))))


main(int(sys.argv[1]))
