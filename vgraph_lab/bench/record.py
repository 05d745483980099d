"""What a measurement is worth without this: the card, the versions, the command and the commit."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from errno import EISDIR
from pathlib import Path
from typing import Any

import torch

from vgraph_lab.errors import InputError

__all__ = ["MeasurementRecord", "check_writable", "describe_machine"]


def describe_machine(device: torch.device) -> dict[str, str]:
    """Card or processor, and the versions that decide about speed."""
    facts = {"python": platform.python_version(), "torch": torch.__version__, "platform": platform.platform()}
    if device.type == "cuda":
        facts["card"] = torch.cuda.get_device_name(device)
        facts["cuda"] = str(torch.version.cuda)
        facts["cudnn"] = str(torch.backends.cudnn.version())
        facts["cudnn_benchmark"] = str(torch.backends.cudnn.benchmark)
        facts["driver"] = _first_line(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    else:
        facts["card"] = f"CPU, {torch.get_num_threads()} threads"
    return facts


def _first_line(command: list[str]) -> str:
    """First line of a command's output, or ``unknown`` where it cannot be run."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return "unknown"


def _commit() -> str:
    return os.environ.get("VGRAPH_LAB_COMMIT") or _first_line(["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"])


@dataclass(frozen=True)
class MeasurementRecord:
    """One run of one bench.

    Attributes:
        bench: its name.
        settings: what was measured (geometry, dtype, shapes, repeats).
        rows: one flat mapping per measured case; units are in the names.
        machine: see :func:`describe_machine`.
        command: how to repeat it.
        commit: of the source tree. Outside a git checkout, what VGRAPH_LAB_COMMIT says, or ``unknown``.
        measured_at: UTC, ISO 8601.
    """

    bench: str
    settings: dict[str, Any]
    rows: list[dict[str, Any]]
    machine: dict[str, str]
    command: str = field(default_factory=lambda: " ".join(["vgraph-lab", *sys.argv[1:]]))
    commit: str = field(default_factory=_commit)
    measured_at: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    def to_json(self) -> str:
        """The record as indented JSON."""
        return json.dumps(asdict(self), indent=1) + "\n"

    def write(self, path: Path, *, overwrite: bool = False) -> Path:
        """Write the JSON; folders are made as needed.

        Raises:
            InputError: a file is there and must not be replaced, or none can be written there.
        """
        check_writable(path, overwrite=overwrite)
        path.write_text(self.to_json(), encoding="utf-8")
        return path


def check_writable(output: Path, *, overwrite: bool = False) -> None:
    """Find out before the work is done, not after it; makes the folder and leaves no file.

    Raises:
        InputError: a file is there and must not be replaced, or none can be written there.
    """
    if output.is_file() and not overwrite:
        raise InputError(f"{output} is there already, and nothing is written over. Choose another --output, or add --overwrite.")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        if output.is_dir():
            raise IsADirectoryError(EISDIR, "it is a folder")
        probe = output.with_name(output.name + ".partial")
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise InputError(f"{output} cannot be written: {error.strerror}. Choose another --output.") from error
