"""From speech to codec codes, with the bundled checkpoint's encoder and the decoder's own codebooks.

The network's weights are in ``encoder.safetensors``; projections and codebooks are the decoder's
(``decoder.quantizer.*`` in ``model.safetensors``), so that the two halves cannot drift apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from vgraph_lab import bundled
from vgraph_lab.errors import CheckpointError, InputError, did_you_mean
from vgraph_lab.graphs.backends import checked_device

from .audio import read_audio_start
from .checkpoint import as_float32, read_tensors
from .encoder_network import EncoderGeometry, EncoderNetwork
from .geometry import TokenizerConfig
from .quantizer import SplitResidualVectorQuantizer

__all__ = ["EncodedAudio", "LabEncoder", "encode_audio_file", "load_encoder", "nearest_codes"]

_TENSORS_NAME = "encoder.safetensors"
_QUANTIZER_PREFIX = "decoder.quantizer."
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_ModuleT = TypeVar("_ModuleT", bound=nn.Module)


def nearest_codes(vectors: Tensor, table: Tensor) -> Tensor:
    """Index of the table row nearest to each vector (Euclidean).

    Args:
        vectors: [N, D].
        table: [K, D].

    Returns:
        int64 [N]; the lowest index where two rows are equally near.
    """
    # |v - t|² without |v|², which is the same for every row
    return (table.square().sum(dim=1) - 2 * vectors @ table.T).argmin(dim=1)


class LabEncoder(nn.Module):
    """Speech at the checkpoint's sample rate → codes [B, num_quantizers, F]. Made by :func:`load_encoder`."""

    def __init__(self, network: EncoderNetwork, quantizer: SplitResidualVectorQuantizer) -> None:
        super().__init__()
        self.network, self.quantizer = network, quantizer

    @property
    def sample_rate(self) -> int:
        """Sample rate of the input, in Hz."""
        return self.network.geometry.sample_rate

    @property
    def samples_per_frame(self) -> int:
        """Waveform samples that become one codec frame."""
        return self.network.geometry.samples_per_frame

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.network.input_projection.weight.device

    @torch.no_grad()
    def encode(self, wav: Tensor | np.ndarray[Any, Any], *, sample_rate: int | None = None) -> Tensor:
        """Encode mono speech. The end is padded with silence to a whole frame.

        Args:
            wav: floats [samples] or [B, samples], full scale ±1, on any device.
            sample_rate: of ``wav`` in Hz, if known: anything but the encoder's own rate is refused.

        Returns:
            int64 codes [B, num_quantizers, ceil(samples / samples_per_frame)] on the encoder's device.

        Raises:
            InputError: wrong rate, dtype or shape, no samples, NaN or infinity, or integer PCM stored as floats.
        """
        wav = self._check(_as_tensor(wav), sample_rate).to(device=self.device)
        missing = -wav.shape[-1] % self.samples_per_frame
        return self.quantize(self.network(nn.functional.pad(wav, (0, missing))))

    def quantize(self, latents: Tensor) -> Tensor:
        """Latents [B, codebook_dim, F] → int64 codes [B, num_quantizers, F], in fp32: semantic and acoustic levels apart."""
        batch, _, frames = latents.shape
        codes = []
        for split in (self.quantizer.rvq_first, self.quantizer.rvq_rest):
            residual = split.input_proj(latents.float()).transpose(1, 2).flatten(0, 1)  # [B * F, D]
            for codebook in split.codebooks:
                table = codebook.vectors()
                index = nearest_codes(residual, table)
                residual = residual - table[index]
                codes.append(index.view(batch, frames))
        return torch.stack(codes, dim=1)

    def _check(self, wav: Tensor, sample_rate: int | None) -> Tensor:
        if sample_rate is not None and sample_rate != self.sample_rate:
            raise InputError(f"wav is at {sample_rate} Hz, the encoder takes {self.sample_rate} Hz. Try read_audio(path), which resamples.")
        if not wav.is_floating_point():
            raise InputError(f"wav must be floats with full scale ±1, got {wav.dtype}. Divide int16 PCM by 32768.")
        if wav.dim() not in (1, 2):
            raise InputError(f"wav must be [samples] or [B, samples], got {list(wav.shape)}. {_shape_hint(wav)}")
        wav = (wav[None] if wav.dim() == 1 else wav).float()
        if 0 in wav.shape:
            raise InputError(f"wav has no {'rows' if wav.shape[0] == 0 else 'samples'} (shape {list(wav.shape)}).")
        if not torch.isfinite(wav).all():
            raise InputError(f"wav contains NaN or infinity ({int((~torch.isfinite(wav)).sum())} of {wav.numel()} samples).")
        peak = float(wav.abs().amax())
        if peak > 128:  # no float audio overshoots by 42 dB; integer PCM stored as floats does
            raise InputError(f"wav reaches {peak:.0f}; full scale is ±1. Divide integer PCM by its full scale (32768 for int16).")
        return wav


