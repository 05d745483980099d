"""Peers: adapters from entry points, and the one of qwen-tts with a stand-in for its package. Truth: a decoder that repeats codes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch

from vgraph_lab.bench import peers as peers_module
from vgraph_lab.bench.peers import ENTRY_POINTS, PeerUnavailableError, available_peers, qwen_tts
from vgraph_lab.bench.peers.qwen_tts import QwenTTSPeer
from vgraph_lab.errors import MissingExtraError
from vgraph_lab.qwen3_tts.geometry import DecoderGeometry

CPU = torch.device("cpu")
GEOMETRY = DecoderGeometry(upsampling_ratios=(2,), upsample_rates=(2,), decoder_dim=4, num_quantizers=2)

# Says which frames it was given: every sample of a frame is that frame's first code.
REPEATING = """
import torch
from .configuration_qwen3_tts_tokenizer_v2 import Qwen3TTSTokenizerV2DecoderConfig

class Qwen3TTSTokenizerV2Decoder(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gain = torch.nn.Parameter(torch.zeros(1))
        self.per_frame = config.samples_per_frame
        self.seen = []

    def forward(self, codes):
        self.seen.append(codes.shape[-1])
        return self.gain * codes[:, :1].to(self.gain.dtype).repeat_interleave(self.per_frame, dim=2)
"""
CONFIGURATION = """
class Qwen3TTSTokenizerV2DecoderConfig:
    def __init__(self, upsampling_ratios, upsample_rates, **rest):
        self.samples_per_frame = upsampling_ratios[0] * upsample_rates[0]
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Installs a package of that name, whose own import fails: the adapter must not need it."""

    def install(modelling: str = REPEATING, configuration: str = CONFIGURATION) -> None:
        folder = tmp_path / "qwen_tts"
        inner = folder / "core" / "tokenizer_12hz"
        inner.mkdir(parents=True)
        (folder / "__init__.py").write_text("raise ImportError('an audio toolkit is missing')")
        (inner / "modeling_qwen3_tts_tokenizer_v2.py").write_text(modelling)
        (inner / "configuration_qwen3_tts_tokenizer_v2.py").write_text(configuration)
        monkeypatch.syspath_prepend(str(tmp_path))

    def forget() -> None:
        for name in [name for name in sys.modules if name.startswith(qwen_tts._NAMESPACE)]:
            del sys.modules[name]

    forget()
    yield install
    forget()


def load(gain: float = 1.0, dtype: torch.dtype = torch.float32) -> Any:
    return QwenTTSPeer().load({"gain": torch.full((1,), gain, dtype=dtype)}, GEOMETRY, CPU, dtype)


def test_each_chunk_comes_with_its_left_context(package: Callable[..., None]) -> None:
    package()
    loaded = load(gain=2.0)
    codes = torch.arange(2 * 2 * 70).view(2, 2, 70)
    stream = loaded.start(2)
    with torch.no_grad():
        parts = [stream.chunk(part) for part in codes.split([1, 20, 30, 19], dim=2)]
    assert [part.shape for part in parts] == [(2, 4), (2, 80), (2, 120), (2, 76)]
    assert torch.equal(torch.cat(parts, dim=1), 2.0 * codes[:, 0].float().repeat_interleave(4, dim=1)), "every frame once, in order"
    assert loaded._decoder.seen == [1, 1 + 20, 21 + 30, 25 + 19], "with at most 25 frames before"
    assert loaded.state_bytes_per_request == 25 * 2 * 8


def test_streams_do_not_know_each_other(package: Callable[..., None]) -> None:
    package()
    loaded = load()
    codes = torch.ones(1, 2, 5, dtype=torch.int64)
    with torch.no_grad():
        loaded.start(1).chunk(codes)
        loaded.start(1).chunk(codes)
    assert loaded._decoder.seen == [5, 5]


def test_weights_keep_their_dtype_and_the_default_comes_back(package: Callable[..., None]) -> None:
    package()
    loaded = load(dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in loaded._decoder.parameters()} == {torch.bfloat16}
    assert torch.get_default_dtype() is torch.float32


def test_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qwen_tts.PathFinder, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"needs qwen-tts, which is not installed.*pip install -e '\.\[peers\]'"):
        load()


def test_another_transformers(package: Callable[..., None]) -> None:
    package(modelling="raise TypeError(\"check_model_inputs() missing 'func'\")")
    with pytest.raises(PeerUnavailableError, match=r"cannot be imported \(TypeError: .*made for transformers 4\.57\.3; here is "):
        load()


def test_another_decoder(package: Callable[..., None]) -> None:
    package(configuration="class Qwen3TTSTokenizerV2DecoderConfig:\n    pass")
    with pytest.raises(PeerUnavailableError, match=r"its decoder cannot be made \(TypeError"):
        load()
    assert torch.get_default_dtype() is torch.float32


class MyPeer:
    name, what = "mine", "somehow"

    def load(self, *_: Any) -> Any:
        return None


class NamesakePeer(MyPeer):
    name = "qwen-tts"


class NamelessPeer:
    pass


def test_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    def point(name: str, value: str) -> EntryPoint:
        return EntryPoint(name, f"{__name__}:{value}", ENTRY_POINTS)

    points = [point("mine", "MyPeer"), point("second", "NamesakePeer"), point("third", "NamelessPeer"), point("fourth", "NoSuchPeer")]
    monkeypatch.setattr(peers_module, "entry_points", lambda group: points if group == ENTRY_POINTS else [])
    found, broken = available_peers()
    assert list(found) == ["qwen-tts", "mine"]
    assert isinstance(found["qwen-tts"], QwenTTSPeer)
    assert set(broken) == {"second", "third", "fourth"}
    assert "calls itself 'qwen-tts', as another one does" in broken["second"]
    assert "AttributeError" in broken["third"]
    assert "NoSuchPeer failed: AttributeError" in broken["fourth"]
