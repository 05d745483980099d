"""The training recipe on a CUDA device: it runs, resumes, and its export speaks on the CPU too."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from data_recipe.tiny_recipe import run, speech, trainer

from vgraph_lab.qwen3_tts.checkpoint import load_decoder
from vgraph_lab.qwen3_tts.encoder import load_encoder


def test_training_runs_resumes_and_exports(tmp_path: Path) -> None:
    training, clock = trainer("cuda")
    figures = run(training, clock, 3)  # unquantised, quantised, with the discriminator
    assert all(np.isfinite(list(step.values())).all() for step in figures)
    training.save(tmp_path / "state.safetensors")
    resumed, clock = trainer("cuda")
    resumed.resume(tmp_path / "state.safetensors")
    assert np.isfinite(list(run(resumed, clock, 1)[0].values())).all()
    assert resumed.step == 4
    assert np.isfinite(list(resumed.validate().values())).all()
    resumed.export(tmp_path)
    wav = torch.from_numpy(speech(0.8, seed=3)).float()
    codes = load_encoder(tmp_path, "cuda").encode(wav)
    on_cuda, on_cpu = load_decoder(tmp_path, "cuda")(codes), load_decoder(tmp_path)(codes.cpu())
    assert (on_cuda.cpu() - on_cpu).norm() < 1e-2 * on_cpu.norm()
