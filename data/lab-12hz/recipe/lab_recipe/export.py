"""From a trained codec to a checkpoint folder: the published layout in fp16, and the encoder beside it."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from vgraph_lab.qwen3_tts.quantizer import Codebook

from .config import SAMPLE_RATE
from .model import Codec

__all__ = ["export_checkpoint"]

_LEAST_USAGE, _MOST_USAGE = 0.05, 1000.0


@torch.no_grad()
def export_checkpoint(codec: Codec, folder: Path) -> None:
    """Write ``config.json``, ``model.safetensors``, ``encoder_config.json`` and ``encoder.safetensors`` into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    decoder = codec.decoder
    tensors = {f"decoder.{name}": tensor for name, tensor in decoder.state_dict().items()}
    for name, module in decoder.named_modules():
        if isinstance(module, Codebook):
            tensors |= {f"decoder.{name}.{key}": tensor for key, tensor in _rounded_codebook(module).items()}
    save_file(_as_fp16(tensors), folder / "model.safetensors", metadata={"format": "pt"})
    save_file(_as_fp16(codec.encoder.state_dict()), folder / "encoder.safetensors", metadata={"format": "pt"})
    config = {
        "model_type": "qwen3_tts_tokenizer_12hz",
        "architectures": ["Qwen3TTSTokenizerV2Model"],
        "input_sample_rate": SAMPLE_RATE,
        "output_sample_rate": SAMPLE_RATE,
        "decode_upsample_rate": decoder.samples_per_frame,
        "encode_downsample_rate": decoder.samples_per_frame,
        "encoder_valid_num_quantizers": decoder.geometry.num_quantizers,
        "decoder_config": {**decoder.geometry.model_dump(mode="json"), "hidden_act": "silu"},
        "encoder_config": {},
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / "encoder_config.json").write_text(codec.config.encoder.model_dump_json(indent=2) + "\n", encoding="utf-8")


def _rounded_codebook(book: Codebook) -> dict[str, Tensor]:
    """Usage rounded to fp16 first, then the sum that gives the same code vectors with it.

    Only their quotient is the codebook, so the usage may be limited to what fp16 holds well.
    """
    usage = book.cluster_usage.clamp(_LEAST_USAGE, _MOST_USAGE).half()
    return {"cluster_usage": usage, "embedding_sum": book.vectors() * usage.float()[:, None]}


def _as_fp16(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().half().cpu().contiguous() for name, tensor in tensors.items()}
