"""What one step of a runner returns."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .execution import BatchExecution, ExecutionExplanation

__all__ = ["ModelRunnerOutput"]


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """The result of one step. Tensors own their memory and are not waited for.

    Attributes:
        req_ids: in the order of the rows.
        logits: of each request's last token [num_reqs, vocab_size].
        hidden_states: of all tokens [num_tokens, hidden_size], if they were asked for.
        explanation: how the batch ran, and why.
    """

    req_ids: tuple[str, ...]
    logits: Tensor
    hidden_states: Tensor | None
    explanation: ExecutionExplanation

    @property
    def sampled_token_ids(self) -> Tensor:
        """The likeliest next token of each request [num_reqs]."""
        return self.logits.argmax(-1)

    @property
    def execution(self) -> BatchExecution:
        """How the batch ran."""
        return self.explanation.execution
