"""Where the bundled data are, and what the bundled evaluation clips are. Free of torch.

From a checkout the data lie in ``data/lab-12hz`` beside the package, from a wheel in ``vgraph_lab/_data/lab-12hz``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from vgraph_lab.errors import CheckpointError

__all__ = ["Utterance", "checkpoint_folder", "utterances"]

_NAME = "lab-12hz"
_PACKAGE = Path(__file__).resolve().parent
_MANIFEST, _CODES = "manifest.json", "codes.safetensors"


@dataclass(frozen=True, slots=True)
class Utterance:
    """One evaluation clip: a recording, its words, and its codes.

    Attributes:
        id: name of the clip, and of its codes in ``codes_file``.
        text: what is said.
        language: ISO 639-1 code.
        speaker: who says it, or which synthetic voice.
        group: kind of source, under which results are averaged.
        source: where the recording came from.
        licence: SPDX identifier of the recording and its codes; obligations and credits stand in the folder's LICENCE.md.
        duration_s: length in seconds.
        recording: the original recording, 24 kHz mono.
        codes_file: file of codes (:func:`vgraph_lab.read_codes`) that holds this clip's codes.
    """

    id: str
    text: str
    language: str
    speaker: str
    group: str
    source: str
    licence: str
    duration_s: float
    recording: Path
    codes_file: Path


def checkpoint_folder() -> Path:
    """Folder of the bundled checkpoint: decoder, encoder and, under ``utterances/``, the evaluation clips.

    Raises:
        CheckpointError: this installation lacks the data.
    """
    candidates = (_PACKAGE / "_data" / _NAME, _PACKAGE.parent / "data" / _NAME)
    for folder in candidates:
        if (folder / "config.json").is_file():
            return folder
    looked = " and ".join(map(str, candidates))
    raise CheckpointError(
        f"The bundled checkpoint is missing; looked in {looked}. Reinstall vgraph-lab, or give a checkpoint folder of your own."
    )


def utterances(folder: str | Path | None = None, *, language: str | None = None, licence: str | None = None) -> tuple[Utterance, ...]:
    """The evaluation clips of a checkpoint, sorted by id.

    Args:
        folder: a checkpoint folder with ``utterances/<licence>/manifest.json``; the bundled one by default.
        language: only clips of this language (ISO 639-1).
        licence: only clips under this licence (SPDX identifier).

    Raises:
        CheckpointError: the folder has no clips, a manifest is damaged, or a file that it names is missing.
    """
    root = (checkpoint_folder() if folder is None else Path(folder)) / "utterances"
    manifests = sorted(root.glob(f"*/{_MANIFEST}"))
    if not manifests:
        raise CheckpointError(f"{root} holds no evaluation clips (expected <licence>/{_MANIFEST}).")
    found = sorted((u for manifest in manifests for u in _read_manifest(manifest)), key=lambda u: u.id)
    ids = [u.id for u in found]
    repeated = {name for name in ids if ids.count(name) > 1}
    if repeated:
        raise CheckpointError(f"{root}: more than one clip is called {', '.join(sorted(repeated))}.")
    return tuple(u for u in found if language in (None, u.language) and licence in (None, u.licence))


def _read_manifest(path: Path) -> list[Utterance]:
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(entries, list):
        raise CheckpointError(f"{path} must be a list of clips, got {type(entries).__name__}.")
    return [_read_entry(path, index, entry) for index, entry in enumerate(entries)]


def _read_entry(path: Path, index: int, entry: Any) -> Utterance:
    wanted = {field.name for field in fields(Utterance)} - {"codes_file"}
    if not isinstance(entry, dict) or entry.keys() != wanted:
        keys = sorted(entry) if isinstance(entry, dict) else type(entry).__name__
        raise CheckpointError(f"{path}, entry {index}: expected exactly the keys {sorted(wanted)}, got {keys}.")
    recording, codes_file = path.parent / str(entry["recording"]), path.parent / _CODES
    for file in (recording, codes_file):
        if not file.is_file():
            raise CheckpointError(f"{path}, entry {index} ({entry['id']}): {file} is missing.")
    return Utterance(**{**entry, "recording": recording, "codes_file": codes_file})
