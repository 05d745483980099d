"""``vgraph-lab encode``: recordings of one's own as codes, which every other command and notebook takes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import pandas as pd
import typer
from rich.markup import escape

from vgraph_lab import bundled
from vgraph_lab.errors import InputError

from .shared import AsJson, as_json_text, console, records, rich_table

__all__ = ["encode"]


def encode(
    files: Annotated[list[Path], typer.Argument(help="Recordings: WAV, FLAC, Ogg, MP3 and others. Any rate, any channels.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the codes go, as safetensors.")] = Path("codes.safetensors"),
    checkpoint: Annotated[str, typer.Option(help="Checkpoint folder with an encoder, or 'bundled'.")] = "bundled",
    max_seconds: Annotated[float, typer.Option(help="Longer recordings are cut here, and it is said.")] = 30.0,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    overwrite: Annotated[bool, typer.Option(help="Replace a file that is there.")] = False,
    as_json: AsJson = False,
) -> None:
    """Encode recordings with a checkpoint's encoder: mono, resampled, cut at 30 s. Utterances are named after their files."""
    from vgraph_lab.qwen3_tts.codes import write_codes
    from vgraph_lab.qwen3_tts.encoder import encode_audio_file, load_encoder

    _check_output(output, overwrite=overwrite)
    names = [file.stem for file in files]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise InputError(f"utterances are named after their files, and several are called {', '.join(repeated)}. Rename them.")
    encoder = load_encoder(bundled.checkpoint_folder() if checkpoint == "bundled" else Path(checkpoint), device)
    encoded = {file.stem: encode_audio_file(file, encoder=encoder, max_seconds=max_seconds) for file in files}
    codebook_size = encoder.quantizer.rvq_first.codebooks[0].vectors().shape[0]
    frame_rate_hz = encoder.sample_rate / encoder.samples_per_frame
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_codes(output, {name: e.codes for name, e in encoded.items()}, codebook_size=codebook_size, frame_rate_hz=frame_rate_hz)
    except OSError as error:
        raise InputError(f"{output} cannot be written: {error.strerror or error}. Choose another place.") from error
    table = pd.DataFrame(
        [
            {"utterance": name, "frames": e.codes.shape[1], "source_s": e.source_s, "encoded_s": e.encoded_s, "cut_s": e.cut_s}
            for name, e in encoded.items()
        ]
    )
    notes = [e.note.replace("max_seconds", "--max-seconds") for e in encoded.values() if e.note]
    if as_json:
        print(as_json_text({"output": str(output), "utterances": records(table), "notes": notes}))
        return
    headings = {"utterance": "utterance", "frames": "frames", "source_s": "seconds", "encoded_s": "encoded"}
    console.print(rich_table(table, headings, title="codes"))
    for note in notes:
        console.print(f"[yellow]note:[/] {escape(note)}", highlight=False)
    console.print(f"codes: {escape(str(output))}", highlight=False)


def _check_output(output: Path, *, overwrite: bool) -> None:
    if output.suffix != ".safetensors":
        raise InputError(f"{output} is to be a file of codes, which is safetensors: name it {output.with_suffix('.safetensors').name}.")
    if output.is_dir():
        raise InputError(f"{output} is a folder. Name a file in it.")
    if output.exists() and not overwrite:
        raise InputError(f"{output} is there already, and nothing is written over. Choose another name, or --overwrite.")
