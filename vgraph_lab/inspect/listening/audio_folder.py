"""The folder of an audio set: ``<condition>/<sample>.wav`` as audiotools has it, and ``audio_set.json`` beside the conditions."""

from __future__ import annotations

import re
import shutil
import tempfile
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import soundfile
from pydantic import TypeAdapter
from pydantic.dataclasses import dataclass as checked_dataclass

from vgraph_lab.errors import InputError, did_you_mean

from .json_file import read_json, write_json

__all__ = ["Listing", "Samples", "Subtype", "check_complete", "check_known", "read_folder", "write_folder"]

Samples: TypeAlias = "np.ndarray[Any, np.dtype[np.float32]]"
Subtype = Literal["FLOAT", "PCM_24"]
"""``FLOAT`` keeps every bit; ``PCM_24`` rounds to a multiple of 2**-23, by 2**-24 (−144.5 dBFS) at most, and cannot hold +1 or more."""

_KIND, _VERSION, _FILE_NAME = "audio set", 1, "audio_set.json"
_NO_FILE_NAME = re.compile(r'^$|^\.|[\x00-\x1f/\\:*?"<>|]|[. ]$')
_LONGEST_NAME = 200  # bytes; file systems hold 255, and a suffix is added
_PCM_24_SCALE = 2**23


@checked_dataclass(frozen=True)
class Listing:
    """What the JSON says: order of conditions and samples, seams and details by sample."""

    conditions: list[str]
    samples: list[str]
    seams: dict[str, list[int]]
    details: dict[str, str]


_ADAPTER = TypeAdapter(Listing)


# --------------------------------------------------------------------------------------------------------------- writing


def write_folder(
    root: Path,
    waveforms: Mapping[str, Mapping[str, Samples]],
    sample_rate: int,
    listing: Listing,
    *,
    subtype: Subtype,
    overwrite: bool,
) -> None:
    """Write all files aside, then move them into place.

    Raises:
        InputError: see :meth:`~vgraph_lab.inspect.listening.audio_set.AudioSet.save`.
    """
    if subtype not in ("FLOAT", "PCM_24"):
        raise InputError(f"subtype is {subtype!r}; accepted are 'FLOAT' and 'PCM_24'.")
    _check_file_names("condition", listing.conditions)
    _check_file_names("sample", listing.samples)
    files = [Path(condition) / f"{sample}.wav" for condition in listing.conditions for sample in listing.samples]
    _check_free(root, files, overwrite=overwrite)
    if subtype == "PCM_24":
        _check_range(waveforms)
    try:
        root.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=".partial-", dir=root))
        try:
            for condition, group in waveforms.items():
                (aside / condition).mkdir()
                for sample, wav in group.items():
                    content = wav if subtype == "FLOAT" else _steps(wav) << 8  # 24 bits are the upper ones of 32
                    soundfile.write(aside / condition / f"{sample}.wav", content, sample_rate, subtype=subtype)
            write_json(aside / _FILE_NAME, _KIND, _VERSION, listing, _ADAPTER)
            for condition in listing.conditions:
                (root / condition).mkdir(exist_ok=True)
            for file in (*files, Path(_FILE_NAME)):
                (aside / file).replace(root / file)
        finally:
            shutil.rmtree(aside)
    except (OSError, soundfile.LibsndfileError) as error:
        raise InputError(f"{root} cannot be written: {error}. Choose another folder.") from error


def _steps(wav: Samples) -> np.ndarray[Any, np.dtype[np.int32]]:
    # libsndfile scales floats by 2**23 − 1 when it writes and by 2**23 when it reads; integers pass unscaled.
    return np.rint(wav.astype(np.float64) * _PCM_24_SCALE).astype(np.int32)


def _check_range(waveforms: Mapping[str, Mapping[str, Samples]]) -> None:
    for condition, group in waveforms.items():
        for sample, wav in group.items():
            if _steps(wav).max() >= _PCM_24_SCALE or _steps(wav).min() < -_PCM_24_SCALE:
                peak = float(wav[np.abs(wav).argmax()])
                raise InputError(
                    f"{condition}/{sample} reaches {peak:.8g}; PCM_24 ends at −1 and {1 - 1 / _PCM_24_SCALE:.8f} and would clip it. "
                    "Save as 'FLOAT'."
                )


def _check_file_names(what: str, names: Sequence[str]) -> None:
    for name in names:
        if _NO_FILE_NAME.search(name) or len(name.encode()) > _LONGEST_NAME:
            raise InputError(
                f"{what} {name[:300]!r} cannot be the name of a file: {_LONGEST_NAME} bytes at most, "
                'without / \\ : * ? " < > | and control characters, a dot in front, and a dot or a blank at the end.'
            )
    if what == "condition" and _FILE_NAME in map(_folded, names):
        raise InputError(f"a condition cannot be called {_FILE_NAME!r}, since a file of that name says what the folder holds.")
    if len(set(map(_folded, names))) < len(names):
        raise InputError(
            f"some {what}s differ in upper and lower case only, or in how accents are encoded, which not every file system keeps apart: "
            f"{_listed(names)}."
        )


