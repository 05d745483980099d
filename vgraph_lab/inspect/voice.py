"""How well a checkpoint speaks: encode recordings, decode the codes, and compare with the originals.

The result is one row per clip. :class:`VoiceReport` averages it by group of sources, prints itself, and becomes JSON.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from torch import Tensor

from vgraph_lab import bundled
from vgraph_lab.errors import InputError
from vgraph_lab.inspect.recogniser import Recogniser, WhisperTiny
from vgraph_lab.inspect.speech_metrics import level_dbfs, log_mel_distance, stoi, word_errors
from vgraph_lab.qwen3_tts.audio import read_audio
from vgraph_lab.qwen3_tts.checkpoint import load_decoder
from vgraph_lab.qwen3_tts.codes import read_codes
from vgraph_lab.qwen3_tts.decoder import Code2WavDecoder
from vgraph_lab.qwen3_tts.encoder import load_encoder

__all__ = ["CodesFrom", "VoiceReport", "keep_codebooks", "measure_voice", "run_voice"]

_CAPTION = (
    "STOI: intelligibility, 1 is best; mel: distance of log10-mel spectra, 0 is best; dB: change of level; "
    "WER: word errors of the originals → of the decoded clips"
)
CodesFrom = Literal["encoder", "files"]
Progress = Callable[[int, int, str], None]
"""Called before each clip with (clips done, clips in all, clip id)."""


def measure_voice(
    folder: str | Path,
    *,
    clips: Sequence[bundled.Utterance] | None = None,
    codes_from: CodesFrom = "encoder",
    levels: int | None = None,
    recogniser: Recogniser | None = None,
    device: str | torch.device = "cpu",
    progress: Progress | None = None,
) -> pd.DataFrame:
    """Measure a checkpoint on recordings, clip by clip, in fp32.

    Args:
        folder: the checkpoint.
        clips: what to speak; by default the folder's own evaluation clips, or the bundled ones where it has none.
        codes_from: ``encoder`` encodes the recordings with the folder's encoder; ``files`` takes the codes stored beside
            them, for checkpoints whose encoder is not of this package.
        levels: decode with the first codebooks only; all by default.
        recogniser: counts word errors of English clips if given.
        device: where encoder and decoder run.
        progress: called before each clip.

    Returns:
        One row per clip, indexed by id: ``group``, ``language``, ``seconds``, ``stoi``, ``log_mel_distance``,
        ``level_in_dbfs``, ``level_out_dbfs``, ``peak``, ``decode_seconds``; with a recogniser also ``words``,
        ``errors_original``, ``errors_decoded``, ``heard_original`` and ``heard_decoded`` (missing where not English).

    Raises:
        CheckpointError, CodesError, InputError: what is to be read is missing or damaged, or does not fit.
    """
    table, _ = _measure(folder, clips, codes_from, levels, recogniser, device, progress)
    return table


def run_voice(
    folder: str | Path,
    *,
    wer: bool = True,
    clips: Sequence[bundled.Utterance] | None = None,
    codes_from: CodesFrom = "encoder",
    levels: int | None = None,
    device: str | torch.device = "cpu",
    progress: Progress | None = None,
) -> VoiceReport:
    """:func:`measure_voice` as a report; ``wer`` counts word errors with the offline recogniser (extra ``voice``)."""
    recogniser = WhisperTiny(threads=torch.get_num_threads()) if wer else None
    table, codes = _measure(folder, clips, codes_from, levels, recogniser, device, progress)
    return VoiceReport(Path(folder), codes_from, levels, torch.get_num_threads(), str(device), table, _codebook_usage(codes))


def _measure(
    folder: str | Path,
    clips: Sequence[bundled.Utterance] | None,
    codes_from: CodesFrom,
    levels: int | None,
    recogniser: Recogniser | None,
    device: str | torch.device,
    progress: Progress | None,
) -> tuple[pd.DataFrame, Tensor]:
    if codes_from not in ("encoder", "files"):
        raise InputError(f"codes_from is {codes_from!r}; accepted are 'encoder' and 'files'.")
    folder = Path(folder)
    if clips is None:
        clips = bundled.utterances(folder if (folder / "utterances").is_dir() else None)
    if not clips:
        raise InputError("there is no clip to measure.")
    decoder = load_decoder(folder, device)
    keep_codebooks(decoder, levels)
    encoder = load_encoder(folder, device) if codes_from == "encoder" else None
    rows, all_codes = [], []
    for index, clip in enumerate(clips):
        if progress is not None:
            progress(index, len(clips), clip.id)
        original = read_audio(clip.recording, sample_rate=decoder.sample_rate)
        codes = read_codes(clip.codes_file)[clip.id][None] if encoder is None else encoder.encode(original)
        started = time.perf_counter()
        decoded = decoder(codes)[0, 0].cpu()
        decode_seconds = time.perf_counter() - started
        if len(decoded) < len(original):
            raise InputError(
                f"the codes of {clip.id} last {len(decoded)} samples, its recording {len(original)}: they do not belong together."
            )
        decoded = decoded[: len(original)]
        rows.append(_compare(clip, original, decoded, decoder.sample_rate, recogniser) | {"decode_seconds": decode_seconds})
        all_codes.append(codes[0].cpu())
    return pd.DataFrame(rows).set_index("id"), torch.cat(all_codes, dim=1)


def _compare(clip: bundled.Utterance, original: Tensor, decoded: Tensor, sample_rate: int, recogniser: Recogniser | None) -> dict[str, Any]:
    row: dict[str, Any] = {
        "id": clip.id,
        "group": clip.group,
        "language": clip.language,
        "seconds": len(original) / sample_rate,
        "stoi": stoi(original, decoded, sample_rate=sample_rate),
        "log_mel_distance": log_mel_distance(original, decoded, sample_rate=sample_rate),
        "level_in_dbfs": level_dbfs(original),
        "level_out_dbfs": level_dbfs(decoded),
        "peak": float(decoded.abs().amax()),
    }
    if recogniser is None:
        return row
    row |= dict.fromkeys(("words", "errors_original", "errors_decoded", "heard_original", "heard_decoded"))
    if clip.language == "en":
        words = recogniser.words(clip.text)
        row["words"] = len(words)
        for name, wav in (("original", original), ("decoded", decoded)):
            row[f"heard_{name}"] = recogniser.transcribe(wav, sample_rate)
            row[f"errors_{name}"] = word_errors(words, recogniser.words(row[f"heard_{name}"]))
    return row


def keep_codebooks(decoder: Code2WavDecoder, levels: int | None) -> None:
    """Silence all codebooks after the first ``levels``, by making their vectors zero: the voice gets coarser.

    Raises:
        InputError: fewer than 1, or more than the checkpoint has.
    """
    available = decoder.geometry.num_quantizers
    if levels is None:
        return
    if not 1 <= levels <= available:
        raise InputError(f"levels is {levels}; the checkpoint has {available} codebooks per frame.")
    for codebook in (decoder.quantizer.rvq_first.codebooks + decoder.quantizer.rvq_rest.codebooks)[levels:]:
        codebook.embedding_sum.zero_()
    decoder.refresh_tables()


def _codebook_usage(codes: Tensor) -> pd.DataFrame:
    """Of each level: how many entries occur in ``codes`` [levels, frames], and the perplexity of their frequencies."""
    rows = []
    for level, of_level in enumerate(codes):
        counts = torch.bincount(of_level)
        share = counts[counts > 0].double() / of_level.numel()
        rows.append({"level": level, "used": len(share), "perplexity": math.exp(-float((share * share.log()).sum()))})
    return pd.DataFrame(rows).set_index("level")


@dataclass(frozen=True)
class VoiceReport:
    """What :func:`run_voice` measured.

    Attributes:
        folder: the checkpoint.
        codes_from: where its codes came from.
        levels: how many codebooks were decoded; ``None`` for all.
        threads: host threads that torch used.
        device: where encoder and decoder ran.
        clips: one row per clip (:func:`measure_voice`).
        codebooks: per level, entries ``used`` and ``perplexity`` over all clips.
    """

    folder: Path
    codes_from: CodesFrom
    levels: int | None
    threads: int
    device: str
    clips: pd.DataFrame
    codebooks: pd.DataFrame

    @property
    def times_real_time(self) -> float:
        """Seconds of speech decoded per second, over all clips."""
        return float(self.clips["seconds"].sum() / self.clips["decode_seconds"].sum())

    def summary(self) -> pd.DataFrame:
        """Averages by group of sources, and over all clips in the last row.

        Word error rates are errors over words of the group's English clips together, in percent.
        """
        groups = [(str(name), rows) for name, rows in self.clips.groupby("group", sort=False)]
        return pd.DataFrame([self._average(name, rows) for name, rows in [*groups, ("all", self.clips)]]).set_index("group")

    @staticmethod
    def _average(name: str, rows: pd.DataFrame) -> dict[str, Any]:
        average = {
            "group": name,
            "clips": len(rows),
            "stoi": rows["stoi"].mean(),
            "lowest_stoi": rows["stoi"].min(),
            "log_mel_distance": rows["log_mel_distance"].mean(),
            "level_change_db": (rows["level_out_dbfs"] - rows["level_in_dbfs"]).mean(),
            "peak": rows["peak"].max(),
        }
        if "words" in rows:
            words = float(rows["words"].sum())
            for side in ("original", "decoded"):
                average[f"wer_{side}_percent"] = 100 * float(rows[f"errors_{side}"].sum()) / words if words else math.nan
        return average

    def to_json(self) -> str:
        """Everything as JSON; what is missing is null."""
        content = {
            "folder": str(self.folder),
            "codes_from": self.codes_from,
            "levels": self.levels,
            "threads": self.threads,
            "device": self.device,
            "torch": torch.__version__,
            "times_real_time": self.times_real_time,
            "summary": _records(self.summary()),
            "clips": _records(self.clips),
            "codebooks": _records(self.codebooks),
        }
        return json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False)

    def __rich__(self) -> Group:
        """The summary as a table, with one line on the codebooks and one on speed."""
        summary = self.summary()
        table = Table(title=f"voice of {self.folder.name}", title_justify="left", caption=_CAPTION, caption_justify="left", box=SIMPLE_HEAD)
        headings = {"log_mel_distance": "mel", "level_change_db": "dB", "lowest_stoi": "lowest", "stoi": "STOI"}
        headings |= {"wer_original_percent": "WER %", "wer_decoded_percent": "→ %"}
        digits = {"clips": 0, "level_change_db": 1, "peak": 2, "wer_original_percent": 1, "wer_decoded_percent": 1}
        table.add_column("group", no_wrap=True)
        for column in summary:
            table.add_column(headings.get(str(column), str(column)), justify="right")
        for name, row in summary.iterrows():
            cells = ("–" if pd.isna(value) else f"{value:.{digits.get(str(column), 3)}f}" for column, value in row.items())
            table.add_row(str(name), *cells, style="bold" if name == "all" else None)
        perplexity = " ".join(f"{value:.0f}" for value in self.codebooks["perplexity"])
        speed = f"decoded at {self.times_real_time:.1f} times real time ({self.threads} threads, {self.device}, whole clips)"
        return Group(table, f"perplexity of the codes by level: {perplexity}", speed)

    def _repr_html_(self) -> str:
        return str(self.summary().to_html(float_format="{:.3f}".format, na_rep="–"))


def _records(table: pd.DataFrame) -> list[dict[str, Any]]:
    plain = table.reset_index().astype(object)
    records = plain.where(plain.notna(), None).to_dict(orient="records")
    return [{str(key): value.item() if isinstance(value, np.generic) else value for key, value in record.items()} for record in records]
