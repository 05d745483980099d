"""The dispatch mode that runs each call once, moves its results into the arena and records how to run it again."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tag, Tensor, UntypedStorage
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten

from vgraph_lab.graphs.backends.audit import CheckedMode, Origins
from vgraph_lab.graphs.backends.call import Call, storage_id, tensors_in
from vgraph_lab.graphs.backends.rules import refuse

from .arena import Lease
from .geometry import alias, byte_view, bytes_needed
from .out_variant import Moved, OutVariants
from .record import Record, copying_step, node_kind, step
from .side_effects import SideEffects
from .version_watch import VersionWatch

__all__ = ["Tape"]

_UNINITIALISED = {
    "aten::empty",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::empty_permuted",
    "aten::new_empty",
    "aten::new_empty_strided",
}


class Tape(CheckedMode):
    """Records what the captured function does.

    Views are never recorded. A recorded call works on *aliases*: tensors of the same geometry over the same memory
    that do not keep blocks alive, so that a block is free for the next call as soon as the function drops its tensor.

    Args:
        lease: where results go.
        origins: the tensors that the function may use.
        effects: keeps what the capture changes outside of the lease.
        places: where the aliases of arena tensors go, by storage id. Tapes of one pass share it, so that a later one does not
            keep the memory of what an earlier one has made.
    """

    def __init__(self, lease: Lease, origins: Origins, effects: SideEffects, places: dict[int, UntypedStorage] | None = None) -> None:
        super().__init__(origins)
        self.records: list[Record] = []
        self._lease = lease
        self._effects = effects
        self._watch = VersionWatch((*origins.static_inputs, *origins.owned))
        # `origins` keeps the ids unique. Each block has a storage of its own: kernels take tensors of one storage for
        # overlapping, and a resize must not leave the block.
        self._places = {} if places is None else places
        self._variants = OutVariants()

    def run(self, call: Call) -> Any:
        """Execute ``call``, record it unless it is a view, and return its result with new memory moved into the arena."""
        _check_device(call, call.inputs)
        self._watch.before(call)
        for tensor in call.written:
            if self.origins.of(tensor) != "made":
                self._effects.save_memory(tensor)
        state = self._effects.before_draw(call)
        result = self.execute(call)
        generator = torch.default_generator if state is not None and self._effects.after_draw(state) else None

        leaves, spec = tree_flatten(result)
        _check_device(call, leaves)
        held = set() if call.lifts_constant else {storage_id(tensor) for tensor in call.inputs}
        fresh = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and storage_id(leaf) not in held]
        only_checks = bool(call.inputs) and not call.op._schema.returns  # e.g. torch._assert_async
        if Tag.inplace_view in call.op.tags or not (fresh or call.written or only_checks):
            return result
        moved = self._move(leaves, fresh, factory=not call.inputs)
        if call.name not in _UNINITIALISED:
            self._record(call, leaves, fresh, moved, generator)
        return tree_unflatten(leaves, spec) if fresh else result

    def check_end(self, output: Any, where: str) -> None:
        """Refuse outputs of unknown origin, and seedings and writes of other threads since the last call."""
        super().check_end(output, where)
        with _disable_current_modes():  # these looks at the tensors are not the function's
            self._effects.check_generator(where)
            self._watch.check_all(tensors_in(output), where)

    def _move(self, leaves: list[Any], fresh: list[int], *, factory: bool) -> list[Moved]:
        """Replace the results at the positions ``fresh`` by tensors of the arena: one block for each new storage."""
        sharing: dict[int, list[int]] = {}
        for i in fresh:
            sharing.setdefault(storage_id(leaves[i]), []).append(i)
        moved = []
        for positions in sharing.values():
            nbytes = max(bytes_needed(leaves[i]) for i in positions)
            if not nbytes:
                continue  # no elements, no memory
            block, owner = self._lease.allocate(nbytes)
            storage = owner.untyped_storage()
            self._places[storage_id(owner)] = block.alias_storage(nbytes)
            result = byte_view(leaves[positions[0]].untyped_storage(), nbytes)
            owner.copy_(result)
            moved.append(Moved(result, owner))
            for i in positions:
                leaves[i] = alias(leaves[i], storage)
                self._watch.add(leaves[i], factory=factory)
        return moved

    def _record(self, call: Call, leaves: list[Any], fresh: list[int], moved: list[Moved], generator: torch.Generator | None) -> None:
        results = [leaves[i] for i in fresh]
        args, kwargs = tree_unflatten([self._alias(leaf) if isinstance(leaf, Tensor) else leaf for leaf in call.leaves], call.spec)
        if results and not call.inputs and call.accepts("dtype"):
            kwargs["dtype"] = results[0].dtype  # else a replay would depend on torch's default dtype
        recorded = Call.of(call.op, args, kwargs)
        targets = [self._alias(result) for result in results]
        run: Callable[[], object] | None = None
        if fresh and len(fresh) == len(leaves) and not call.written:
            run = self._variants.step(recorded, targets, moved)
        if run is None:
            run = step(recorded.op, recorded.args, recorded.kwargs)
            if fresh:
                targets = [self._alias(result) for result in results]  # the trial above may have reshaped the first ones
                run = copying_step(run, list(zip(fresh, targets, strict=True)))
        writes = (*recorded.written, *targets)
        self.records.append(Record(str(call.op), node_kind(call, results), run, tuple(recorded.inputs), writes, generator))

    def _alias(self, tensor: Tensor) -> Tensor:
        place = self._places.get(storage_id(tensor))  # none for memory from outside, which the recording keeps alive
        return alias(tensor, tensor.untyped_storage() if place is None else place)


def _check_device(call: Call, values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, Tensor) and value.device.type != "cpu":
            refuse(
                str(call.op), f"it works on {value.device}, and this is the cpu backend", "move model and buffers to the backend's device"
            )
