"""A mixture of experts whose experts live on several ranks: tokens travel there and back by all-to-all.

::

    rank 0   tokens ─route─▶ weights ─┐ dispatch ┌─▶ experts 0, 1 ─┐ combine ┌─▶ sum over ranks ─▶ tokens
    rank 1   tokens ─route─▶ weights ─┘          └─▶ experts 2, 3 ─┘         └─▶ sum over ranks ─▶ tokens

Every rank sends as many rows to each other rank as it has tokens, zero for those that go elsewhere: sizes are known on the
host, so that nothing waits for the routing, and a graph can hold all of it (with NCCL). Around each exchange a micro-batch gives the
turn to the next one, which computes meanwhile.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from vgraph_lab.errors import CaptureError, ConfigError, InputError, RankLostError, VGraphLabError
from vgraph_lab.graphs.backends import is_capturing

from .breakable import BreakableCUDAGraphCapture, eager_break_during_capture
from .forward_context import get_forward_context, is_forward_context_available
from .ubatching import dbo_span, dbo_yield_and_switch_from_comm_to_compute, dbo_yield_and_switch_from_compute_to_comm
from .workspace import WorkspaceManager

__all__ = ["ExpertExchange", "MoELayer", "moe_all_to_all"]


class ExpertExchange:
    """Which experts this rank has, and how tokens get to the others.

    Args:
        num_experts: of the layer, on all ranks together; ranks have equal parts, in order.
        group: the ranks; None for this process alone, where nothing travels.

    Raises:
        ConfigError: the ranks cannot have equal parts.
    """

    def __init__(self, num_experts: int, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank, self.world_size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        if num_experts % self.world_size:
            raise ConfigError(f"num_experts: {num_experts} cannot be divided among {self.world_size} ranks. Use a multiple of the ranks.")
        self.num_local_experts = num_experts // self.world_size

    @property
    def local_experts(self) -> range:
        """The experts of this rank."""
        return range(self.rank * self.num_local_experts, (self.rank + 1) * self.num_local_experts)

    @property
    def is_capturable(self) -> bool:
        """Whether a graph can hold the exchange: one rank exchanges nothing, and NCCL's work is kernels."""
        return self.group is None or self.world_size == 1 or dist.get_backend(self.group) == "nccl"

    def tokens_of_ranks(self, num_tokens: int) -> list[int]:
        """Tokens of each rank in this step, padding included, as the forward context says.

        Raises:
            InputError: it does not say so, or says something else of this rank.
        """
        if self.world_size == 1:
            return [num_tokens]
        across = get_forward_context().num_tokens_across_dp if is_forward_context_available() else None
        if across is None or len(across) != self.world_size or across[self.rank] != num_tokens:
            raise InputError(
                f"rank {self.rank} of {self.world_size} exchanges {num_tokens} tokens, the forward context says num_tokens_across_dp="
                f"{across}. Run batches as determine_batch_execution_and_padding() says, on every rank."
            )
        return list(across)

    def dispatch(self, tokens: Tensor, weights: Tensor, received: Tensor) -> tuple[Tensor, Tensor]:
        """Send tokens to the ranks of their experts.

        Args:
            tokens: [num_tokens, hidden].
            weights: of each expert for each token, zero where it is not chosen [num_tokens, num_experts].
            received: room for what comes [tokens of all ranks, hidden + num_local_experts]; unused with one rank.

        Returns:
            Tokens of all ranks, and the weights of the local experts for them.
        """
        if self.world_size == 1:
            return tokens, weights
        across, local = self.tokens_of_ranks(len(tokens)), weights.unflatten(1, (self.world_size, self.num_local_experts)).transpose(0, 1)
        goes_there = (local != 0).any(-1, keepdim=True)
        sent = torch.cat((torch.where(goes_there, tokens, 0), local), dim=-1).flatten(0, 1)
        self._travel(received, sent, across, [len(tokens)] * self.world_size)
        return received[:, : tokens.shape[1]], received[:, tokens.shape[1] :]

    def combine(self, computed: Tensor, num_tokens: int, received: Tensor) -> Tensor:
        """Bring results home and add up those of each token.

        Args:
            computed: sums over the local experts, for tokens of all ranks [tokens of all ranks, hidden].
            num_tokens: of this rank.
            received: room for what comes [world_size * num_tokens, hidden]; unused with one rank.

        Returns:
            [num_tokens, hidden].
        """
        if self.world_size == 1:
            return computed
        self._travel(received, computed.contiguous(), [num_tokens] * self.world_size, self.tokens_of_ranks(num_tokens))
        arrived: Tensor = received.unflatten(0, (self.world_size, num_tokens))
        return arrived.sum(0)

    def _travel(self, received: Tensor, sent: Tensor, received_rows: list[int], sent_rows: list[int]) -> None:
        """Exchange on the communication stream of a micro-batch; ``sent`` lives until that is over."""
        dbo_yield_and_switch_from_compute_to_comm()
        with dbo_span("all-to-all"):
            moe_all_to_all(received, sent, received_rows, sent_rows, self)
        dbo_yield_and_switch_from_comm_to_compute()


