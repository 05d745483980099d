"""The whole recipe in miniature on the CPU: steps, resuming, export, and the command line. Truth: an uninterrupted run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from lab_recipe.__main__ import app
from lab_recipe.crops import write_pcm
from lab_recipe.losses import SpectralLosses
from typer.testing import CliRunner

from data_recipe.tiny_recipe import TINY, run, speech, trainer
from vgraph_lab.errors import CheckpointError
from vgraph_lab.qwen3_tts.checkpoint import load_decoder
from vgraph_lab.qwen3_tts.encoder import load_encoder


def weights(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def test_steps_train_everything() -> None:
    training, clock = trainer()
    before, discriminator_before = weights(training.codec), weights(training.discriminator)
    first, second, third = run(training, clock, 3)
    assert all(np.isfinite(list(figures.values())).all() for figures in (first, second, third))
    # the phases: unquantised, then quantised, then with the discriminator
    assert "commitment" not in first
    assert "adversarial" not in second
    assert {"commitment", "adversarial", "features", "discriminator"} <= third.keys()
    unchanged = [name for name, tensor in training.codec.state_dict().items() if torch.equal(tensor, before[name])]
    assert unchanged == []
    assert any(not torch.equal(tensor, discriminator_before[name]) for name, tensor in training.discriminator.state_dict().items())
    assert training.step == 3


def test_losses_fall() -> None:
    training, clock = trainer(adversarial_from=2.0, generator_rate=3e-3, warm_up_steps=1)
    figures = run(training, clock, 9)
    assert np.mean([f["mel"] for f in figures[-3:]]) < 0.9 * figures[0]["mel"]


def test_resuming_continues_exactly(tmp_path: Path) -> None:
    whole, clock = trainer()
    expected = run(whole, clock, 4)
    first, clock = trainer()
    run(first, clock, 2)
    first.save(tmp_path / "state.safetensors")
    second, other_clock = trainer()
    other_clock.now = 1000.0  # another machine, another epoch
    second.resume(tmp_path / "state.safetensors")
    assert (second.step, second.seconds) == (2, 2.0)
    assert run(second, other_clock, 2) == expected[2:]
    for name, tensor in whole.codec.state_dict().items():
        assert torch.equal(tensor, second.codec.state_dict()[name]), name
    for name, tensor in whole._averages.items():
        assert torch.equal(tensor, second._averages[name]), name


def test_other_settings_cannot_resume(tmp_path: Path) -> None:
    training, _ = trainer()
    training.save(tmp_path / "state.safetensors")
    other, _ = trainer(commitment_weight=0.05, batch_size=5)
    with pytest.raises(CheckpointError, match="other settings: batch_size, commitment_weight"):
        other.resume(tmp_path / "state.safetensors")


def test_files_that_are_no_state_cannot_resume(tmp_path: Path) -> None:
    training, clock = trainer()
    torch.save(training.codec.state_dict(), tmp_path / "pickle")
    training.save(tmp_path / "state.safetensors")
    whole = (tmp_path / "state.safetensors").read_bytes()
    (tmp_path / "truncated").write_bytes(whole[: len(whole) // 2])
    run(training, clock, 2)
    training.export(tmp_path)
    for name, message in (
        ("pickle", "not a readable"),
        ("truncated", "not a readable"),
        ("nothing", "not a readable"),
        ("model.safetensors", "no training state"),
    ):
        with pytest.raises(CheckpointError, match=message):
            training.resume(tmp_path / name)


def test_a_step_with_a_non_finite_gradient_changes_no_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    training, clock = trainer()
    before = {name: parameter.clone() for name, parameter in training.codec.named_parameters()}
    monkeypatch.setattr(training, "spectral_loss", lambda decoded, original: SpectralLosses(decoded.sum() * float("inf"), decoded.sum()))
    (figures,) = run(training, clock, 1)
    assert not np.isfinite(figures["gradient_norm"])
    for name, parameter in training.codec.named_parameters():
        assert torch.equal(parameter, before[name]), name


def test_an_export_loads_as_a_published_checkpoint(tmp_path: Path) -> None:
    training, clock = trainer()
    run(training, clock, 3)
    live = weights(training.codec)
    training.export(tmp_path)
    assert all(torch.equal(tensor, live[name]) for name, tensor in training.codec.state_dict().items())  # exporting changes nothing
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "config.json",
        "encoder.safetensors",
        "encoder_config.json",
        "model.safetensors",
    ]
    decoder, encoder = load_decoder(tmp_path), load_encoder(tmp_path)
    wav = torch.from_numpy(speech(0.8, seed=3)).float()
    codes = encoder.encode(wav)
    assert codes.shape == (1, 16, 10)
    with training.averaged_weights():
        pairs = ((decoder(codes), training.codec.decoder.decode(codes)), (encoder.network(wav[None]), training.codec.encoder(wav[None])))
    for exported, trained in pairs:
        assert (exported - trained).norm() < 0.01 * trained.norm()  # what storing as fp16 costs


def test_validation_uses_averaged_weights_on_held_out_speech() -> None:
    training, clock = trainer()
    run(training, clock, 3)
    live, figures = weights(training.codec), training.validate()
    assert set(figures) == {"held_out_mel", "level_change_db", "mean_perplexity"}
    assert 1 <= figures["mean_perplexity"] <= 16
    assert all(torch.equal(tensor, live[name]) for name, tensor in training.codec.state_dict().items())


def test_the_command_line_trains_resumes_and_exports(tmp_path: Path) -> None:
    write_pcm(tmp_path / "synthetic.npz", [speech(123, seed=0)])
    write_pcm(tmp_path / "real.npz", [speech(1, seed=1), speech(1, seed=2)])
    (tmp_path / "tiny.json").write_text(json.dumps({**TINY, "total_seconds": 1e6}))
    command = ["train", str(tmp_path / "synthetic.npz"), str(tmp_path / "out"), "--real", str(tmp_path / "real.npz")]
    command += ["--config", str(tmp_path / "tiny.json"), "--max-steps", "2", "--device", "cpu"]
    first = CliRunner().invoke(app, command, catch_exceptions=False)
    assert "step      2" in first.output
    assert "held_out_mel" in first.output
    second = CliRunner().invoke(app, command, catch_exceptions=False)
    assert "resumed at step 2" in second.output
    assert "step      4" in second.output
    assert load_decoder(tmp_path / "out")(torch.zeros(1, 16, 3, dtype=torch.int64)).shape == (1, 1, 3 * 1920)
