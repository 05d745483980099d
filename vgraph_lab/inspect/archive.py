"""The file of a recording: a zip of two JSON texts, of which ``format.json`` says what it is and of which version.

No pickle, nothing that runs when it is read.
"""

from __future__ import annotations

import io
import json
import zipfile
import zlib
from pathlib import Path

from vgraph_lab import __version__
from vgraph_lab.errors import InputError

__all__ = ["FORMAT_VERSION", "check_free", "read_archive", "write_archive"]

FORMAT_VERSION = 1
"""Version of the file; a file of a higher one is refused."""

_FORMAT = "vgraph_lab recording"
_FORMAT_FILE, _CONTENT_FILE = "format.json", "recording.json"
_MOST_BYTES = 1 << 30  # of JSON; a damaged or hostile archive may claim any size


def check_free(path: Path, *, overwrite: bool) -> None:
    """Find out before the work is done whether :func:`write_archive` would refuse.

    Raises:
        InputError: a file is there and must not be replaced; or it is a folder.
    """
    if path.is_dir():
        raise InputError(f"{path} is a folder. Name a file in it.")
    if path.exists() and not overwrite:
        raise InputError(f"{path} is there already, and nothing is written over. Choose another name, or ask to overwrite it.")


def write_archive(path: Path, text: bytes, *, overwrite: bool) -> None:
    """Write a recording's JSON. The file appears whole or not at all; folders are made as needed.

    Raises:
        InputError: a file is there and must not be replaced, or none can be written there.
    """
    check_free(path, overwrite=overwrite)
    partial = path.with_name(path.name + ".partial")
    head = json.dumps({"format": _FORMAT, "version": FORMAT_VERSION, "written_by": f"vgraph-lab {__version__}"}, indent=1)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(_FORMAT_FILE, head)
        archive.writestr(_CONTENT_FILE, text)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not overwrite:
            path.touch(exist_ok=False)  # from here on nobody else can make it
        try:
            partial.write_bytes(buffer.getvalue())
            partial.replace(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            if not overwrite:
                path.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror or error}. Choose another place.") from error


def read_archive(path: Path) -> bytes:
    """A recording's JSON.

    Raises:
        InputError: the file is not there, empty, damaged, no recording, or of a newer version.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}.") from error
    if not content:
        raise InputError(f"{path} is empty, which a recording never is. Whoever wrote it was interrupted: record again.")
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            _check_version(_member(archive, _FORMAT_FILE), path)
            return _member(archive, _CONTENT_FILE)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise InputError(f"{path} is no recording, or damaged: {error}. Recordings are written by record(...).save(path).") from None
    except KeyError as error:
        raise InputError(f"{path} is an archive, but no recording: {error.args[0]}") from None


def _member(archive: zipfile.ZipFile, name: str) -> bytes:
    if archive.getinfo(name).file_size > _MOST_BYTES:
        raise zipfile.BadZipFile(f"{name} claims more than {_MOST_BYTES:,} bytes")
    return archive.read(name)


def _check_version(text: bytes, path: Path) -> None:
    try:
        head = json.loads(text)
    except ValueError as error:
        raise InputError(f"{path} is damaged: {_FORMAT_FILE} is no JSON ({error}).") from None
    version = head.get("version") if isinstance(head, dict) and head.get("format") == _FORMAT else None
    if type(version) is not int or version < 1:
        raise InputError(f"{path} is no recording: {_FORMAT_FILE} says {head!r}.")
    if version > FORMAT_VERSION:
        raise InputError(
            f"{path} is a recording of version {version}, written by {head.get('written_by', 'an unknown program')}; "
            f"vgraph-lab {__version__} reads versions up to {FORMAT_VERSION}. Update vgraph-lab."
        )