@eager_break_during_capture
def moe_all_to_all(received: Tensor, sent: Tensor, received_rows: list[int], sent_rows: list[int], exchange: ExpertExchange) -> None:
    """Send rows to each rank and receive rows from each; a break, so that graphs need not hold communication.

    Args:
        received: written [sum of received_rows, columns].
        sent: [sum of sent_rows, columns].
        received_rows: rows from each rank.
        sent_rows: rows to each rank.
        exchange: the ranks.

    Raises:
        CaptureError: a graph would have to hold it, and the process group's work is not the device's.
        RankLostError: the process group has failed. It cannot say because of whom: ``ranks`` is empty.
    """
    session = BreakableCUDAGraphCapture.current()
    if not exchange.is_capturable and is_capturing() and (session is None or session.is_capturing):
        raise CaptureError(
            f"a FULL graph cannot hold the exchange of experts over {dist.get_backend(exchange.group)}: the host does that work. "
            "Use cudagraph_mode PIECEWISE or NONE here, or NCCL on CUDA devices."
        )
    try:
        dist.all_to_all_single(received, sent, received_rows, sent_rows, group=exchange.group)
    except (VGraphLabError, torch.AcceleratorError, torch.OutOfMemoryError):
        raise
    except RuntimeError as error:  # gloo and NCCL have no class of their own for a peer that is gone
        told = f"the exchange of experts over {dist.get_backend(exchange.group)} failed: {str(error).splitlines()[0]}"
        raise RankLostError((), told) from error


class MoELayer(nn.Module):
    """A router and gated experts; each token goes to its ``top_k`` best ones.

    An expert's weights depend on the seed and its number alone, so that any number of ranks holds the same layer. Each local
    expert computes all tokens, with weight zero for those of others: shapes do not depend on the routing.

    Args:
        hidden_size: of tokens.
        intermediate_size: of each expert.
        exchange: ranks and experts.
        num_experts: of all ranks.
        top_k: experts of each token.
        workspace: scratch memory, shared by all layers.
        seed: of the weights.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        exchange: ExpertExchange,
        *,
        num_experts: int,
        top_k: int,
        workspace: WorkspaceManager,
        seed: int,
    ) -> None:
        super().__init__()
        self.exchange, self.top_k, self.workspace = exchange, top_k, workspace
        router = torch.empty(hidden_size, num_experts)
        self.router = nn.Parameter(router.normal_(std=hidden_size**-0.5, generator=torch.Generator().manual_seed(seed)))
        gate_up, down = [], []
        for expert in exchange.local_experts:
            generator = torch.Generator().manual_seed(seed + 1 + expert)
            gate_up.append(torch.empty(hidden_size, 2 * intermediate_size).normal_(std=hidden_size**-0.5, generator=generator))
            down.append(torch.empty(intermediate_size, hidden_size).normal_(std=intermediate_size**-0.5, generator=generator))
        self.gate_up, self.down = nn.Parameter(torch.stack(gate_up)), nn.Parameter(torch.stack(down))

    def route(self, x: Tensor) -> Tensor:
        """The weight of each expert for each token, zero but for the chosen ones [num_tokens, num_experts]."""
        chosen = (x @ self.router).float().softmax(-1).topk(self.top_k)
        shares = chosen.values / chosen.values.sum(-1, keepdim=True)
        return torch.zeros(len(x), self.router.shape[1], device=x.device).scatter(1, chosen.indices, shares).to(x.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[num_tokens, hidden] → the same."""
        exchange, (num_tokens, hidden) = self.exchange, x.shape
        rows, experts = sum(exchange.tokens_of_ranks(num_tokens)), exchange.num_local_experts
        is_alone = exchange.world_size == 1
        gate_up, out, there, back = self.workspace.get_simultaneous(
            ((experts, rows, self.gate_up.shape[2]), x.dtype),
            ((experts, rows, hidden), x.dtype),
            ((0 if is_alone else rows, hidden + experts), x.dtype),
            ((0 if is_alone else exchange.world_size * num_tokens, hidden), x.dtype),
        )
        tokens, weights = exchange.dispatch(x, self.route(x), there)
        torch.bmm(tokens.expand(experts, -1, -1), self.gate_up, out=gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        torch.bmm(F.silu(gate) * up, self.down, out=out)
        return exchange.combine(torch.where(weights.T[..., None] != 0, out * weights.T[..., None], 0).sum(0), num_tokens, back)
