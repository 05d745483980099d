"""Streaming steps against the published implementation, chunk by chunk, state included."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
from qwen3_tts.streams import NAMES, golden_requests

from vgraph_lab.qwen3_tts.decoder import Code2WavDecoder
from vgraph_lab.qwen3_tts.geometry import DecoderGeometry
from vgraph_lab.qwen3_tts.streaming import run_prefix, suffix_step

GOLDEN_KERNELS = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "OMP_NUM_THREADS": "4"}
SMALL = DecoderGeometry(codebook_size=32, codebook_dim=8, latent_dim=16, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
                        num_attention_heads=4, num_key_value_heads=2, head_dim=4, sliding_window=6, max_position_embeddings=64,
                        decoder_dim=16, upsample_rates=(2, 2), upsampling_ratios=(2,))  # fmt: skip


def largest_distances(folder: Path, decoder: Code2WavDecoder) -> dict[str, float]:
    """Play every golden stream through the eager steps; the largest waveform and state distance of each request."""
    window = decoder.geometry.sliding_window
    found: dict[str, float] = {}
    with torch.no_grad():
        for name in NAMES:
            for request in golden_requests(folder, name):
                worst, prefix, suffix = 0.0, None, None
                for i, chunk in enumerate(request.chunks):
                    if i == 0 and request.prefix_frames:
                        pad = max(window - request.prefix_frames, 0)
                        reference = torch.nn.functional.pad(chunk[..., : request.prefix_frames], (pad, 0))
                        prefix = run_prefix(decoder, reference, torch.tensor([pad]))
                        chunk = chunk[..., request.prefix_frames :]
                        assert request.states[0]["prefix_pad"] == pad
                        assert request.states[0]["decoder_prefix"] == prefix.keys_values.shape[4]
                    wave, after = suffix_step(decoder, chunk, prefix=prefix, suffix=suffix)
                    worst = max(worst, float(np.abs(wave[0].numpy() - request.waveforms[i]).max()))
                    is_short_tail = i == len(request.chunks) - 1 and i > 0 and chunk.shape[-1] < request.chunk_frames
                    suffix = suffix if is_short_tail else after
                    assert suffix is not None
                    for field, ours in (("suffix_quantized", suffix.quantized), ("suffix_conv", suffix.conv)):
                        golden = request.states[i][field]
                        assert ours.shape == golden.shape, (request.name, i, field)
                        worst = max(worst, float(np.abs(ours.numpy() - golden).max()))
                found[request.name] = worst
    return found


def test_golden_streams_with_this_machines_kernels(tiny_folder: Path, tiny_decoder: Code2WavDecoder) -> None:
    distances = largest_distances(tiny_folder, tiny_decoder)
    assert len(distances) == 8
    assert max(distances.values()) < 2e-4, distances


if __name__ == "__main__":
    import vgraph_lab as vg

    print(json.dumps(largest_distances(Path(sys.argv[1]), vg.load_decoder(sys.argv[1]))))