def _as_tensor(wav: Tensor | np.ndarray[Any, Any]) -> Tensor:
    if isinstance(wav, Tensor):
        if wav.layout is not torch.strided or wav.is_nested or wav.is_meta:
            kind = "nested" if wav.is_nested else "meta" if wav.is_meta else str(wav.layout)
            raise InputError(f"wav must be a dense (strided) tensor with values, got a {kind} one.")
        return wav
    try:
        array = np.asarray(wav)
    except ValueError as error:
        raise InputError(f"wav is {type(wav).__name__} that is no rectangular array of samples ({error}).") from None
    if array.dtype.kind != "f":
        raise InputError(f"wav must be floats with full scale ±1, got {array.dtype}. Divide int16 PCM by 32768.")
    return torch.from_numpy(array.astype(np.float64, order="C"))  # a copy: strides below 0 and foreign byte orders go with it


def _shape_hint(wav: Tensor) -> str:
    if wav.dim() == 3 and 1 in wav.shape[1:]:
        return f"It is mono: try {'wav[:, 0]' if wav.shape[1] == 1 else 'wav[..., 0]'}."
    return "Mix channels to mono first." if wav.dim() == 3 else "One row per recording, one value per sample."


def load_encoder(folder: str | Path, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32) -> LabEncoder:
    """The encoder of a checkpoint folder, in evaluation mode.

    Args:
        folder: a folder with ``encoder_config.json`` and ``encoder.safetensors`` beside the decoder's files.
        device: where the weights go: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        dtype: of the network, float32, bfloat16 or float16. The quantiser is fp32 always; below fp32 some codes differ.

    Raises:
        CheckpointError: no encoder in the folder, damaged files, wrong tensors, or an encoder that does not fit the
            decoder's codebooks.
    """
    place = checked_device(device)
    if dtype not in _DTYPES:
        raise CheckpointError(f"dtype must be one of {', '.join(map(str, _DTYPES))}, got {dtype}.")
    root = Path(folder)
    if not root.is_dir():
        raise CheckpointError(f"{root} is not a folder. Expected a checkpoint folder with encoder.safetensors.")
    geometry = EncoderGeometry.from_folder(root)
    config = TokenizerConfig.from_folder(root)
    decoder = config.decoder_config
    for ours, theirs, what in (
        (geometry.latent_dim, decoder.codebook_dim, "latent_dim against the decoder's codebook_dim"),
        (geometry.samples_per_frame, decoder.samples_per_frame, "samples per frame"),
        (geometry.sample_rate, config.output_sample_rate, "sample rate"),
    ):
        if ours != theirs:
            raise CheckpointError(f"The encoder in {root} does not fit its decoder: {what} is {ours} and {theirs}.")
    network = _loaded(lambda: EncoderNetwork(geometry), _read_encoder_tensors(root), root / _TENSORS_NAME)
    stored = {
        name.removeprefix(_QUANTIZER_PREFIX): tensor for name, tensor in read_tensors(root).items() if name.startswith(_QUANTIZER_PREFIX)
    }
    quantizer = _loaded(lambda: SplitResidualVectorQuantizer(decoder), stored, root / "model.safetensors")
    return LabEncoder(network.to(place, dtype), quantizer.to(place)).eval().requires_grad_(False)


