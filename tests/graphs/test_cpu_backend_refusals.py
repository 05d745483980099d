"""What a graph cannot hold is refused, with the operation and the user's line, by the capture and by the audit alike."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from vgraph_lab.errors import CaptureRefusedError
from vgraph_lab.graphs.backends.cpu import ArenaPool, CpuGraphBackend

Function = Callable[[Tensor], Any]

HOST_VALUES: dict[str, Function] = {
    "item": lambda x: x * x.sum().item(),
    "float": lambda x: x * float(x[0]),
    "int": lambda x: x[: int(x[0])],
    "range": lambda x: [x + i for i in range(x.long()[1])],
    "truth": lambda x: x if x.sum() > 0 else -x,
    "slice_by_tensor": lambda x: x[: x.long()[1]],
    "format": lambda x: f"{x[0]:.3f}",
    "equal": lambda x: torch.equal(x, x),
    "allclose": lambda x: torch.allclose(x, x + 1),
    "contains": lambda x: 3.0 in x,
    "istft": lambda x: torch.istft(torch.view_as_complex(x.repeat(3, 2).view(3, 4, 2)), 4, window=torch.ones(4)),
}
DATA_SHAPES: dict[str, Function] = {
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 0)[0],
    "mask_read": lambda x: x[x > 0],
    "mask_write": lambda x: (x + 1).index_put_((x > 0,), x[:2]),
    "masked_select": lambda x: x.masked_select(x > 0),
    "unique": lambda x: x.unique(),
    "repeat_interleave": lambda x: x.repeat_interleave(x.long().abs()),
    "pack_padded": lambda x: nn.utils.rnn.pack_padded_sequence(x[:, None], torch.ones(4, dtype=torch.int64)[:1] * 4).data,
    "bincount": lambda x: x.long().abs().bincount(),
}
HOST_SIZES: dict[str, Function] = {
    "tensor_split": lambda x: torch.tensor_split(x, x[:2].long()),
    "tensor_split_method": lambda x: x.tensor_split(x[:2].long()),
    "tensor_split_keyword": lambda x: x.tensor_split(tensor_indices_or_sections=x[:2].long()),
    "pad_packed": lambda x: nn.utils.rnn.pad_packed_sequence(nn.utils.rnn.PackedSequence(x[:2, None], x[:2].long())),
    "pad_packed_direct": lambda x: torch._pad_packed_sequence(x[:2, None], x[:2].long(), False, 0.0, 2),
}
HOST_MEMORY: dict[str, Function] = {
    "cpu": lambda x: x.cpu(),
    "to_cpu": lambda x: x.to("cpu"),
    "to_device_cpu": lambda x: x.to(device="cpu"),
    "numpy": lambda x: x.numpy(),
    "asarray": lambda x: np.asarray(x),
    "from_dlpack": lambda x: np.from_dlpack(x),
    "tolist": lambda x: x.tolist(),
    "repr": lambda x: repr(x),
    "pickle": lambda x: pickle.dumps(x),
    "deepcopy": lambda x: copy.deepcopy(x),
}
HOST_DATA: dict[str, Function] = {
    "tensor_of_list": lambda x: x + torch.tensor([1.0, 2.0, 3.0, 4.0]),
    "tensor_of_one": lambda x: x + torch.tensor([x.sum()]),
    "as_tensor": lambda x: x + torch.as_tensor([1.0, 2.0, 3.0, 4.0]),
    "new_tensor": lambda x: x + x.new_tensor([1.0, 2.0, 3.0, 4.0]),
    "from_numpy": lambda x: x + torch.from_numpy(np.ones(4, dtype=np.float32)),
    "list_index": lambda x: x[[0, 2]],
    "list_index_of_one": lambda x: x[[1]],
}
REFUSED: dict[str, tuple[str, Function]] = {
    **{name: ("host would wait", function) for name, function in HOST_VALUES.items()},
    **{name: ("depends on tensor data", function) for name, function in DATA_SHAPES.items()},
    **{name: ("reads the sizes from tensor data", function) for name, function in HOST_SIZES.items()},
    **{name: ("host", function) for name, function in HOST_MEMORY.items()},
    **{name: ("host memory", function) for name, function in HOST_DATA.items()},
    "resize_": ("addresses are fixed", lambda x: (x + 1).resize_(8)),
    "set_": ("addresses are fixed", lambda x: (x + 1).set_(x.untyped_storage())),
    "out_resizes_empty": ("addresses are fixed", lambda x: torch.add(x, 1, out=torch.empty(0))),
    "out_resizes": ("addresses are fixed", lambda x: torch.add(x, 1, out=torch.empty(2))),
    "out_shrinks": ("addresses are fixed", lambda x: torch.add(x, 1, out=torch.empty(9)[:0])),
    "higher_order": ("higher-order", lambda x: torch.cond(x.sum() > 0, lambda t: t + 1, lambda t: t - 1, (x,))),
    "sparse": ("sparse", lambda x: x.to_sparse()),
    "nested": ("nested", lambda x: torch._nested_tensor_from_tensor_list([x, x])),
    "linalg_error_code": ("error code", lambda x: torch.linalg.inv(torch.eye(4) + x)),
    "manual_seed": ("seed", lambda x: (torch.manual_seed(3), x.normal_())),
    "fork_rng": ("seed", lambda x: _forked_draw(x)),
    "another_device": ("cpu backend", lambda x: torch.empty(3, device="meta")),
    "static_input_squeezed": ("outside", lambda x: x.unsqueeze_(0)),
}


def _forked_draw(x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        return torch.rand_like(x)


ONLY_IN_CAPTURES = {"another_device"}  # the audit serves every backend


@pytest.mark.parametrize("audited", [False, True])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's own about the deprecated uses that are refused here
def test_refused(name: str, mode: type[torch.no_grad] | type[torch.inference_mode], audited: bool, cpu_backend: CpuGraphBackend) -> None:
    why, function = REFUSED[name]
    audited = audited and name not in ONLY_IN_CAPTURES
    x = torch.tensor([1.0, 2.0, -1.0, 0.5])
    pool = cpu_backend.create_pool()
    _, kept = cpu_backend.capture(lambda: x + 1, pool, static_inputs=[x], owned=[])
    layout, live = pool.segments(), pool.live_bytes
    run = partial(cpu_backend.warm_up, audit=True) if audited else partial(cpu_backend.capture, pool=pool)
    with mode(), pytest.raises(CaptureRefusedError, match=why) as caught:
        run(lambda: function(x), static_inputs=[x], owned=[])
    assert f"{__file__}:" in caught.value.where
    assert (pool.segments(), pool.live_bytes) == (layout, live), "the error is still alive here"
    assert kept.tolist() == [2, 3, 0, 1.5]
    assert not cpu_backend.is_capturing()


@pytest.mark.parametrize(
    ("operation", "function"),
    [
        ("Tensor.item()", HOST_VALUES["item"]),
        ("Tensor.cpu()", HOST_MEMORY["cpu"]),
        ("Tensor.to('cpu')", HOST_MEMORY["to_cpu"]),
        ("Tensor.__array__()", HOST_MEMORY["asarray"]),
        ("aten.nonzero.default", DATA_SHAPES["nonzero"]),
        ("aten.index.Tensor with a boolean mask", DATA_SHAPES["mask_read"]),
        ("torch.tensor()", HOST_DATA["tensor_of_list"]),
    ],
)
def test_the_operation_has_the_name_that_its_user_knows(operation: str, function: Function, cpu_backend: CpuGraphBackend) -> None:
    x = torch.ones(4)
    with pytest.raises(CaptureRefusedError) as caught:
        cpu_backend.capture(lambda: function(x), cpu_backend.create_pool(), static_inputs=[x], owned=[])
    assert caught.value.operation == operation


def test_the_line_is_the_users_even_below_library_frames(cpu_backend: CpuGraphBackend) -> None:
    x = torch.ones(4)

    def function() -> Any:
        y = x + 1
        return copy.deepcopy(y)  # the marked line

    with pytest.raises(CaptureRefusedError) as caught:
        cpu_backend.capture(function, cpu_backend.create_pool(), static_inputs=[x], owned=[])
    assert caught.value.where.endswith("function: return copy.deepcopy(y)  # the marked line")


def test_gradients_are_refused(cpu_backend: CpuGraphBackend) -> None:
    weight = torch.ones(4, requires_grad=True)

    def function() -> Tensor:
        with torch.enable_grad():
            return weight * 2

    with pytest.raises(CaptureRefusedError, match="autograd"):
        cpu_backend.capture(function, cpu_backend.create_pool(), static_inputs=[], owned=[weight])
    _, output = cpu_backend.capture(lambda: weight * 2, cpu_backend.create_pool(), static_inputs=[], owned=[weight])
    assert not output.requires_grad


def _seeded(generator: torch.Generator) -> Tensor:
    generator.manual_seed(0)
    return torch.rand(3, generator=generator)


def _rewound(draws: int) -> Tensor:
    total = torch.rand(3) if draws else torch.zeros(3)
    state = torch.default_generator.get_state()
    total = total + torch.rand(3)
    torch.default_generator.set_state(state)
    return total + torch.rand(3) if draws else total


GENERATOR = torch.Generator()
SEEDINGS: dict[str, tuple[str, Callable[[], Tensor]]] = {
    "own_generator": ("of its own", lambda: _seeded(GENERATOR)),
    "new_generator": ("of its own", lambda: torch.rand(3, generator=torch.Generator().manual_seed(3))),
    "fresh_generator": ("of its own", lambda: torch.empty(3).normal_(generator=torch.Generator())),
    "default_generator": ("was seeded", lambda: _seeded(torch.default_generator)),
    "default_generator_after_the_last_draw": ("was seeded", lambda: (torch.rand(3), torch.default_generator.manual_seed(1))[0]),
    "round_trip_after_the_last_draw": ("state set", lambda: _rewound(0)),
    "round_trip_between_draws": ("state set", lambda: _rewound(1)),
    "seed": ("does not seed again", lambda: torch.zeros(3) + (torch.seed(), torch.rand(3))[1]),
    "random_seed": ("does not seed again", lambda: torch.zeros(3) + (torch.random.seed(), torch.rand(3))[1]),
}


@pytest.mark.parametrize("name", SEEDINGS)
def test_seeding_inside_is_refused_and_undone(name: str, cpu_backend: CpuGraphBackend) -> None:
    why, function = SEEDINGS[name]
    torch.manual_seed(0)  # what some of the functions seed with
    before = torch.get_rng_state(), torch.initial_seed()
    with pytest.raises(CaptureRefusedError, match=why):
        cpu_backend.capture(function, cpu_backend.create_pool(), static_inputs=[], owned=[])
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.initial_seed() == before[1]


def test_the_audit_refuses_other_generators_too(cpu_backend: CpuGraphBackend) -> None:
    with pytest.raises(CaptureRefusedError, match="of its own"):
        cpu_backend.warm_up(SEEDINGS["own_generator"][1], static_inputs=[], owned=[], audit=True)


@pytest.mark.parametrize("audited", [False, True])
@pytest.mark.parametrize("rebind", [lambda t: t * 2, lambda t: t[1:], lambda t: t.view(2, 2)], ids=["memory", "offset", "shape"])
@pytest.mark.parametrize("role", ["owned", "static"])
def test_rebinding_a_tensor_from_outside_is_refused(
    role: str, rebind: Callable[[Tensor], Tensor], audited: bool, cpu_backend: CpuGraphBackend
) -> None:
    tensor = torch.arange(4.0)
    address = tensor.data_ptr()

    def function() -> Tensor:
        tensor.data = rebind(tensor)
        return tensor + 1

    sides = {"static_inputs": [tensor] if role == "static" else [], "owned": [tensor] if role == "owned" else []}
    run = partial(cpu_backend.warm_up, audit=True) if audited else partial(cpu_backend.capture, pool=cpu_backend.create_pool())
    with pytest.raises(CaptureRefusedError, match=r"Tensor\.data") as caught:
        run(function, **sides)
    assert "def function" in caught.value.where
    if not audited:
        assert (tensor.data_ptr(), tensor.tolist()) == (address, [0, 1, 2, 3]), "the capture has put it back"


def test_a_refusal_that_the_function_swallows_is_raised_all_the_same(cpu_backend: CpuGraphBackend) -> None:
    x = torch.ones(4)

    def function() -> Tensor:
        try:
            return x * x.sum().item()
        except RuntimeError:
            return x

    with pytest.raises(CaptureRefusedError, match="item"):
        cpu_backend.capture(function, cpu_backend.create_pool(), static_inputs=[x], owned=[])
    with pytest.raises(CaptureRefusedError, match="item"):
        cpu_backend.warm_up(function, static_inputs=[x], owned=[], audit=True)
    assert torch.equal(cpu_backend.warm_up(function, static_inputs=[x], owned=[], audit=False), x * 4)


ALLOWED: dict[str, Function] = {
    "number": lambda x: x * torch.tensor(3.0) + 2,
    "to_own_device": lambda x: x.to(x.device, torch.float64),
    "masked_fill": lambda x: (x + 0).masked_fill_(x > 0, 2.0),
    "one_value_into_a_mask": lambda x: (x + 0).index_put_((x > 0,), torch.tensor(2.0)),
    "repeats_of_given_size": lambda x: x.repeat_interleave(torch.full((4,), 2), output_size=8),
    "split_by_numbers": lambda x: torch.cat([part * 2 for part in torch.tensor_split(x, (1, 3))]),
    "default_generator": lambda x: x + 0 * torch.rand(4, generator=torch.default_generator),
    "profiler": lambda x: _profiled(x),
    "assert_async": lambda x: (torch._assert_async((x > -9).all()), x + 1)[1],
}


def _profiled(x: Tensor) -> Tensor:
    with torch.profiler.record_function("block"):
        return x + 1


@pytest.mark.parametrize("name", ALLOWED)
def test_allowed(name: str, cpu_backend: CpuGraphBackend, cpu_pool: ArenaPool) -> None:
    x = torch.tensor([1.0, 2.0, -1.0, 0.5])
    graph, output = cpu_backend.capture(lambda: ALLOWED[name](x), cpu_pool, static_inputs=[x], owned=[])
    x.neg_()
    graph.replay()
    assert torch.equal(output, ALLOWED[name](x))


def test_the_guard_leaves_torch_as_it_found_it(cpu_backend: CpuGraphBackend) -> None:
    names = ("cpu", "to", "numpy", "tolist", "__array__", "__dlpack__", "__repr__", "__reduce_ex__")
    before = [(name in vars(Tensor), getattr(Tensor, name)) for name in names], torch.manual_seed
    x = torch.ones(2)
    cpu_backend.capture(lambda: x + 1, cpu_backend.create_pool(), static_inputs=[x], owned=[])
    with pytest.raises(CaptureRefusedError):
        cpu_backend.capture(lambda: x.cpu(), cpu_backend.create_pool(), static_inputs=[x], owned=[])
    assert ([(name in vars(Tensor), getattr(Tensor, name)) for name in names], torch.manual_seed) == before
