"""The same mathematics with fewer and larger kernels: channels-last, prepared weights, everything element by element fused.

    codes ─embed─▶ pre_conv ─▶ 8 × (norm·qkv ▸ attention ▸ output+x ▸ norm·gated MLP ▸ down+x) ─▶ 2 × (upsample ▸ depthwise·norm ▸ MLP)
          ─▶ conv ▸ 4 × (transposed conv ▸ 3 × (dilated conv ▸ pointwise conv+x)) ▸ conv ─▶ samples

Codebooks are projected beforehand, gains and layer scales are part of the matrices. Rounding differs from the plain form, and there
is less of it: sums and everything after them stay in fp32 until they are stored.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from vgraph_lab.qwen3_tts.decoder import Code2WavDecoder
from vgraph_lab.qwen3_tts.incremental_state import StateArena
from vgraph_lab.qwen3_tts.layers import CausalConv1d, CausalConvTranspose1d, ConvNeXtBlock, DecoderBlock, ResidualUnit, SnakeBeta

from . import kernels
from .buffers import LookBacks
from .launch import launch
from .products import Product, TileChoice, of_conv, of_linear, of_matrix, of_transposed_conv
from .units import MOST_FUSED_CHANNELS, FusedUnit

__all__ = ["FastStep"]

_SUMMED = 256  # samples of one program that sums taps
_FEW_PROGRAMS = 128  # each can have a multiprocessor to itself


class FastStep(nn.Module):
    """One step of :func:`~vgraph_lab.qwen3_tts.incremental.continue_stream`, on the same arena.

    Args:
        decoder: its weights are copied; :meth:`take_over` copies them again.
        choose: gives a tile to each product.
    """

    table: Tensor  # [Q, K, codebook_dim]
    cos: Tensor
    sin: Tensor

    def __init__(self, decoder: Code2WavDecoder, choose: TileChoice) -> None:
        super().__init__()
        g = decoder.geometry
        self.geometry, self._choose = g, choose
        self.samples_per_frame = decoder.samples_per_frame
        with torch.no_grad(), torch.inference_mode(False):
            self.look_backs = LookBacks(decoder)
            self.register_buffer("table", _projected_codebooks(decoder), persistent=False)
            self.pre_conv = of_conv(decoder.pre_conv)
            transformer = decoder.pre_transformer
            self.register_buffer("cos", transformer.cos, persistent=False)
            self.register_buffer("sin", transformer.sin, persistent=False)
            self.input_proj = of_linear(transformer.input_proj)
            self.layers = nn.ModuleList(_TransformerLayer(layer, g.num_attention_heads, g.head_dim) for layer in transformer.layers)
            self.output_proj = of_linear(transformer.output_proj, norm=transformer.norm)
            self.upsample = nn.ModuleList(_UpsampleStage(conv, block) for conv, block in cast("Any", decoder.upsample))
            first, *blocks, last_snake, last = cast("Any", decoder.decoder)
            snakes = [block.block[0] for block in blocks]
            self.first = of_conv(first, snake=snakes[0])
            self.blocks = nn.ModuleList(_Block(block, after) for block, after in zip(blocks, [*snakes[1:], last_snake], strict=True))
            self.last = _LastConv(last)

    @torch.no_grad()
    def take_over(self, decoder: Code2WavDecoder) -> None:
        """Prepare the weights of ``decoder`` again, in the same memory: graphs read them there."""
        for mine, fresh in zip(self.buffers(), FastStep(decoder, self._choose).buffers(), strict=True):
            if mine.data_ptr() != fresh.data_ptr():  # angles are the decoder's own
                mine.copy_(fresh)

    def forward(self, arena: StateArena, codes: Tensor, places: Tensor) -> Tensor:
        """codes int64 [B, Q, n], places int64 [B, 2] (slot, number of the first frame) → fp32 [B, n · samples_per_frame]."""
        batch, _, frames = codes.shape
        memory, buffers = self.look_backs.allocate(batch, frames, self.table)
        self.look_backs.load(arena, memory, places, frames)
        waiting = iter(buffers)

        x = next(waiting)
        new = x[:, x.shape[1] - frames :]
        _embed(codes, self.table, new)
        hidden = self._dense(self.pre_conv, x, frames)
        hidden = self._dense(self.input_proj, hidden, frames)
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, arena, index, places, self.cos, self.sin, self._choose)
        hidden = self._dense(self.output_proj, hidden, frames)
        samples = frames
        for number, stage in enumerate(self.upsample, start=1):
            looked_back = next(waiting)
            after = next(waiting) if number == len(self.upsample) else None
            hidden = stage(hidden, looked_back, after, self._choose)
            samples *= cast("_UpsampleStage", stage).stride
        x = hidden
        into = next(waiting)
        self.first(x, samples, choose=self._choose, activated=into[:, into.shape[1] - samples :])
        for block in self.blocks:
            into, samples = block(into, samples, waiting, self._choose)
        waveform: Tensor = self.last(into, samples, self._choose)
        self.look_backs.save(arena, memory, places, frames)
        return waveform

    def _dense(self, product: Product, x: Tensor, rows: int) -> Tensor:
        out = x.new_empty(x.shape[0], rows, product.columns)
        product(x, rows, choose=self._choose, out=out)
        return out


class _TransformerLayer(nn.Module):
    def __init__(self, layer: Any, heads: int, head_dim: int) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.heads, self.head_dim = heads, head_dim
        dtype = attention.q_proj.weight.dtype
        parts = [attention.q_proj, attention.k_proj, attention.v_proj]
        bias = None if attention.q_proj.bias is None else torch.cat([part.bias.float() for part in parts])
        stacked = torch.cat([part.weight.float() for part in parts]).T
        self.qkv = of_matrix(stacked, bias, dtype, norm=layer.input_layernorm)
        self.output = of_linear(attention.o_proj, scale=layer.self_attn_layer_scale.scale)
        gated = torch.cat([mlp.gate_proj.weight.float(), mlp.up_proj.weight.float()]).T
        self.gate_up = of_matrix(gated, None, dtype, norm=layer.post_attention_layernorm, gate=True)
        self.down = of_linear(mlp.down_proj, scale=layer.mlp_layer_scale.scale)

    def forward(self, x: Tensor, arena: StateArena, index: int, places: Tensor, cos: Tensor, sin: Tensor, choose: TileChoice) -> Tensor:
        batch, frames, width = x.shape
        qkv = x.new_empty(batch, frames, self.qkv.columns)
        self.qkv(x, frames, choose=choose, out=qkv)
        attended = x.new_empty(batch, frames, self.heads * self.head_dim)
        kept = arena.frames_of_layer(index)
        launch(
            kernels.attend,
            (batch * self.heads,),
            qkv,
            kept,
            places,
            cos,
            sin,
            attended,
            kept.stride(0),
            frames,
            HEADS=self.heads,
            D=self.head_dim,
            PAGE=kept.stride(1),
            RING=arena.ring,
            scale=self.head_dim**-0.5,
            PRECISION="ieee",
            BQ=16 if frames <= 16 else 32,
            BKEY=128,  # the window in one go: its loads wait for each other otherwise
            num_warps=8 if batch * self.heads <= _FEW_PROGRAMS else 4,
            num_stages=1,
        )
        middle = x.new_empty(batch, frames, width)
        self.output(attended, frames, choose=choose, residual=x, out=middle)
        gated = x.new_empty(batch, frames, self.gate_up.columns)
        self.gate_up(middle, frames, choose=choose, out=gated)
        out = x.new_empty(batch, frames, width)
        self.down(gated, frames, choose=choose, residual=middle, out=out)
        return out


class _UpsampleStage(nn.Module):
    depthwise: Tensor
    bias: Tensor
    gain: Tensor
    shift: Tensor

    def __init__(self, conv: CausalConvTranspose1d, block: ConvNeXtBlock) -> None:
        super().__init__()
        self.stride = conv.stride
        self.conv = of_transposed_conv(conv)
        depthwise = block.dwconv.conv
        channels = depthwise.in_channels
        self.taps, self.eps = depthwise.weight.shape[2], block.norm.eps
        bias = torch.zeros(channels, device=depthwise.weight.device) if depthwise.bias is None else depthwise.bias.float()
        self.register_buffer("depthwise", depthwise.weight[:, 0].T.float().contiguous(), persistent=False)
        self.register_buffer("bias", bias.clone(), persistent=False)
        self.register_buffer("gain", block.norm.weight.float().clone(), persistent=False)
        self.register_buffer("shift", block.norm.bias.float().clone(), persistent=False)
        self.widen = of_linear(block.pwconv1, gelu=True)
        self.narrow = of_linear(block.pwconv2, scale=block.gamma)

    def forward(self, x: Tensor, looked_back: Tensor, after: Tensor | None, choose: TileChoice) -> Tensor:
        """``after`` is the next layer's input, if that one looks back; it is returned."""
        batch, rows, channels = x.shape
        samples = rows * self.stride
        new = looked_back[:, looked_back.shape[1] - samples :]
        self.conv(x, rows, choose=choose, out=new)
        normed = x.new_empty(batch, samples, channels)
        launch(
            kernels.depthwise_norm,
            (batch * samples,),
            looked_back,
            self.depthwise,
            self.bias,
            self.gain,
            self.shift,
            normed,
            looked_back.stride(0),
            samples,
            channels,
            self.eps,
            TAPS=self.taps,
            BC=_power_of_two(channels),
            num_warps=4,
        )
        wide = x.new_empty(batch, samples, self.widen.columns)
        self.widen(normed, samples, choose=choose, out=wide)
        into = x.new_empty(batch, samples, channels) if after is None else after
        self.narrow(wide, samples, choose=choose, residual=new, out=into[:, into.shape[1] - samples :])
        return into


