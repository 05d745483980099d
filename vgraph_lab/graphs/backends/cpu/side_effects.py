"""What a capture changes outside of its pool, and how it is put back: capturing runs the function, CUDA's does not."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from contextlib import ExitStack

import torch
from torch import Tag, Tensor, UntypedStorage

from vgraph_lab.graphs.backends.audit import Seat
from vgraph_lab.graphs.backends.call import Call, storage_id
from vgraph_lab.graphs.backends.rules import refuse

__all__ = ["SideEffects"]


class SideEffects:
    """Tensors from outside and the default random generator as they were when the capture began.

    Until :meth:`undo` the generator runs from a secret seed. That is how a seeding inside the function shows, by
    whichever way and to whichever value, while the draws of other threads do not matter.

    Args:
        seats: of static inputs and owned tensors, as the capture found them.
    """

    def __init__(self, seats: Iterable[Seat]) -> None:
        self._seats = tuple(seats)
        self._memory: dict[int, tuple[UntypedStorage, UntypedStorage]] = {}
        self._state = torch.get_rng_state()
        self._seed = secrets.randbits(63)
        self._drawn: set[bytes] = set()  # states from which a call of the capture has drawn
        torch.default_generator.manual_seed(self._seed)

    def save_memory(self, tensor: Tensor) -> None:
        """Keep the bytes behind ``tensor``, once, before they are written to."""
        identity = storage_id(tensor)
        if identity not in self._memory:
            storage = tensor.untyped_storage()
            self._memory[identity] = storage, storage.clone()

    def before_draw(self, call: Call) -> bytes | None:
        """State of the default generator if ``call`` may draw from it; ``None`` for calls that cannot draw.

        Raises:
            CaptureRefusedError: the function has set that state.
        """
        if Tag.nondeterministic_seeded not in call.op.tags:
            return None
        self.check_generator()
        return _state()

    def after_draw(self, before: bytes) -> bool:
        """Whether the call has drawn numbers."""
        if before == _state():
            return False
        self._drawn.add(before)
        return True

    def check_generator(self, where: str | None = None) -> None:
        """Refuse the capture if the default generator was seeded, or is back in a state that was already drawn from.

        Two kinds of setting back escape: over draws inside an opaque operator, and where another thread draws before the next check.
        """
        if torch.default_generator.initial_seed() != self._seed or _state() in self._drawn:
            refuse(
                "torch.Generator.manual_seed()",
                "the default generator was seeded or its state set inside the captured function, and a replay does not do that again",
                "seed the generator before the call",
                where=where,
            )

    def undo(self) -> None:
        """Put everything back: addresses and shapes, bytes, and the generator."""
        with ExitStack() as undoing:  # which goes on after a step that fails, and raises at the end
            for storage, saved in self._memory.values():
                undoing.callback(_restore, storage, saved)
            for seat in self._seats:
                undoing.callback(seat.restore)
            undoing.callback(torch.set_rng_state, self._state)


def _restore(storage: UntypedStorage, saved: UntypedStorage) -> None:
    if storage.nbytes() != saved.nbytes():
        storage.resize_(saved.nbytes())
    storage.copy_(saved)


def _state() -> bytes:
    return torch.get_rng_state().numpy().tobytes()
