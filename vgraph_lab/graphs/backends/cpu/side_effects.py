"""What a capture changes outside of its pool, and how it is put back: capturing runs the function, CUDA's does not."""

from __future__ import annotations

import torch
from torch import Tag, Tensor, UntypedStorage

from vgraph_lab.graphs.backends.call import Call, storage_id
from vgraph_lab.graphs.backends.rules import refuse

__all__ = ["SideEffects"]


class SideEffects:
    """Memory and random generators as they were when the capture first touched them."""

    def __init__(self) -> None:
        self._default_state = torch.get_rng_state()
        self._memory: dict[int, tuple[UntypedStorage, UntypedStorage]] = {}
        self._generators: dict[int, tuple[torch.Generator, Tensor]] = {}
        self._last_states: dict[int, Tensor] = {}

    def save_memory(self, tensor: Tensor) -> None:
        """Keep the bytes behind ``tensor``, once, before they are written to."""
        identity = storage_id(tensor)
        if identity not in self._memory:
            storage = tensor.untyped_storage()
            self._memory[identity] = storage, storage.clone()

    def before_draw(self, call: Call) -> tuple[torch.Generator, Tensor] | None:
        """The generator that ``call`` may draw from and its state, which is kept; ``None`` for calls that cannot draw.

        Raises:
            CaptureRefusedError: the state of an explicit generator was set between two draws.
        """
        if Tag.nondeterministic_seeded not in call.op.tags:
            return None
        generator = next((leaf for leaf in call.leaves if isinstance(leaf, torch.Generator)), torch.default_generator)
        state = generator.get_state()
        self._generators.setdefault(id(generator), (generator, state))
        last = self._last_states.get(id(generator), state)
        # Other threads may draw from the default generator at any time; an explicit one belongs to the function.
        if generator is not torch.default_generator and not torch.equal(last, state):
            refuse(
                "torch.Generator.manual_seed()",
                "the generator's state was set inside the captured function, and a replay does not set it again",
                "seed the generator before the call",
            )
        return generator, state

    def after_draw(self, generator: torch.Generator, before: Tensor) -> bool:
        """Whether the call has drawn numbers."""
        self._last_states[id(generator)] = state = generator.get_state()
        return not torch.equal(before, state)

    def undo(self) -> None:
        """Put everything back. Version counters do not change by this."""
        for storage, saved in self._memory.values():
            storage.copy_(saved)
        for generator, state in self._generators.values():
            generator.set_state(state)
        torch.set_rng_state(self._default_state)
