"""The whole training state in one safetensors file: tensors by name, the rest as JSON in its metadata.

No pickle, so that a state from elsewhere can be resumed without running its code; one file, so that replacing it is atomic
and a call that dies while saving leaves the last state whole.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from vgraph_lab.errors import CheckpointError

__all__ = ["load_optimizer", "load_state", "optimizer_tensors", "save_state", "with_prefix", "without_prefix"]

_FORMAT = "lab_recipe.state"


def save_state(path: Path, tensors: Mapping[str, Tensor], progress: Mapping[str, Any]) -> None:
    """Write tensors and JSON-able ``progress``; an earlier file is replaced in one step."""
    partial = path.with_name(path.name + ".partial")
    host = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(host, partial, metadata={"format": _FORMAT, "progress": json.dumps(progress)})
    partial.replace(path)


def load_state(path: Path, device: torch.device) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and progress of a file that :func:`save_state` wrote.

    Raises:
        CheckpointError: not such a file, or a damaged one.
    """
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (safe_open is not a mapping)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a readable training state ({error}).") from error
    if metadata.get("format") != _FORMAT:
        raise CheckpointError(f"{path} is a safetensors file, but no training state of this recipe.")
    return tensors, json.loads(metadata["progress"])


def with_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``tensors`` under ``prefix.name``."""
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


def without_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that :func:`with_prefix` put under ``prefix``."""
    return {name.removeprefix(f"{prefix}."): tensor for name, tensor in tensors.items() if name.startswith(f"{prefix}.")}


def optimizer_tensors(optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]) -> dict[str, Tensor]:
    """Moments and step counts, by parameter name instead of by position."""
    return {f"{key}.{names[parameter]}": value for parameter, state in optimizer.state.items() for key, value in state.items()}


def load_optimizer(optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str], tensors: Mapping[str, Tensor]) -> None:
    """Restore what :func:`optimizer_tensors` gave."""
    by_name = {name: parameter for parameter, name in names.items()}
    for name, tensor in tensors.items():
        key, _, parameter = name.partition(".")
        # AdamW keeps its step counts on the host unless it is fused
        optimizer.state[by_name[parameter]][key] = tensor.cpu() if key == "step" else tensor
