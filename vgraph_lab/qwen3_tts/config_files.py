"""Reading a checkpoint's JSON configs into checked models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from vgraph_lab.errors import CheckpointError

__all__ = ["read_config"]

Model = TypeVar("Model", bound=BaseModel)


def read_config(path: Path, model: type[Model], describes: str) -> Model:
    """The file as ``model``.

    Args:
        path: a JSON file that exists.
        model: what it must be.
        describes: what the file should describe, in words, for the error.

    Raises:
        CheckpointError: it is not JSON, or not that; each problem is named with the path of its key.
    """
    try:
        return model.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'config'}: {e['msg']}" for e in error.errors())
        raise CheckpointError(f"{path} does not describe {describes}: {problems}") from error
