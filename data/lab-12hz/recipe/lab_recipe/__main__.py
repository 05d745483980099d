"""The recipe's commands: ``python -m lab_recipe --help``."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from vgraph_lab.errors import VGraphLabError
from vgraph_lab.inspect.voice import run_voice

from . import corpus, real_speech, sentences
from .config import SAMPLE_RATE, RecipeConfig
from .crops import SpeechCrops, read_pcm, write_pcm
from .trainer import Trainer

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Train the bundled checkpoint. The README beside the package says why.")


@app.command("sentences")
def make_sentences(wordnet: Path, out: Path) -> None:
    """WordNet's example sentences as training text (JSON)."""
    made = sentences.wordnet_utterances(wordnet)
    out.write_text(json.dumps(made), encoding="utf-8")
    typer.echo(f"{len(made)} utterances in {out}")


@app.command("corpus")
def make_corpus(
    text: Path, out: Path, hours: float = 8.0, processes: Annotated[int, typer.Option(min=1)] = os.cpu_count() or 1, seed: int = 0
) -> None:
    """Speak the training text with hibari-tts."""
    clips = corpus.synthesise(json.loads(text.read_text(encoding="utf-8")), hours=hours, processes=processes, seed=seed)
    write_pcm(out, list(clips))
    typer.echo(f"{len(clips)} utterances, {sum(map(len, clips)) / SAMPLE_RATE / 3600:.2f} h in {out}")


@app.command("real-speech")
def make_real_speech(root: Path, out: Path) -> None:
    """Collect the Italian and Russian Asterisk prompts from unpacked Debian packages."""
    clips = [real_speech.read_g722(path) for language in real_speech.LANGUAGES for path in real_speech.chosen_prompts(root, language)]
    write_pcm(out, clips)
    typer.echo(f"{len(clips)} prompts, {sum(map(len, clips)) / SAMPLE_RATE / 60:.1f} min in {out}")


@app.command()
def train(
    synthetic: Path,
    out: Path,
    real: Annotated[Path | None, typer.Option(help="real speech; without it, synthetic speech alone")] = None,
    config: Annotated[Path | None, typer.Option(help="JSON of settings that differ from the recipe's")] = None,
    seconds: Annotated[float, typer.Option(help="of this call; training goes on in the next one")] = 560.0,
    max_steps: Annotated[int | None, typer.Option(help="of this call")] = None,
    save_every: Annotated[float, typer.Option(help="seconds between two saves")] = 150.0,
    device: str = "cuda" if torch.cuda.is_available() else "cpu",
) -> None:
    """Train, or go on training, and export to OUT. OUT/state.safetensors holds everything that resuming needs."""
    torch.set_float32_matmul_precision("high")  # TensorFloat-32 where there is any
    settings = RecipeConfig.model_validate_json(config.read_text(encoding="utf-8")) if config else RecipeConfig()
    crops = SpeechCrops(read_pcm(synthetic), None if real is None else read_pcm(real), settings, torch.device(device))
    trainer = Trainer(settings, crops, torch.device(device))
    state = out / "state.safetensors"
    out.mkdir(parents=True, exist_ok=True)
    if state.is_file():
        trainer.resume(state)
        typer.echo(f"resumed at step {trainer.step}, {trainer.seconds:.0f} s")
    begun, last_save, first_step = trainer.seconds, trainer.seconds, trainer.step
    while trainer.progress < 1 and trainer.seconds - begun < seconds and (max_steps is None or trainer.step - first_step < max_steps):
        figures = trainer.train_step()
        if trainer.step % 100 == 0 or trainer.step == first_step + 1:
            typer.echo(_line(trainer, figures))
        if trainer.seconds - last_save > save_every:
            trainer.save(state)
            last_save = trainer.seconds
    trainer.save(state)
    typer.echo(_line(trainer, trainer.validate()))
    trainer.export(out)
    typer.echo(f"exported to {out}")


@app.command()
def evaluate(folder: Path, wer: bool = True, out: Path | None = None) -> None:
    """Measure an exported checkpoint on the bundled evaluation clips, as ``vgraph-lab voice`` does."""
    report = run_voice(folder, wer=wer)
    Console().print(report)
    if out is not None:
        out.write_text(report.to_json(), encoding="utf-8")


def _line(trainer: Trainer, figures: dict[str, float]) -> str:
    values = "  ".join(f"{name} {value:.4g}" for name, value in figures.items())
    return f"step {trainer.step:6d}  {trainer.seconds:6.0f} s  {values}"


if __name__ == "__main__":
    try:
        app()
    except VGraphLabError as error:
        typer.echo(f"error: {error}", err=True)
        raise SystemExit(1) from None
