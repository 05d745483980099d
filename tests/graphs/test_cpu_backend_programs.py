"""Random programs of views, in-place writes, deaths and draws: replays equal eager calls, state and random stream included."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vgraph_lab.graphs.backends.cpu import CpuGraphBackend

Step = tuple[int, int, int]
Live = list[Tensor]

# Each works on the live tensors (all of shape [6]; 0 is the static input, 1 the state) and two numbers that pick some.
STEPS: list[Callable[[Live, Tensor, Tensor], object]] = [
    lambda live, a, b: live.append(a + b),
    lambda live, a, b: live.append(a[:]),
    lambda live, a, b: live.append(a.view(2, 3).t().reshape(6)),
    lambda live, a, b: live.append(torch.cat([a[3:], b[:3]]).sin()),
    lambda live, a, b: live.append(torch.empty(6).copy_(a)),
    lambda live, a, b: live.append(a * torch.rand(6)),
    lambda live, a, b: live.append(a.sort().values.flip(0)),
    lambda live, a, b: a.mul_(0.5),
    lambda live, a, b: a[1:4].add_(b[2:5].clone()),
    lambda live, a, b: a[::2].fill_(0.25),
    lambda live, a, b: torch.cos(b.clone(), out=a),
    lambda live, a, b: a.view(3, 2)[:, 1].uniform_(),
    lambda live, a, b: torch._foreach_add_([a, b.clone()], 0.125),
    lambda live, a, b: live.__delitem__(slice(2, 3)),
    lambda live, a, b: live.__delitem__(slice(3, 5)),
    lambda live, a, b: live.append(torch.tensor(0.5).add_(a.sum()).expand(6).clone()),
]


def run(program: list[Step], x: Tensor, state: Tensor) -> Live:
    live = [x, state]
    for step, i, j in program:
        STEPS[step](live, live[i % len(live)], live[j % len(live)])
    return [tensor + 0 for tensor in live[2:]] + live[2:]


@settings(max_examples=80)
@given(
    program=st.lists(st.tuples(st.integers(0, len(STEPS) - 1), st.integers(0, 9), st.integers(0, 9)), max_size=25),
    seed=st.integers(0, 99),
    inference=st.booleans(),
)
def test_replays_equal_eager_calls(program: list[Step], seed: int, inference: bool) -> None:
    backend, mode = CpuGraphBackend(), torch.inference_mode if inference else torch.no_grad
    pool = backend.create_pool()
    x, state = torch.randn(6), torch.randn(6)
    twin, twin_state = x.clone(), state.clone()
    with mode():
        backend.warm_up(lambda: run(program, x.clone(), state.clone()), static_inputs=[x, state], owned=[], audit=True)
        graph, output = backend.capture(lambda: run(program, x, state), pool, static_inputs=[x], owned=[state])
    assert torch.equal(x, twin)
    assert torch.equal(state, twin_state)
    for attempt in range(3):
        x.normal_()
        twin.copy_(x)
        torch.manual_seed(seed + attempt)
        graph.replay()
        draws = torch.get_rng_state()
        torch.manual_seed(seed + attempt)
        with mode():
            eager = run(program, twin, twin_state)
        assert torch.equal(torch.get_rng_state(), draws)
        for found, wanted in zip([*output, x, state], [*eager, twin, twin_state], strict=True):
            assert torch.equal(found, wanted)
    del output, found
    assert pool.live_bytes == 0
