"""vgraph_lab: capture, inspect and hear runner-owned CUDA graphs of TTS vocoders."""

import os

# Read by OpenMP when torch loads it. Threads that wait should sleep: spinning ones starve each other where cores are shared.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from . import bundled, errors
from .config import ConnectorConfig, StageConfig
from .graphs import VocoderCUDAGraphManager, choose_backend, create_backend
from .qwen3_tts.audio import read_audio
from .qwen3_tts.checkpoint import load_decoder
from .qwen3_tts.code2wav import Qwen3TTSCode2Wav
from .qwen3_tts.codes import read_codes, write_codes
from .qwen3_tts.encoder import encode_audio_file, load_encoder
from .qwen3_tts.stateless import decode_windows, stateless_target
from .requests import ChunkRequest
from .runner import GPUGenerationModelRunner

__version__ = "0.1.0"

__all__ = [
    "ChunkRequest",
    "ConnectorConfig",
    "GPUGenerationModelRunner",
    "Qwen3TTSCode2Wav",
    "StageConfig",
    "VocoderCUDAGraphManager",
    "__version__",
    "bundled",
    "choose_backend",
    "create_backend",
    "decode_windows",
    "encode_audio_file",
    "errors",
    "load_decoder",
    "load_encoder",
    "read_audio",
    "read_codes",
    "stateless_target",
    "write_codes",
]
