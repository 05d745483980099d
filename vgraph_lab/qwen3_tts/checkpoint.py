"""Reading a published ``speech_tokenizer`` folder: ``config.json`` beside safetensors, single or sharded.

Only safetensors are read. A pickle can run code when it is loaded, so pickled checkpoints are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from pydantic import BaseModel
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from vgraph_lab.errors import CheckpointError, did_you_mean
from vgraph_lab.graphs.backends import checked_device

from .config_files import read_config
from .decoder import Code2WavDecoder
from .geometry import DecoderGeometry, TokenizerConfig
from .layers import ConvNeXtBlock, LayerScale, ResidualUnit
from .quantizer import Codebook

__all__ = ["as_float32", "load_decoder", "random_decoder", "read_tensors"]

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_STORED_DTYPES = (*_DTYPES, torch.float64)
_PREFIX, _IGNORED_PREFIX = "decoder.", "encoder."
_MAX_LISTED = 8


class _ShardIndex(BaseModel):
    weight_map: dict[str, str]  # tensor name → shard


def load_decoder(folder: str | Path, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32) -> Code2WavDecoder:
    """The bare eager decoder of a checkpoint folder, in evaluation mode.

    Args:
        folder: a ``speech_tokenizer`` folder, or a model folder that contains one.
        device: where the weights go: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        dtype: float32, bfloat16 or float16.

    Raises:
        BackendError: the device is not there.
        CheckpointError: missing or malformed files; missing, unexpected or mis-shaped tensors, each named with the
            nearest key; tensors that are no finite floats.
    """
    if dtype not in _DTYPES:
        raise CheckpointError(f"dtype must be one of {', '.join(map(str, _DTYPES))}, got {dtype}.")
    place = checked_device(device)
    root = _find_folder(Path(folder))
    config = TokenizerConfig.from_folder(root)
    stored = read_tensors(root, ignored_prefix=_IGNORED_PREFIX)
    with torch.device("meta"):
        decoder = Code2WavDecoder(config.decoder_config, sample_rate=config.output_sample_rate)
    _check_tensors(root, {_PREFIX + k: tuple(v.shape) for k, v in decoder.state_dict().items()}, stored)
    weights = as_float32(root, stored)
    decoder.load_state_dict({name.removeprefix(_PREFIX): tensor for name, tensor in weights.items()}, assign=True)
    return _finish(decoder, place, dtype)


def random_decoder(
    geometry: DecoderGeometry, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32, *, seed: int = 0
) -> Code2WavDecoder:
    """A decoder with reproducible random weights, for measurements at a geometry whose weights are not at hand.

    Weights keep the variance of what they multiply and every branch contributes, so the waveform is a moderate noise:
    neither silent nor clipped. It does not speak.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(tensor: Tensor, fan_in: float, gain: float = 1.0) -> None:
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * gain * fan_in**-0.5)

    decoder = Code2WavDecoder(geometry)
    with torch.no_grad():
        for module in decoder.modules():
            if isinstance(module, nn.ConvTranspose1d):
                normal(module.weight, module.in_channels * module.kernel_size[0] / module.stride[0])
            elif isinstance(module, nn.Conv1d | nn.Linear):
                normal(module.weight, module.weight[0].numel())
            elif isinstance(module, Codebook):
                normal(module.embedding_sum, module.embedding_sum.shape[1])
            elif isinstance(module, LayerScale):
                module.scale.fill_(0.2)
            elif isinstance(module, ConvNeXtBlock):
                module.gamma.fill_(0.2)
            elif isinstance(module, ResidualUnit):
                normal(module.conv2.conv.weight, module.conv2.conv.in_channels, gain=0.3)
        for name, parameter in decoder.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
        decoder.refresh_tables()
        codes = torch.randint(0, geometry.codebook_size, (1, geometry.num_quantizers, 4), generator=generator)
        hidden = decoder.contextualize(decoder.quantize(codes))
        loudness = decoder.decoder(decoder.upsample(hidden)).std()
        decoder.get_parameter(f"decoder.{len(decoder.decoder) - 1}.conv.weight").mul_(0.1 / loudness)
    return _finish(decoder, checked_device(device), dtype)


def _finish(decoder: Code2WavDecoder, device: str | torch.device, dtype: torch.dtype) -> Code2WavDecoder:
    decoder.refresh_tables()  # in fp32: the codebook quotient and the rotary angles are rounded once, at the end
    return decoder.to(device=device, dtype=dtype).eval().requires_grad_(False)


