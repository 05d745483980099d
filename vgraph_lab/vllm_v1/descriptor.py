"""The shape key of this path's graphs: a padded batch, as vLLM describes it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from vgraph_lab.errors import InputError
from vgraph_lab.graphs import Descriptor

__all__ = ["BatchDescriptor"]


@dataclass(frozen=True, slots=True)
class BatchDescriptor(Descriptor):
    """A padded batch. Fields and order are those of ``vllm.forward_context.BatchDescriptor`` (0.25.1).

    It is a :class:`~vgraph_lab.graphs.Descriptor`, so that entries, statistics and tables take it like any other: vLLM
    lays all tokens of a batch in one row, hence ``batch_size`` is 1 and ``frames`` counts tokens.

    Attributes:
        num_tokens: tokens of the batch, padding included.
        num_reqs: requests of the batch, padding included; None if any number will do (PIECEWISE, whose attention is
            eager).
        uniform: whether all requests have the same number of tokens.
        has_lora: whether a LoRA adapter is active.
        num_active_loras: how many different adapters the graph is made for.

    Raises:
        InputError: a count is out of range, or the LoRA fields contradict each other.
    """

    batch_size: int = field(init=False, repr=False, compare=False)
    frames: int = field(init=False, repr=False, compare=False)
    state: str = field(init=False, repr=False, compare=False)
    num_tokens: int
    num_reqs: int | None = None
    uniform: bool = False
    has_lora: bool = False
    num_active_loras: int = 0

    def __post_init__(self) -> None:
        if self.num_tokens < 1 or (self.num_reqs is not None and self.num_reqs < 1):
            raise InputError(f"a BatchDescriptor needs num_tokens ≥ 1 and num_reqs ≥ 1 or None, got {self.num_tokens} and {self.num_reqs}.")
        if self.num_active_loras < 0 or (self.num_active_loras and not self.has_lora):
            raise InputError(
                f"num_active_loras={self.num_active_loras} with has_lora={self.has_lora}: "
                "adapters are counted from 0, and a batch with any has has_lora=True."
            )
        object.__setattr__(self, "batch_size", 1)
        object.__setattr__(self, "frames", self.num_tokens)
        object.__setattr__(self, "state", "uniform" if self.uniform else "")

    def relax_for_piecewise_cudagraphs(self) -> BatchDescriptor:
        """The same batch for graphs that leave attention out: any number of requests, uniform or not."""
        return replace(self, num_reqs=None, uniform=False)

    def __str__(self) -> str:
        requests = "" if self.num_reqs is None else f"×{self.num_reqs} req"
        parts = [f"{self.num_tokens} tok{requests}"]
        parts += ["uniform"] * self.uniform
        parts += [f"{self.num_active_loras} LoRA"] * self.has_lora
        return "·".join(parts)