class _Unit(nn.Module):
    def __init__(self, unit: ResidualUnit, after: SnakeBeta) -> None:
        super().__init__()
        wide, narrow = of_conv(unit.conv1, snake=unit.act2), of_conv(unit.conv2, snake=after)
        self.wide, self.narrow = wide, narrow
        self.fused = FusedUnit(wide, narrow) if wide.columns <= MOST_FUSED_CHANNELS else None

    def forward(self, x: Tensor, rows: int, choose: TileChoice, *, stream: Tensor, out: Tensor | None, activated: Tensor) -> None:
        """x [B, rows + left, C], stream [B, rows, C] → the next stream, if wanted, and its SnakeBeta."""
        if self.fused is not None:
            self.fused(x, rows, choose=choose, stream=stream, out=out, activated=activated)
            return
        inner = torch.empty_like(stream)
        self.wide(x, rows, choose=choose, activated=inner)
        self.narrow(inner, rows, choose=choose, residual=stream, out=out, activated=activated)


class _Block(nn.Module):
    """Transposed convolution and residual units; each gives its successor's input after that one's SnakeBeta."""

    def __init__(self, block: DecoderBlock, after: SnakeBeta) -> None:
        super().__init__()
        _, conv, *units = cast("Any", block.block)
        self.stride = conv.stride
        self.conv = of_transposed_conv(conv, snake=units[0].act1)
        afters = [*(unit.act1 for unit in units[1:]), after]
        self.units = nn.ModuleList(_Unit(unit, following) for unit, following in zip(units, afters, strict=True))

    def forward(self, x: Tensor, rows: int, waiting: Any, choose: TileChoice) -> tuple[Tensor, int]:
        samples, channels = rows * self.stride, self.conv.columns // self.stride
        stream = x.new_empty(x.shape[0], samples, channels)
        into = next(waiting)
        self.conv(x, rows, choose=choose, out=stream, activated=into[:, into.shape[1] - samples :])
        for number, unit in enumerate(self.units, start=1):
            after, longer = next(waiting), None if number == len(self.units) else torch.empty_like(stream)
            unit(into, samples, choose, stream=stream, out=longer, activated=after[:, after.shape[1] - samples :])
            into, stream = after, stream if longer is None else longer
        return into, samples


