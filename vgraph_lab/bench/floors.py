"""The least that a chunk can cost: operations and bytes counted from the geometry, over ceilings that the device reached.

Counted are the matrix products and convolutions of a chunk's own frames, and of memory what no kernel can leave out if each layer
is one kernel: every weight read once, every layer's result written once and read once, the request state read and what changes of
it written. Arithmetic between layers, biases and norms count nothing. So it is the floor of layer-by-layer execution: where two
layers are one kernel, or a result stays in the cache until it is read, a device may come below the bytes floor, never below the
arithmetic one.

In float32, torch by default lets cuDNN round the factors of convolutions to TF32, and leaves matrix products as they are. A floor is
the least, so if anything may be rounded, the arithmetic ceiling is that of TF32; what multiplies in full stays the further above it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import pandas as pd
import torch
from torch import nn

from vgraph_lab.errors import InputError
from vgraph_lab.qwen3_tts.decoder import Code2WavDecoder
from vgraph_lab.qwen3_tts.geometry import DecoderGeometry
from vgraph_lab.qwen3_tts.layers import CausalConv1d, CausalConvTranspose1d

from .timing import time_once

__all__ = ["FLOOR_COLUMNS", "Ceilings", "LayerWork", "chunk_work", "decoder_parts", "floor_table", "measure_ceilings"]

_LEAST_S = 1.0

FLOOR_COLUMNS = {
    "part": "part of the decoder, in the order in which they run; the last row is the sum",
    "gflop": "multiplications and additions of the whole batch",
    "weight_mb": "weights, read once for all rows",
    "activation_mb": "results of layers, written once and read once",
    "state_mb": "request state, read and written, and the rows of the codebooks",
    "arithmetic_ms": "at the device's measured arithmetic",
    "bytes_ms": "at the device's measured bandwidth",
    "floor_ms": "layer by layer, the longer of the two",
}
"""The columns of :func:`floor_table`, in order, with their meaning. MB and GFLOP are powers of ten."""


@dataclass(frozen=True, slots=True)
class LayerWork:
    """What one layer does for one chunk.

    Attributes:
        part: part of the decoder that it belongs to.
        name: path of the module in the decoder.
        flop: per row.
        weights: values that are read, once for all rows.
        results: values that it writes, per row; they are read once, too.
        state: values of request state (and rows of codebooks) that it reads or writes, per row.
    """

    part: str
    name: str
    flop: int
    weights: int
    results: int
    state: int = 0


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What a device reached in this process.

    Attributes:
        flop_per_s: of a large matrix product.
        bytes_per_s: of a large copy on the device, reads and writes counted.
        arithmetic: of that product: the decoder's dtype, or ``tf32`` for float32 that a layer may round so.
    """

    flop_per_s: float
    bytes_per_s: float
    arithmetic: str


# ------------------------------------------------------------------------------------------------------- what is counted


def chunk_work(geometry: DecoderGeometry, frames: int) -> tuple[LayerWork, ...]:
    """Layers in the order in which they run, for a chunk of ``frames`` somewhere in a stream whose window is full.

    Raises:
        InputError: no frames.
    """
    if frames < 1:
        raise InputError(f"a chunk has at least 1 frame, got {frames}.")
    return tuple(_layers(geometry, frames))


def _layers(g: DecoderGeometry, frames: int) -> Iterator[LayerWork]:
    with torch.device("meta"):
        decoder = Code2WavDecoder(g)
    # The rows of the codebooks' tables that the codes name, and their sum in each half.
    half, levels = g.codebook_dim // 2, g.num_quantizers
    yield LayerWork("quantizer", "quantizer.tables", 0, 0, 2 * half * frames, state=levels * half * frames)
    for name, codebooks in (("rvq_first", decoder.quantizer.rvq_first), ("rvq_rest", decoder.quantizer.rvq_rest)):
        yield _conv("quantizer", f"quantizer.{name}.output_proj", codebooks.output_proj, frames)
    yield _looking_back("pre_conv", "pre_conv", decoder.pre_conv, frames)
    yield from _transformer(decoder, frames)
    length = frames
    for part, modules in decoder_parts(decoder).items():
        if part in ("pre_conv", "transformer"):
            continue
        for module in modules:
            for layer in module.modules():
                if isinstance(layer, CausalConvTranspose1d | CausalConv1d):
                    yield _looking_back(part, _path(decoder, layer), layer, length)
                    length *= layer.stride if isinstance(layer, CausalConvTranspose1d) else 1
                elif isinstance(layer, nn.Linear):
                    yield _linear(part, _path(decoder, layer), layer, length)


def _transformer(decoder: Code2WavDecoder, frames: int) -> Iterator[LayerWork]:
    g = decoder.geometry
    keys, heads = g.sliding_window, g.num_attention_heads * g.head_dim
    cached = 2 * g.num_key_value_heads * g.head_dim
    for name, module in decoder.pre_transformer.named_modules():
        path = f"pre_transformer.{name}"
        if isinstance(module, nn.Linear):
            yield _linear("transformer", path, module, frames)
        if name.endswith("self_attn"):  # every query sees W keys: products with keys, and of their weights with values
            moved = cached * (keys - 1 + min(frames, keys - 1))
            yield LayerWork("transformer", f"{path}.attention", 4 * frames * keys * heads, 0, heads * frames, moved)


def _linear(part: str, name: str, layer: nn.Linear, length: int) -> LayerWork:
    return LayerWork(part, name, 2 * length * layer.weight.numel(), _values(layer), layer.out_features * length)


