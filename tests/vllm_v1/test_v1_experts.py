"""Experts on several ranks: real processes over gloo, in every mode, against the dense model; and the layer by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import experts_child
import pytest
import torch
from dense_reference import dense_logits, experts
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_processes import run_ranks

from vgraph_lab.errors import ConfigError
from vgraph_lab.vllm_v1 import WorkloadConfig, WorkloadModel, WorkspaceManager
from vgraph_lab.vllm_v1.model_wrappers import FULL_TARGET, PIECEWISE_TARGET, UBATCH_TARGET
from vgraph_lab.vllm_v1.moe import ExpertExchange, MoELayer


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 9), st.integers(1, 6), st.integers(1, 3), st.booleans(), st.integers(0, 99))
def test_a_layer_equals_a_loop_over_experts(rows: int, num_experts: int, top_k: int, rubbish: bool, seed: int) -> None:
    top_k = min(top_k, num_experts)
    workspace = WorkspaceManager(torch.device("cpu"))
    exchange = ExpertExchange(num_experts)
    layer = MoELayer(6, 5, exchange, num_experts=num_experts, top_k=top_k, workspace=workspace, seed=seed).requires_grad_(
        requires_grad=False
    )
    x = torch.randn(rows, 6, generator=torch.Generator().manual_seed(seed))
    weights = {name: tensor.double() for name, tensor in layer.state_dict().items()}
    expected = torch.stack([experts(weights, "", top_k, row) for row in x.double()])
    if rubbish:  # rows that mean nothing, and scratch memory that somebody else has used
        x = torch.cat((x, torch.full((3, 6), torch.nan)))
        layer(x)
    routed = layer.route(x)
    assert torch.allclose(routed[:rows].sum(-1), torch.ones(rows))
    assert ((routed[:rows] != 0).sum(-1) == top_k).all()
    assert torch.allclose(layer(x)[:rows].double(), expected, atol=1e-5)


def test_an_expert_that_overflows_harms_its_own_tokens_only() -> None:
    workspace = WorkspaceManager(torch.device("cpu"))
    layer = MoELayer(6, 5, ExpertExchange(3), num_experts=3, top_k=1, workspace=workspace, seed=1).requires_grad_(requires_grad=False)
    x = torch.randn(12, 6, generator=torch.Generator().manual_seed(0))
    broken, before = layer.route(x)[:, 1] != 0, layer(x)
    assert 0 < broken.sum() < 12
    layer.down[1] = torch.inf
    after = layer(x)
    assert torch.equal(after[~broken], before[~broken])
    assert not after[broken].isfinite().any()


def test_experts_that_cannot_be_shared_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed as dist

    monkeypatch.setattr(dist, "get_rank", lambda group: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 3)
    group: Any = object()
    with pytest.raises(ConfigError, match="num_experts: 4 cannot be divided among 3 ranks"):
        ExpertExchange(4, group)
    assert list(ExpertExchange(6, group).local_experts) == [2, 3]


MODEL = {"num_experts": 4, "max_model_len": 32, "num_layers": 2}
# For each rank its requests with their new tokens; none: a dummy batch.
STEPS: list[list[list[Any]]] = [
    [[["a", [1, 2, 3]], ["b", [4]]], [["x", [5, 6]]]],
    [[["a", [7]], ["b", [8]]], [["x", [9]]]],
    [[], [["x", [1, 2, 3, 4, 5]]]],
    [[["a", [3] * 12]], [["x", [2]]]],  # beyond all graphs on one rank: both eager, each in its own size
    [[["b", [6]]], []],
    [[["c", [5] * 7]], [["y", [1, 2]], ["z", [3, 4, 5, 6]]]],  # large enough to be split: 7 and 6 tokens
    [[["a", [1]], ["b", [2]], ["c", [3]]], [["y", [4]], ["z", [5]], ["x", [6]]]],  # likewise, decode
]
# Tokens of both ranks in each step, padding included.
OWN = [[4, 2], [2, 1], [1, 5], [12, 1], [1, 1], [7, 6], [3, 3]]
PADDED = [[4, 4], [2, 2], [8, 8], [12, 1], [1, 1], [8, 8], [4, 4]]
SPLIT = [False, False, False, False, False, True, True]


def run(folder: Path, model: dict[str, Any], modes: list[str]) -> list[dict[str, Any]]:
    """What each of two ranks has found."""
    codes, found = run_ranks(folder, experts_child.main, size=2, model=model, modes=modes, steps=STEPS)
    assert codes == [0, 0]
    return found


def check_logits(rank: int, result: dict[str, Any], config: WorkloadConfig, weights: dict[str, Any]) -> None:
    history: dict[str, list[int]] = {}
    for step, (*_, logits) in zip(STEPS, result["steps"], strict=True):
        for (req_id, tokens), row in zip(step[rank], logits, strict=True):
            history.setdefault(req_id, []).extend(tokens)
            expected = dense_logits(weights, config, history[req_id])[-1]
            assert torch.allclose(torch.tensor(row).double(), expected, atol=2e-4)


def test_ranks_that_share_experts_equal_one_dense_model(tmp_path: Path) -> None:
    found = run(tmp_path, MODEL, ["NONE", "PIECEWISE", "NONE+dbo", "PIECEWISE+dbo"])
    config = WorkloadConfig(**MODEL)
    weights = WorkloadModel(config).state_dict()
    for rank in range(2):
        full, alone, across, captured = found[rank]["refused"]
        assert "cudagraph_mode: FULL has FULL graphs, which cannot hold the exchange of experts over gloo" in full
        assert "experts are divided among 2 ranks, data_parallel_size is 1" in alone
        assert f"rank {rank} of 2 exchanges 3 tokens, the forward context says num_tokens_across_dp=None" in across
        assert "a FULL graph cannot hold the exchange of experts over gloo" in captured
        for mode in ("NONE", "PIECEWISE", "NONE+dbo", "PIECEWISE+dbo"):
            result, has_graphs, is_split = found[rank][mode], mode.startswith("PIECEWISE"), mode.endswith("dbo")
            assert result["experts"] == 2
            graphs = ["PIECEWISE" if has_graphs and number != 3 else "NONE" for number in range(len(STEPS))]
            assert [step[0] for step in result["steps"]] == graphs
            sizes = PADDED if has_graphs else [[max(own)] * 2 if is_split and split else own for own, split in zip(OWN, SPLIT, strict=True)]
            assert [step[2] for step in result["steps"]] == sizes
            assert [step[1] for step in result["steps"]] == [tokens[rank] for tokens in sizes]
            assert [step[3] for step in result["steps"]] == [split and is_split for split in SPLIT]
            served = [ran == "PIECEWISE" and bool(step[rank]) for ran, step in zip(graphs, STEPS, strict=True)]
            assert result["hits"] == sum(s and not (split and is_split) for s, split in zip(served, SPLIT, strict=True))
            check_logits(rank, result, config, weights)


def test_micro_batches_in_a_full_graph(tmp_path: Path) -> None:
    """Without experts nothing has to travel, so that a CPU graph may hold them."""
    model = MODEL | {"num_experts": 0}
    found = run(tmp_path, model, ["FULL_AND_PIECEWISE+dbo"])
    config = WorkloadConfig(**model)
    weights = WorkloadModel(config).state_dict()
    for rank in range(2):
        result = found[rank]["FULL_AND_PIECEWISE+dbo"]
        piecewise = [[PIECEWISE_TARGET, size] for size in (8, 4, 2, 1)]
        assert result["graphs"] == [*piecewise, *([UBATCH_TARGET, size] for size in (8, 4, 2)), [FULL_TARGET, 1]]
        assert [step[3] for step in result["steps"]] == SPLIT
        assert result["steps"][-1][0] == "FULL"
        assert result["split_hits"] == 1
        check_logits(rank, result, config, weights)