class _LastConv(nn.Module):
    """The convolution to one channel: each sample times all taps, then sums along them."""

    bias: Tensor

    def __init__(self, conv: CausalConv1d) -> None:
        super().__init__()
        weight = conv.conv.weight  # [1, C, taps]
        self.taps = weight.shape[2]
        bias = weight.new_zeros(1) if conv.conv.bias is None else conv.conv.bias
        self.register_buffer("bias", bias.float().clone(), persistent=False)
        self.products = of_matrix(weight[0].float(), None, weight.dtype)

    def forward(self, x: Tensor, samples: int, choose: TileChoice) -> Tensor:
        batch, rows, _ = x.shape
        products = x.new_empty(batch, rows, self.taps, dtype=torch.float32)
        self.products(x, rows, choose=choose, out=products)
        waveform = x.new_empty(batch, samples, dtype=torch.float32)
        launch(
            kernels.sum_taps,
            (-(-samples // _SUMMED), batch),
            products,
            self.bias,
            waveform,
            samples,
            rows - samples,
            TAPS=self.taps,
            BLOCK=_SUMMED,
        )
        return waveform


def _embed(codes: Tensor, table: Tensor, out: Tensor) -> None:
    batch, levels, frames = codes.shape
    channels = table.shape[2]
    launch(
        kernels.embed,
        (batch * frames,),
        codes,
        table,
        out,
        out.stride(0),
        frames,
        table.shape[1],
        C=channels,
        Q=levels,
        BC=_power_of_two(channels),
        num_warps=4,
    )


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


def _projected_codebooks(decoder: Code2WavDecoder) -> Tensor:
    """[Q, K, codebook_dim]: each code vector behind its projection, so that their sum is the quantised feature."""
    q = decoder.quantizer
    parts = [part.table.float() @ part.output_proj.weight[..., 0].T.float() for part in (q.rvq_first, q.rvq_rest)]
    return torch.cat(parts).to(decoder.dtype)
