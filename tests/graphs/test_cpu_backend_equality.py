"""A CPU graph gives the bits that the eager call gives: a zoo of layers, and a whole decoder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from vgraph_lab.graphs.backends.cpu import CpuGraphBackend, out_variant
from vgraph_lab.qwen3_tts.decoder import Code2WavDecoder


@dataclass
class Case:
    """A function of static inputs, and the modules that it reads."""

    function: Callable[..., Any]
    inputs: tuple[Tensor, ...]
    modules: tuple[nn.Module, ...] = field(default=())

    def __call__(self) -> Any:
        return self.function(*self.inputs)

    @property
    def owned(self) -> list[Tensor]:
        return [tensor for module in self.modules for tensor in (*module.parameters(), *module.buffers())]

    def refill(self) -> None:
        for tensor in self.inputs:
            if tensor.is_floating_point():
                tensor.normal_()
            elif tensor.is_complex():
                torch.view_as_real(tensor).normal_()
            else:
                tensor.random_(0, 7)


def conv_stack() -> Case:
    net = nn.Sequential(
        nn.Conv1d(4, 8, 7, padding=3),
        nn.GELU(),
        nn.Conv1d(8, 8, 3, dilation=3, padding=3, groups=8),
        nn.SiLU(),
        nn.ConvTranspose1d(8, 4, 4, stride=2),
    )
    return Case(net, (torch.randn(2, 4, 33),), (net,))


def lstm() -> Case:
    net = nn.LSTM(6, 5, num_layers=2, bidirectional=True, batch_first=True)
    return Case(net, (torch.randn(2, 9, 6),), (net,))


def encoder_layer() -> Case:
    net = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).eval()
    return Case(net, (torch.randn(2, 11, 16),), (net,))


def attention(masked: bool, causal: bool) -> Case:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril(3) if masked else None
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)

    return Case(attend, tuple(torch.randn(2, 3, 13, 8) for _ in range(3)))


def interpolate(mode: str) -> Case:
    return Case(lambda x: F.interpolate(x, scale_factor=2.5, mode=mode), (torch.randn(2, 3, 17),))


def foreach() -> Case:
    def update(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        scaled = torch._foreach_mul([a, b], 0.5)
        torch._foreach_add_(scaled, [b, a])
        return torch._foreach_exp(scaled)

    return Case(update, (torch.randn(5, 3), torch.randn(5, 3)))


def complex_views() -> Case:
    def rotate(x: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * z
        return torch.view_as_real(y.conj().resolve_conj()) + torch.view_as_real(y), y.conj().imag.neg(), torch.fft.irfft(y)

    return Case(rotate, (torch.randn(3, 8), torch.randn(3, 4, dtype=torch.complex64)))


def quantiser() -> Case:
    tables = nn.Embedding(7, 6)
    return Case(lambda codes: tables(codes).sum(1).transpose(1, 2), (torch.randint(0, 7, (2, 3, 5)),), (tables,))


def spectrogram() -> Case:
    def analyse(x: Tensor) -> tuple[Tensor, Tensor]:
        z = torch.stft(x, 16, hop_length=4, window=torch.hann_window(16), return_complex=True)
        return z.abs(), torch.fft.irfft(z.mT).conj()

    return Case(analyse, (torch.randn(2, 64),))


def batch_norm() -> Case:
    net = nn.BatchNorm1d(4).eval()
    return Case(net, (torch.randn(3, 4, 9),), (net,))


def weight_norm() -> Case:
    net = nn.utils.parametrizations.weight_norm(nn.Conv1d(3, 3, 3))
    return Case(net, (torch.randn(1, 3, 9),), (net,))


def scatter() -> Case:
    def place(x: Tensor) -> tuple[Tensor, ...]:
        index = torch.arange(x.shape[1])
        y = torch.zeros_like(x).index_copy_(1, index.flip(0), x)
        y[:, 1:3] = x[:, :2]
        y[0].masked_fill_(y[0] > 0, -1.0)
        y[x.abs() > 1] = 0.0
        return y, *x.sort(dim=1), x.cumsum(1), torch.where(x > 0, x, 0.0)

    return Case(place, (torch.randn(3, 6),))


def output_argument() -> Case:
    def write(x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        torch.exp(x, out=y)
        y.squeeze_().unsqueeze_(0).transpose_(0, 1)
        return torch.add(y, 1.0, out=torch.empty_like(y))

    return Case(write, (torch.randn(1, 7),))


@torch.library.custom_op("vgraph_lab_test::shift", mutates_args=("x",))
def shift(x: Tensor, by: float) -> Tensor:
    x.add_(by)
    return x.exp()


def custom_operator() -> Case:
    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        return shift(y, 0.5) + shift(y, 1.0), y

    return Case(run, (torch.randn(4),))


def half_precision() -> Case:
    net = nn.Linear(8, 8).to(torch.bfloat16)
    return Case(lambda x: net(x.to(torch.bfloat16)).float(), (torch.randn(3, 8),), (net,))


def autocast() -> Case:
    net = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))

    def run(x: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return net(net(x))

    return Case(run, (torch.randn(3, 8),), (net,))


def constants() -> Case:
    def run(x: Tensor) -> tuple[Tensor, ...]:
        total = torch.tensor(1.5)
        total += x.sum()
        return total, x * 2 + torch.arange(x.shape[0]), torch.zeros(0), x[:0]

    return Case(run, (torch.randn(4),))


CASES: dict[str, Callable[[], Case]] = {
    "conv_stack": conv_stack,
    "lstm": lstm,
    "encoder_layer": encoder_layer,
    "attention": lambda: attention(masked=False, causal=False),
    "attention_mask": lambda: attention(masked=True, causal=False),
    "attention_causal": lambda: attention(masked=False, causal=True),
    "interpolate_nearest": lambda: interpolate("nearest"),
    "interpolate_linear": lambda: interpolate("linear"),
    "foreach": foreach,
    "complex_views": complex_views,
    "quantiser": quantiser,
    "spectrogram": spectrogram,
    "batch_norm": batch_norm,
    "weight_norm": weight_norm,
    "scatter": scatter,
    "output_argument": output_argument,
    "custom_operator": custom_operator,
    "half_precision": half_precision,
    "autocast": autocast,
    "constants": constants,
}


def same_bits(left: Any, right: Any) -> bool:
    pairs = zip(tree_leaves(left), tree_leaves(right), strict=True)
    return all((x.shape, x.dtype, x.stride()) == (y.shape, y.dtype, y.stride()) and torch.equal(bits(x), bits(y)) for x, y in pairs)


def bits(tensor: Tensor) -> Tensor:
    return tensor.resolve_conj().resolve_neg().flatten().view(torch.uint8)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", CASES)
def test_replay_is_bit_equal_to_eager(
    name: str, mode: type[torch.no_grad] | type[torch.inference_mode], cpu_backend: CpuGraphBackend
) -> None:
    torch.manual_seed(1)
    with mode():
        case = CASES[name]()
        audited = cpu_backend.warm_up(case, static_inputs=case.inputs, owned=case.owned, audit=True)
        graph, output = cpu_backend.capture(case, cpu_backend.create_pool(), static_inputs=case.inputs, owned=case.owned)
        assert same_bits(audited, output)
        for _ in range(3):
            case.refill()
            graph.replay()
            assert same_bits(case(), output)


def test_training_batch_norm_updates_its_statistics_once_per_replay(cpu_backend: CpuGraphBackend) -> None:
    net, twin, x = nn.BatchNorm1d(4), nn.BatchNorm1d(4), torch.randn(3, 4, 9)
    graph, output = cpu_backend.capture(
        lambda: net(x), cpu_backend.create_pool(), static_inputs=[x], owned=[*net.parameters(), *net.buffers()]
    )
    assert net.running_mean is not None
    assert not net.running_mean.any()
    for _ in range(2):
        x.normal_()
        graph.replay()
        with torch.no_grad():
            assert same_bits(twin(x), output)
        assert same_bits(list(twin.buffers()), list(net.buffers()))


@pytest.mark.parametrize("frames", [1, 25, 97])
def test_decoder_is_bit_equal_over_fresh_codes(frames: int, tiny_decoder: Code2WavDecoder, cpu_backend: CpuGraphBackend) -> None:
    decoder = tiny_decoder
    owned = [*decoder.parameters(), *decoder.buffers()]
    size = decoder.geometry.codebook_size
    generator = torch.Generator().manual_seed(frames)
    codes = torch.randint(0, size, (1, 16, frames), generator=generator)

    def decode() -> Tensor:
        return decoder.decode(codes)

    cpu_backend.warm_up(decode, static_inputs=[codes], owned=owned, audit=True)
    graph, output = cpu_backend.capture(decode, cpu_backend.create_pool(), static_inputs=[codes], owned=owned)
    for attempt in range(20):
        codes.random_(0, size, generator=generator)
        with torch.no_grad() if attempt % 2 else torch.inference_mode():
            eager = decode()
            graph.replay()
            assert torch.equal(eager, output), f"fresh codes {attempt}"


@pytest.mark.parametrize("function", [torch.linalg.qr, torch.qr], ids=["linalg", "torch"])
@pytest.mark.parametrize("shape", [(3, 3), (5, 3), (3, 5), (2, 4, 4)])
@pytest.mark.filterwarnings("ignore:torch.qr is deprecated")
def test_qr_follows_its_input(shape: tuple[int, ...], function: Callable[[Tensor], Any], cpu_backend: CpuGraphBackend) -> None:
    x = torch.randn(shape)
    graph, (q, r) = cpu_backend.capture(lambda: function(x), cpu_backend.create_pool(), static_inputs=[x], owned=[])
    for _ in range(3):
        x.normal_()
        graph.replay()
        eager_q, eager_r = function(x)
        assert torch.equal(q, eager_q)
        assert torch.equal(r, eager_r)


def test_an_out_overload_that_writes_nothing_is_not_used(cpu_backend: CpuGraphBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(5)
    monkeypatch.setattr(out_variant, "step", lambda op, args, kwargs: lambda: None)
    graph, output = cpu_backend.capture(lambda: x.sin(), cpu_backend.create_pool(), static_inputs=[x], owned=[])
    x.normal_()
    graph.replay()
    assert torch.equal(output, x.sin())


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize(
    "wrong",
    [
        (torch.ops.aten.cos.out, ("out",)),  # other bits
        (torch.ops.aten.sum.out, ("out",)),  # another shape
        (torch.ops.aten.add.out, ("out",)),  # other arguments
    ],
    ids=["bits", "shape", "arguments"],
)
def test_an_out_overload_that_differs_is_not_used(wrong: Any, cpu_backend: CpuGraphBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(5)
    monkeypatch.setattr(out_variant, "_out_variant", lambda op: wrong)
    graph, output = cpu_backend.capture(lambda: x.sin().sin(), cpu_backend.create_pool(), static_inputs=[x], owned=[])
    assert torch.equal(output, x.sin().sin())
    x.normal_()
    graph.replay()
    assert torch.equal(output, x.sin().sin())
