"""Real training speech: the Italian and Russian prompts of Asterisk (CC-BY-3.0), without the evaluation clips.

They come as G.722 at 16 kHz in the Debian packages ``asterisk-core-sounds-{it,ru}-g722``, their texts in
``asterisk-core-sounds-{it,ru}``. Needs av (PyAV) and scipy (README).
"""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from vgraph_lab import bundled
from vgraph_lab.errors import InputError

__all__ = ["LANGUAGES", "chosen_prompts", "read_g722", "read_transcripts"]

LANGUAGES = ("it", "ru")
_SHORTEST_SECONDS = 1.5
_BYTES_PER_SECOND = 8_000  # G.722 at 64 kbit/s
_NOT_SPEECH = ("silence", "tone", "beep", "monkey", "weasel")


def chosen_prompts(root: Path, language: str) -> Iterator[Path]:
    """Speech prompts of 1.5 s and more, in a fixed order, without sound effects and evaluation clips.

    Args:
        root: where the packages were unpacked (it contains ``usr``).
        language: one of :data:`LANGUAGES`.

    Raises:
        InputError: the packages are not there.
    """
    folders = sorted((root / "usr/share/asterisk/sounds").glob(f"{language}_*"))
    texts = root / f"usr/share/doc/asterisk-core-sounds-{language}/core-sounds-{language}.txt.gz"
    if not folders or not texts.is_file():
        raise InputError(
            f"{root} lacks the {language} prompts. Unpack the Debian packages asterisk-core-sounds-{language}-g722 and "
            f"asterisk-core-sounds-{language} there (dpkg -x)."
        )
    transcripts = read_transcripts(texts)
    evaluated = {clip.id.split("_", 1)[1] for clip in bundled.utterances(language=language)}
    for path in sorted(folders[0].rglob("*.g722")):
        name = path.relative_to(folders[0]).with_suffix("").as_posix()
        is_speech = not any(word in name for word in _NOT_SPEECH) and not transcripts.get(name, "").startswith("[")  # [sound effect]
        is_evaluated = f"asterisk_{language}_{name.replace('/', '__')}" in evaluated
        if is_speech and not is_evaluated and path.stat().st_size >= _SHORTEST_SECONDS * _BYTES_PER_SECOND:
            yield path


def read_transcripts(path: Path) -> dict[str, str]:
    """Prompt name → what is said, of a ``core-sounds-*.txt.gz``."""
    with gzip.open(path, "rt", encoding="utf-8-sig", errors="replace") as lines:
        matches = (re.match(r"^([\w/\-]+):\s*(.+)$", line.strip()) for line in lines)
        return {match[1]: match[2] for match in matches if match}


def read_g722(path: Path) -> np.ndarray[Any, np.dtype[np.float32]]:
    """A raw G.722 file as floats at 24 kHz."""
    import av
    from scipy.signal import resample_poly

    with av.open(str(path), format="g722") as container:
        pcm = np.concatenate([frame.to_ndarray().reshape(-1) for frame in container.decode(audio=0)])
    wav: np.ndarray[Any, np.dtype[np.float32]] = resample_poly(pcm.astype(np.float32) / 32768, 3, 2).astype(np.float32)
    return wav