def _looking_back(part: str, name: str, layer: CausalConv1d | CausalConvTranspose1d, length: int) -> LayerWork:
    kept = layer.conv.in_channels * layer.left_context
    return _conv(part, name, layer.conv, length, state=kept + layer.conv.in_channels * min(length, layer.left_context))


def _conv(part: str, name: str, conv: nn.Conv1d | nn.ConvTranspose1d, length: int, state: int = 0) -> LayerWork:
    """Either way each weight meets each sample of the shorter side once; inputs of a transposed one are the shorter."""
    is_transposed = isinstance(conv, nn.ConvTranspose1d)
    results = conv.out_channels * length * (conv.stride[0] if is_transposed else 1)
    return LayerWork(part, name, 2 * length * conv.weight.numel(), _values(conv), results, state)


def decoder_parts(decoder: Code2WavDecoder) -> dict[str, list[nn.Module]]:
    """The parts that are modules which run, in order: name → modules. What is left is the quantizer and the moving of state."""
    first, *blocks, snake, last = decoder.decoder.children()
    return {
        "pre_conv": [decoder.pre_conv],
        "transformer": [decoder.pre_transformer],
        "upsample": [layer for stage in decoder.upsample.children() for layer in stage.children()],
        "decoder.0": [first],
        **{f"block {number}": [block] for number, block in enumerate(blocks)},
        "output": [snake, last],
    }


def _values(layer: nn.Module) -> int:
    return sum(parameter.numel() for parameter in layer.parameters())


def _path(decoder: nn.Module, layer: nn.Module) -> str:
    return next(str(name) for name, module in decoder.named_modules() if module is layer)


# -------------------------------------------------------------------------------------------------------------- floors


def floor_table(geometry: DecoderGeometry, frames: int, batch_size: int, dtype: torch.dtype, ceilings: Ceilings) -> pd.DataFrame:
    """The floor of one call of ``batch_size`` chunks, by part, with the columns of :data:`FLOOR_COLUMNS`.

    Raises:
        InputError: no frames or no rows.
    """
    if batch_size < 1:
        raise InputError(f"a call has at least 1 row, got {batch_size}.")
    rows = []
    for work in chunk_work(geometry, frames):
        flop = work.flop * batch_size
        weights, results, state = (
            count * dtype.itemsize for count in (work.weights, 2 * work.results * batch_size, work.state * batch_size)
        )
        arithmetic, moving = flop / ceilings.flop_per_s, (weights + results + state) / ceilings.bytes_per_s
        figures = (flop / 1e9, weights / 1e6, results / 1e6, state / 1e6, arithmetic * 1e3, moving * 1e3)
        rows.append((work.part, *figures, max(arithmetic, moving) * 1e3))
    layers = pd.DataFrame(rows, columns=list(FLOOR_COLUMNS))
    parts = layers.groupby("part", sort=False).sum().reset_index()
    total = {"part": "total", **parts.drop(columns="part").sum().to_dict()}
    return pd.concat([parts, pd.DataFrame([total])], ignore_index=True)


# ------------------------------------------------------------------------------------------------------------ ceilings


def measure_ceilings(device: torch.device, dtype: torch.dtype, *, runs: int = 20) -> Ceilings:
    """The best of ``runs`` matrix products and copies at least, large enough to hide what starting them costs.

    Args:
        device: what to measure.
        dtype: of the product; the copy moves bytes of any.
        runs: timed runs of each, after one that is not.
    """
    size, copied = (8192, 2**30) if device.type == "cuda" else (1024, 2**27)
    arithmetic = _arithmetic(device, dtype)
    with _products_in_tf32() if arithmetic == "tf32" else nullcontext():
        product_s = _product_s(device, dtype, size, runs)
    return Ceilings(2 * size**3 / product_s, 2 * copied / _copy_s(device, copied, runs), arithmetic)


def _arithmetic(device: torch.device, dtype: torch.dtype) -> str:
    """The fastest arithmetic that a layer may use: TF32 is for float32 on CUDA from compute capability 8, where it is allowed."""
    if device.type == "cuda" and dtype is torch.float32 and torch.cuda.get_device_capability(device) >= (8, 0):
        is_allowed = torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32
        return "tf32" if is_allowed else "float32"
    return str(dtype).removeprefix("torch.")


@contextmanager
def _products_in_tf32() -> Iterator[None]:
    products = torch.backends.cuda.matmul
    before, products.allow_tf32 = products.allow_tf32, True
    try:
        yield
    finally:
        products.allow_tf32 = before


def _product_s(device: torch.device, dtype: torch.dtype, size: int, runs: int) -> float:
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty(size, size, device=device, dtype=dtype)
    return _fastest(lambda: torch.mm(a, b, out=out), device, runs)


def _copy_s(device: torch.device, count: int, runs: int) -> float:
    source = torch.zeros(count, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return _fastest(lambda: target.copy_(source), device, runs)


def _fastest(run: Callable[[], Any], device: torch.device, runs: int) -> float:
    """Seconds. On a CPU it goes on for a while: threads that other programs hold up for a moment would be a ceiling too low."""
    run()
    until = perf_counter() + (0.0 if device.type == "cuda" else _LEAST_S)
    fastest = min(time_once(run, device)[0] for _ in range(runs))
    while perf_counter() < until:
        fastest = min(fastest, time_once(run, device)[0])
    return fastest / 1e3