def _folded(name: str) -> str:
    """Equal for names that some file system takes for one (Unicode's caseless match)."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())


def _check_free(root: Path, files: Sequence[Path], *, overwrite: bool) -> None:
    if root.exists() and not root.is_dir():
        raise InputError(f"{root} is a file. Name a folder.")
    for folder in dict.fromkeys((root / file).parent for file in files):
        if folder.is_symlink():
            raise InputError(
                f"{folder} is a link to {folder.readlink()}, and nothing is written through it. Take it away, or save elsewhere."
            )
    present = [file for file in (*files, Path(_FILE_NAME)) if (root / file).exists()]
    if present and not overwrite:
        raise InputError(
            f"{root} holds {_listed(map(str, present), 3)} already, and nothing is written over. "
            "Choose another folder, or ask for overwrite=True."
        )
    others = [p.relative_to(root) for p in sorted(root.glob("[!.]*/*")) if _is_recording(p) and p.relative_to(root) not in set(files)]
    if others:
        raise InputError(
            f"{root} holds {_listed(map(str, others), 3)}, which would be read as part of this set. "
            "Choose another folder, or move them away."
        )


# --------------------------------------------------------------------------------------------------------------- reading


def read_folder(root: Path, reference: str | None) -> tuple[dict[str, dict[str, Samples]], int, Listing]:
    """Waveforms by condition and sample, their rate, and the listing; empty where there is none.

    Raises:
        InputError: see :meth:`~vgraph_lab.inspect.listening.audio_set.AudioSet.load`.
    """
    if not root.is_dir():
        what = "is a file" if root.exists() else "does not exist"
        raise InputError(f"{root} {what}. Give a folder with <condition>/<sample>.wav in it.")
    folders = [path for path in sorted(root.iterdir()) if path.is_dir() and not path.name.startswith(".")]
    files = {folder.name: recordings for folder in folders if (recordings := _recordings(folder))}
    if not files:
        raise InputError(f"{root} holds no recordings. Expected {root / '<condition>' / '<sample>.wav'}.")
    has_listing = (root / _FILE_NAME).exists()
    listing = read_json(root / _FILE_NAME, _KIND, _VERSION, _ADAPTER) if has_listing else Listing([], [], {}, {})
    conditions = list(dict.fromkeys([*listing.conditions, *files]))
    samples = list(dict.fromkeys([*listing.samples, *sorted({name for group in files.values() for name in group})]))
    if reference is not None:
        check_known("condition", reference, conditions)
        conditions = [reference, *(name for name in conditions if name != reference)]
    check_complete({condition: files.get(condition, {}) for condition in conditions}, samples, root)
    waveforms: dict[str, dict[str, Samples]] = {}
    rates: dict[int, Path] = {}
    for condition in conditions:
        waveforms[condition] = {}
        for sample in samples:
            path = files[condition][sample]
            waveforms[condition][sample], rate = _read(path)
            rates.setdefault(rate, path)
    if len(rates) > 1:
        listed = "; ".join(f"{path} is at {rate} Hz" for rate, path in rates.items())
        raise InputError(f"the recordings have different sample rates: {listed}. Resample them to one rate (read_audio does).")
    return waveforms, next(iter(rates)), listing


def _is_recording(path: Path) -> bool:
    return path.suffix.lower() == ".wav" and not path.name.startswith(".")


def _recordings(folder: Path) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for path in sorted(filter(_is_recording, folder.iterdir())):
        if (other := found.setdefault(path.stem, path)) is not path:
            raise InputError(f"{folder} holds both {other.name!r} and {path.name!r}, which would be one sample. Rename one of them.")
    return found


def _read(path: Path) -> tuple[Samples, int]:
    try:
        wav, rate = soundfile.read(path, dtype="float32", always_2d=True)
    except (soundfile.LibsndfileError, OSError) as error:
        raise InputError(f"{path} cannot be read as audio ({error}). Write it as WAV, or take it away.") from error
    if wav.shape[1] != 1:
        raise InputError(
            f"{path} has {wav.shape[1]} channels; one is needed. Mix it down: read_audio(path, sample_rate={rate}) averages the channels."
        )
    if not len(wav):
        raise InputError(f"{path} has no samples.")
    return wav[:, 0], int(rate)


# ---------------------------------------------------------------------------------------------------------------- checks


def check_known(what: str, name: str, known: Sequence[str]) -> None:
    """Refuse a name that is not among those known.

    Raises:
        InputError: it is not.
    """
    if name not in known:
        raise InputError(f"there is no {what} {name!r}; there are {_listed(known)}.{did_you_mean(str(name), known)}")


def check_complete(found: Mapping[str, Iterable[str]], samples: Sequence[str], root: Path | None = None) -> None:
    """Refuse conditions of which one lacks a sample.

    Raises:
        InputError: one does, or there is no sample at all.
    """
    if not samples:
        raise InputError("there is no sample. Give each condition the same named waveforms.")
    missing = [f"{condition}/{sample}" for condition, names in found.items() for sample in samples if sample not in set(names)]
    if missing:
        where, names = (f"{root}: ", [f"{name}.wav" for name in missing]) if root else ("", missing)
        raise InputError(
            f"{where}every condition needs every sample; missing: {_listed(names)}. Add them, or leave those samples out everywhere"
            + (f" (in {_FILE_NAME}, too)." if root else ".")
        )


def _listed(names: Iterable[str], shown: int = 6) -> str:
    names = list(names)
    return ", ".join(map(repr, names[:shown])) + (f" and {len(names) - shown} more" if len(names) > shown else "")
