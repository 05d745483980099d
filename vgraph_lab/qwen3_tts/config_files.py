"""Reading a checkpoint's JSON configs into checked models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from vgraph_lab.errors import CheckpointError

__all__ = ["read_config"]

_MAX_LISTED = 8

Model = TypeVar("Model", bound=BaseModel)


def read_config(path: Path, model: type[Model], describes: str) -> Model:
    """The file as ``model``.

    Args:
        path: a JSON file that exists.
        model: what it must be.
        describes: what the file should describe, in words, for the error.

    Raises:
        CheckpointError: it is not JSON, or not that; the first problems are named with the path of their key.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise CheckpointError(f"{path} is nested too deeply to describe {describes}.") from error
    except ValueError as error:  # no JSON, no UTF-8, or an integer of thousands of digits
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    try:
        return model.model_validate(content)
    except ValidationError as error:
        found = [f"{'.'.join(map(str, e['loc'])) or 'config'}: {e['msg']}" for e in error.errors()]
        more = f"; and {len(found) - _MAX_LISTED} more" if len(found) > _MAX_LISTED else ""
        raise CheckpointError(f"{path} does not describe {describes}: {'; '.join(found[:_MAX_LISTED])}{more}") from error
