"""What a person typed into a capture panel, made into settings or into a message that helps."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from vgraph_lab.bundled import checkpoint_folder
from vgraph_lab.errors import ConfigError

__all__ = ["BUNDLED", "CaptureSettings"]

BUNDLED = "bundled"
"""What the checkpoint field says for the checkpoint that comes with this package."""

_MOST_DIGITS = 6


@dataclass(frozen=True, slots=True)
class CaptureSettings:
    """What to capture, of which checkpoint, where.

    Attributes:
        checkpoint: folder of the checkpoint.
        backend: ``auto``, ``cpu`` or ``cuda``.
        frames: codec frames per graph; none where something else tells them.
        batch_sizes: rows per graph; each is captured for each frame count.
    """

    checkpoint: Path
    backend: str
    frames: tuple[int, ...]
    batch_sizes: tuple[int, ...]

    @classmethod
    def parse(cls, checkpoint: str, backend: str, frames: str | None, batch_sizes: str) -> Self:
        """Settings from text; ``frames`` is None where there is no such field. Whether the folder can be read is found out later.

        Raises:
            ConfigError: no checkpoint, or sizes that are not whole numbers from 1, each once.
        """
        folder = checkpoint.strip()
        if not folder:
            raise ConfigError(f"Checkpoint is empty. Enter {BUNDLED!r} or a folder with config.json and safetensors.")
        path = checkpoint_folder() if folder == BUNDLED else Path(folder).expanduser()
        sizes = () if frames is None else _numbers("Frames per graph", frames, "50, 56, 69")
        return cls(path, backend, sizes, _numbers("Batch sizes", batch_sizes, "1, 2, 4"))


def _numbers(field: str, text: str, example: str) -> tuple[int, ...]:
    words = text.replace(",", " ").split()
    if not words:
        raise ConfigError(f"{field} is empty. Enter whole numbers from 1, separated by commas, such as {example}.")
    bad = [word for word in words if not (word.isascii() and word.isdigit() and len(word) <= _MOST_DIGITS and int(word) >= 1)]
    if bad:
        raise ConfigError(
            f"{field}: {', '.join(map(repr, bad))} is not a whole number from 1 to {10**_MOST_DIGITS - 1}. "
            f"Separate numbers by commas, such as {example}."
        )
    numbers = tuple(map(int, words))
    repeated = sorted({number for number in numbers if numbers.count(number) > 1})
    if repeated:
        raise ConfigError(f"{field}: {', '.join(map(str, repeated))} is given more than once. Each size is captured once.")
    return numbers
