"""``qwen-tts``: the published package of Qwen3-TTS, decoding each chunk with left context that is cut off again, eager.

Its decoder knows no streams: its own ``chunked_decode`` decodes a long utterance piece by piece, each with 25 frames before it, and
that is how its users stream. Read from qwen-tts 0.1.1. Only the module of the decoder is imported, which needs torch and
transformers; importing the package itself would also ask for an audio and a web toolkit.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from vgraph_lab.errors import MissingExtraError
from vgraph_lab.qwen3_tts.geometry import DecoderGeometry

from .protocol import PeerUnavailableError

__all__ = ["QwenTTSPeer"]

_LEFT_CONTEXT_FRAMES = 25  # the default of its chunked_decode
_MADE_FOR = "4.57.3"  # the version of transformers that qwen-tts 0.1.1 asks for
_PLACE = ("core", "tokenizer_12hz")
_NAMESPACE = "vgraph_lab_peer_qwen_tts"


class QwenTTSPeer:
    """The adapter of qwen-tts."""

    name = "qwen-tts"
    what = f"the published package, eager: each chunk with {_LEFT_CONTEXT_FRAMES} frames of left context, cut off again"

    def load(self, weights: Mapping[str, Tensor], geometry: DecoderGeometry, device: torch.device, dtype: torch.dtype) -> _Loaded:
        """See :meth:`~.protocol.Peer.load`."""
        modelling, configuration = _modules()
        try:
            config = configuration.Qwen3TTSTokenizerV2DecoderConfig(**geometry.model_dump())
            with _default_dtype(dtype):  # as its loader does, which keeps the rotary frequencies in fp32
                decoder: nn.Module = modelling.Qwen3TTSTokenizerV2Decoder(config)
            decoder.load_state_dict({name: tensor.cpu() for name, tensor in weights.items()})
        except (TypeError, ValueError, RuntimeError, KeyError, AttributeError) as error:
            raise PeerUnavailableError(f"its decoder cannot be made ({type(error).__name__}: {error}). {_versions()}") from error
        return _Loaded(decoder.to(device).eval().requires_grad_(False), geometry)


class _Loaded:
    def __init__(self, decoder: nn.Module, geometry: DecoderGeometry) -> None:
        self._decoder, self._samples_per_frame = decoder, geometry.samples_per_frame
        self.state_bytes_per_request: int | None = _LEFT_CONTEXT_FRAMES * geometry.num_quantizers * torch.int64.itemsize

    def start(self, rows: int) -> _Stream:
        return _Stream(self._decoder, self._samples_per_frame)


class _Stream:
    """The last frames of each stream; all that is carried over."""

    def __init__(self, decoder: nn.Module, samples_per_frame: int) -> None:
        self._decoder, self._samples_per_frame = decoder, samples_per_frame
        self._context: Tensor | None = None

    def chunk(self, codes: Tensor) -> Tensor:
        longer = codes if self._context is None else torch.cat((self._context, codes), dim=2)
        context_frames = longer.shape[2] - codes.shape[2]
        self._context = longer[..., -_LEFT_CONTEXT_FRAMES:]
        waveform: Tensor = self._decoder(longer)
        return waveform[:, 0, context_frames * self._samples_per_frame :]


def _modules() -> tuple[Any, Any]:
    """The modules of the decoder and of its configuration, under a name of our own.

    Raises:
        MissingExtraError: qwen-tts is not installed.
        PeerUnavailableError: it is, and its decoder cannot be imported.
    """
    spec = PathFinder.find_spec("qwen_tts")
    if spec is None or not spec.submodule_search_locations:
        raise MissingExtraError("qwen-tts", "peers", "measuring the published package")
    if _NAMESPACE not in sys.modules:
        package = ModuleType(_NAMESPACE)
        package.__path__ = [str(Path(folder).joinpath(*_PLACE)) for folder in spec.submodule_search_locations]
        sys.modules[_NAMESPACE] = package
    try:
        return tuple(importlib.import_module(f"{_NAMESPACE}.{kind}_qwen3_tts_tokenizer_v2") for kind in ("modeling", "configuration"))  # type: ignore[return-value]  # of two
    except (ImportError, TypeError, AttributeError) as error:  # another version of transformers has other names and arguments
        raise PeerUnavailableError(f"its decoder cannot be imported ({type(error).__name__}: {error}). {_versions()}") from error


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _versions() -> str:
    return f"qwen-tts {_version('qwen-tts')} is made for transformers {_MADE_FOR}; here is {_version('transformers')}."


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none" if package == "transformers" else "of unknown version"