def _find_folder(folder: Path) -> Path:
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder. Expected a published speech_tokenizer folder (config.json beside *.safetensors).")
    nested = folder / "speech_tokenizer"
    return nested if nested.is_dir() else folder


def read_tensors(folder: Path, *, ignored_prefix: str = "\0") -> dict[str, Tensor]:
    """All tensors of a folder's ``model.safetensors``, or of the shards that its index names, on the host.

    Args:
        folder: where the files are.
        ignored_prefix: names that start with this are not read.

    Raises:
        CheckpointError: no safetensors, a damaged file, or an index that disagrees with its shards.
    """
    single, index = folder / _SINGLE, folder / _INDEX
    if single.is_file():
        return _read_file(single, ignored_prefix)
    if not index.is_file():
        found = sorted(p.name for p in folder.iterdir() if p.suffix in {".bin", ".pt", ".pth", ".ckpt", ".pkl"})
        refused = f" Found {', '.join(found)}: pickled checkpoints are refused, convert them to safetensors first." if found else ""
        raise CheckpointError(f"{folder} has neither {_SINGLE} nor {_INDEX}.{refused}")
    placement = read_config(index, _ShardIndex, "an index of shards").weight_map
    present = {path.name for path in folder.iterdir() if path.is_file()}  # asked by name: an index cannot point elsewhere
    tensors: dict[str, Tensor] = {}
    for name in sorted(set(placement.values())):
        if name not in present:
            raise CheckpointError(f"{index.name} names the shard {name[:200]!r}, which is not a file of {folder}.")
        tensors |= _read_file(folder / name, ignored_prefix)
    lost = [key for key in placement if key not in tensors and not key.startswith(ignored_prefix)]
    if lost:
        raise CheckpointError(f"{index.name} promises {len(lost)} tensors that its shards do not hold: {_listed(lost)}.")
    return tensors


def _read_file(path: Path, ignored_prefix: str) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys() if not name.startswith(ignored_prefix)}  # noqa: SIM118 - not a dict
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a readable safetensors file ({error}). It may be truncated or a renamed pickle.") from error


def as_float32(source: Path, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights in fp32.

    Args:
        source: the file or folder that they come from, for the error.
        stored: weights by name, float64, float32, bfloat16 or float16.

    Raises:
        CheckpointError: integers, complex numbers, packed formats, NaN or infinity; each tensor is named.
    """
    unfit = [f"{name} is {tensor.dtype}" for name, tensor in stored.items() if tensor.dtype not in _STORED_DTYPES]
    if unfit:
        accepted = ", ".join(map(str, _STORED_DTYPES))
        raise CheckpointError(f"{len(unfit)} tensors in {source} are no plain floats ({_listed(unfit)}). Accepted: {accepted}.")
    weights = {name: tensor.float() for name, tensor in stored.items()}
    damaged = [name for name, tensor in weights.items() if not torch.isfinite(tensor).all()]
    if damaged:
        raise CheckpointError(
            f"{len(damaged)} tensors in {source} contain NaN, infinity or values beyond fp32: {_listed(damaged)}. The file may be damaged."
        )
    return weights


def _check_tensors(folder: Path, expected: Mapping[str, tuple[int, ...]], stored: Mapping[str, Tensor]) -> None:
    problems: list[str] = []
    missing = sorted(expected.keys() - stored.keys())
    unexpected = sorted(stored.keys() - expected.keys())
    if missing:
        problems.append(
            f"missing {len(missing)}: {_listed([name + did_you_mean(name, unexpected) for name in missing[:_MAX_LISTED]], len(missing))}"
        )
    if unexpected:
        near = [name + did_you_mean(name, missing or expected) for name in unexpected[:_MAX_LISTED]]
        problems.append(f"unexpected {len(unexpected)}: {_listed(near, len(unexpected))}")
    shapes = [
        f"{name} is {list(stored[name].shape)}, the config says {list(shape)}"
        for name, shape in expected.items()
        if name in stored and tuple(stored[name].shape) != shape
    ]
    if shapes:
        problems.append(f"mis-shaped {len(shapes)}: {_listed(shapes)}")
    if problems:
        raise CheckpointError(f"The tensors in {folder} are not those of the decoder in its config. " + "; ".join(problems) + ".")


def _listed(names: list[str], total: int | None = None) -> str:
    shown = names[:_MAX_LISTED]
    more = (len(names) if total is None else total) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")