@dataclass(frozen=True, eq=False)
class EncodedAudio:
    """A recording as codes.

    Attributes:
        path: the file.
        codes: int64 [num_quantizers, frames] on the CPU.
        wav: what was encoded: mono float32 [samples] at ``sample_rate``, without the silence that fills the last frame.
        sample_rate: in Hz, of the codec.
        source_s: length of the whole file in seconds.
    """

    path: Path
    codes: Tensor
    wav: Tensor
    sample_rate: int
    source_s: float

    @property
    def encoded_s(self) -> float:
        """Seconds that were encoded."""
        return len(self.wav) / self.sample_rate

    @property
    def cut_s(self) -> float:
        """Seconds at the end of the file that were not encoded; 0 if it was encoded whole."""
        rest = self.source_s - self.encoded_s
        return rest if rest > 1 / self.sample_rate else 0.0  # resampling rounds the length

    @property
    def note(self) -> str:
        """What was cut off, for people; empty if nothing was."""
        if not self.cut_s:
            return ""
        return f"{self.path.name}: the first {self.encoded_s:g} s of {self.source_s:.1f} s were encoded. Raise max_seconds for more."

    def __repr__(self) -> str:
        cut = f" of {self.source_s:.2f} s" if self.cut_s else ""
        return f"EncodedAudio({self.path.name}: {self.encoded_s:.2f} s{cut}, codes {list(self.codes.shape)})"


def encode_audio_file(path: str | Path, *, encoder: LabEncoder | None = None, max_seconds: float = 30.0) -> EncodedAudio:
    """Encode a recording of one's own: channels are averaged, other rates are resampled, and a long one is cut.

    Args:
        path: WAV, FLAC, Ogg, MP3 or another format of libsndfile. Silence is as good as anything.
        encoder: the bundled checkpoint's by default.
        max_seconds: where to cut; the result's ``note`` says what was cut off.

    Raises:
        InputError: no such file, not audio, empty, with NaN or infinity in it, or a limit that is no positive number.
        CheckpointError: there is no bundled checkpoint.
    """
    encoder = encoder or load_encoder(bundled.checkpoint_folder())
    wav, source_s = read_audio_start(path, sample_rate=encoder.sample_rate, seconds=max_seconds)
    codes = encoder.encode(wav, sample_rate=encoder.sample_rate)[0].cpu()
    return EncodedAudio(Path(path), codes, wav, encoder.sample_rate, source_s)


def _read_encoder_tensors(root: Path) -> dict[str, Tensor]:
    path = root / _TENSORS_NAME
    if not path.is_file():
        raise CheckpointError(f"{root} has an encoder configuration but no {_TENSORS_NAME}. Pickled weights are not read.")
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a readable safetensors file ({error}). It may be truncated or a renamed pickle.") from error


def _loaded(build: Callable[[], _ModuleT], stored: Mapping[str, Tensor], source: Path) -> _ModuleT:
    with torch.device("meta"):  # first without memory: the config may be of another size than the file
        expected = {name: tensor.shape for name, tensor in build().state_dict().items()}
    problems = [f"missing {name}{did_you_mean(name, stored.keys() - expected.keys())}" for name in expected.keys() - stored.keys()]
    problems += [f"unexpected {name}" for name in stored.keys() - expected.keys()]
    problems += [
        f"{name} is {list(stored[name].shape)}, the config says {list(shape)}"
        for name, shape in expected.items()
        if name in stored and stored[name].shape != shape
    ]
    if problems:
        listed = "; ".join(sorted(problems)[:8]) + (f" and {len(problems) - 8} more" if len(problems) > 8 else "")
        raise CheckpointError(f"The tensors in {source} are not those that its config describes: {listed}.")
    weights = as_float32(source, stored)
    module = build()
    module.load_state_dict(weights)
    return module
