"""Small JSON files that say what they are: of listening tests and of audio sets."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from vgraph_lab import __version__
from vgraph_lab.errors import InputError

__all__ = ["read_json", "write_json"]

_T = TypeVar("_T")


def write_json(path: Path, kind: str, version: int, content: Any, adapter: TypeAdapter[Any]) -> None:
    """Write a file, replacing one that is there. It appears whole or not at all; folders are made as needed.

    Raises:
        InputError: none can be written there.
    """
    head = {"format": f"vgraph_lab {kind}", "version": version, "written_by": f"vgraph-lab {__version__}"}
    text = json.dumps(head | {"content": adapter.dump_python(content, mode="json")}, indent=1, ensure_ascii=False, allow_nan=False)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            partial.write_text(text, encoding="utf-8")
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror or error}. Choose another place.") from error


def read_json(path: Path, kind: str, version: int, adapter: TypeAdapter[_T]) -> _T:
    """The content of a file that :func:`write_json` wrote.

    Raises:
        InputError: the file is not there, damaged, of another kind, or of a newer version.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is no JSON, or damaged: {error}") from None
    stated = found.get("format") if isinstance(found, dict) else None
    number = found.get("version") if isinstance(found, dict) else None
    if stated != f"vgraph_lab {kind}" or type(number) is not int or number < 1:
        raise InputError(f"{path} is no {kind} of vgraph_lab: it states the format {stated!r} and the version {number!r}.")
    if number > version:
        raise InputError(
            f"{path} is a {kind} of version {number}, written by {found.get('written_by', 'an unknown program')}; "
            f"vgraph-lab {__version__} reads versions up to {version}. Update vgraph-lab."
        )
    try:
        return adapter.validate_json(json.dumps(found.get("content")), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the content"
        raise InputError(f"{path} is damaged: {where}: {first['msg']} ({error.error_count()} such findings).") from None
