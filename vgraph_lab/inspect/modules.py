"""Which ``nn.Module`` launched each node of a CPU graph: the captured function runs once more and is watched.

Nothing is kept for this at capture time, so that it costs nothing unless somebody asks. The run is eager, through the same
dispatch as a capture, and its operations are matched with the graph's nodes one by one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tag, Tensor, nn

from vgraph_lab.errors import InputError
from vgraph_lab.graphs.backends.audit import CheckedMode, Origins, run_checked
from vgraph_lab.graphs.backends.call import Call, storage_id, tensors_in
from vgraph_lab.graphs.backends.rules import capture_conditions
from vgraph_lab.graphs.capture import owned_tensors
from vgraph_lab.graphs.entry import GraphEntry
from vgraph_lab.graphs.structure import tensors

from .pool_layout import Graphs

__all__ = ["launching_modules"]


def launching_modules(manager: Graphs, entry: GraphEntry) -> tuple[str, ...]:
    """The module that launched each node of an entry, in the order of its nodes.

    The captured function runs once on the entry's static buffers, as in a warm-up, while the pool is held: calls wait for it.
    Random numbers that it draws are put back.

    Returns:
        The innermost module whose ``forward`` was running, as ``Class.path.inside``; empty for what ran outside of all.

    Raises:
        InputError: the backend is not the CPU's, where nodes are operations one to one; the entry was released; the function
            writes into the model, which this must not do again; or it did something else than when it was captured.
    """
    if manager.backend.name != "cpu":
        raise InputError(
            f"modules are known on the cpu backend only, this one is {manager.backend.device}: one operation may launch several kernels "
            "there. Capture the same shapes with device='cpu' to see which module launches what."
        )
    routine = manager.targets[entry.target_id].routine
    with manager.pool.exclusive():
        if entry.is_released:
            raise InputError(f"{entry.target_id} {entry.descriptor}: the graph was reset; look at it before clear().")
        modules = list(routine.captured_modules())
        routine.prepare_for_capture(entry.descriptor, entry.buffers)
        with _watched(modules) as running, capture_conditions(), torch.random.fork_rng(devices=[]):
            watch = _Watch(Origins(tensors(dict(entry.buffers)), owned_tensors(modules)), running)
            run_checked(lambda: routine.forward_for_capture(entry.descriptor, entry.buffers), watch)
        names = [node.name for node in entry.graph.nodes()]
    if names != [name for name, _ in watch.launched]:
        raise InputError(
            f"{entry.target_id} {entry.descriptor}: the captured function ran {len(watch.launched)} operations now that are not the "
            f"{len(names)} of its graph. Whatever it depends on has changed since."
        )
    return tuple(module for _, module in watch.launched)


class _Watch(CheckedMode):
    """Runs each call and notes those that a tape would record, with the module that is running."""

    def __init__(self, origins: Origins, running: list[str]) -> None:
        super().__init__(origins)
        self.launched: list[tuple[str, str]] = []
        self._running = running

    def run(self, call: Call) -> Any:
        if any(self.origins.of(tensor) == "owned" for tensor in call.written):
            raise InputError(f"{call.op} writes into the model, so that running the captured function again would change it.")
        result = self.execute(call)
        if _is_recorded(call, result):
            self.launched.append((str(call.op), self._running[-1] if self._running else ""))
        return result


def _is_recorded(call: Call, result: Any) -> bool:
    """Whether a tape has a node for the call: it does work, and is no view and no mere allocation."""
    held = set() if call.lifts_constant else {storage_id(tensor) for tensor in call.inputs}
    has_fresh = any(storage_id(tensor) not in held for tensor in tensors_in(result))
    only_checks = bool(call.inputs) and not call.op._schema.returns
    is_allocation = call.name.removeprefix("aten::").removeprefix("new_").startswith("empty")
    return Tag.inplace_view not in call.op.tags and not is_allocation and bool(has_fresh or call.written or only_checks)


@contextmanager
def _watched(roots: Iterable[nn.Module]) -> Iterator[list[str]]:
    """A stack of the modules that this thread is running, innermost last, while the block lasts."""
    running: list[str] = []
    thread = threading.get_ident()

    def enter(name: str) -> None:
        if threading.get_ident() == thread:  # others may call the same modules meanwhile
            running.append(name)

    def leave() -> None:
        if threading.get_ident() == thread:
            running.pop()

    with ExitStack() as hooks:
        for root in roots:
            for path, module in root.named_modules():
                name = ".".join(filter(None, (type(root).__name__, path)))

                def before(_module: nn.Module, _args: Any, name: str = name) -> None:
                    enter(name)

                def after(_module: nn.Module, _args: Any, _output: Tensor | Any) -> None:
                    leave()

                hooks.callback(module.register_forward_pre_hook(before).remove)
                hooks.callback(module.register_forward_hook(after, always_call=True).remove)
        yield running
