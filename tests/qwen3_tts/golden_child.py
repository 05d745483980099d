"""Compares the decoder with every golden stateless vector and prints the largest distances as JSON.

Runs in a process of its own, because the choice of CPU kernels is fixed when torch is imported.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch

import vgraph_lab as vg
from vgraph_lab.qwen3_tts.stateless import decode_windows

folder = Path(sys.argv[1])
decoder = vg.load_decoder(folder)
golden = np.load(folder / "stateless.npz")
distances = {}
for key in golden:
    if key.startswith("codes_"):
        wave = decoder(torch.from_numpy(golden[key])).numpy()
        distances[key] = float(np.abs(wave - golden["wav_" + key.removeprefix("codes_")]).max())
wave = decode_windows(
    decoder,
    torch.from_numpy(golden["chunked_codes"]),
    samples_per_frame=decoder.samples_per_frame,
    chunk_frames=40,
    left_context_frames=10,
).numpy()
distances["chunked_40_10"] = float(np.abs(wave - golden["chunked_wav_40_10"]).max())
print(json.dumps(distances))
