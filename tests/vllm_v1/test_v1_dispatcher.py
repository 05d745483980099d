"""Dispatch against the cases of the published code, small closed forms, and every refusal."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from golden import CASES, descriptor, dispatcher
from hypothesis import given
from hypothesis import strategies as st

from vgraph_lab.errors import ConfigError, FallbackReason, InputError
from vgraph_lab.graphs import Descriptor, StatsSink
from vgraph_lab.vllm_v1 import BatchDescriptor, CudagraphDispatcher, CUDAGraphMode

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
SIZES = [4, 8, 16, 64]


@pytest.mark.parametrize("case", CASES["dispatch"], ids=lambda c: f"{c['cudagraph_mode']}-{c['cudagraph_capture_sizes'][-1]}")
def test_published_cases(case: dict[str, Any]) -> None:
    found = dispatcher(case)
    plan = [(mode.name, descs) for mode, descs in found.get_capture_descs()]
    assert plan == [(mode, [descriptor(d) for d in descs]) for mode, descs in case["capture_descs"]]
    for call in case["calls"]:
        invalid = {CUDAGraphMode[name] for name in call["invalid_modes"] or ()}
        arguments: dict[str, Any] = {"uniform_decode": call["uniform_decode"], "num_active_loras": call["num_active_loras"]}
        mode, batch = found.dispatch(call["num_tokens"], **arguments, invalid_modes=invalid)
        assert (mode.name, batch) == (call["mode"], descriptor(call["descriptor"])), call
        why = found.explain(call["num_tokens"], **arguments, invalid_modes=invalid)
        assert (why.mode, why.descriptor) == (mode, batch)
        assert why.num_paddings == batch.num_tokens - call["num_tokens"]
        assert all(c.why_not for c in why.candidates[:-1])
        assert (why.fallback_reason is None) == (mode is not NONE)


def test_all_published_cases_are_there() -> None:
    assert sum(len(case["calls"]) for case in CASES["dispatch"]) == 720


@st.composite
def settings(draw: st.DrawFn) -> dict[str, Any]:
    query_len = draw(st.integers(1, 4))
    sizes = draw(st.sets(st.integers(1, 40).map(lambda n: n * query_len), min_size=1, max_size=8))
    return {
        "cudagraph_mode": draw(st.sampled_from(CUDAGraphMode)),
        "capture_sizes": draw(st.permutations(sorted(sizes))),
        "max_num_seqs": draw(st.integers(1, 64)),
        "uniform_decode_query_len": query_len,
    }


@given(settings(), st.integers(1, 200), st.booleans(), st.sets(st.sampled_from([PIECEWISE, FULL])))
def test_closed_form(given: dict[str, Any], num_tokens: int, uniform: bool, invalid: set[CUDAGraphMode]) -> None:
    """Which mode a batch gets, written as one expression over the size that it is padded to."""
    found = CudagraphDispatcher(**given)
    mode, query_len, seqs = given["cudagraph_mode"], given["uniform_decode_query_len"], given["max_num_seqs"]
    size = min((s for s in given["capture_sizes"] if s >= num_tokens), default=None)
    has_decode_graph = uniform and mode.separate_routine() and size is not None and query_len <= size <= query_len * seqs
    options = {
        FULL: (mode is FULL or has_decode_graph) and size is not None,
        PIECEWISE: mode.mixed_mode() is PIECEWISE and size is not None,
    }
    expected = next((m for m in (FULL, PIECEWISE) if options[m] and m not in invalid), NONE)
    got, batch = found.dispatch(num_tokens, uniform_decode=uniform, invalid_modes=invalid)
    assert got is expected
    assert batch.num_tokens == (num_tokens if expected is NONE else size)
    if expected is FULL:
        assert size is not None
        assert batch == BatchDescriptor(size, min(size // (query_len if has_decode_graph else 1), seqs), has_decode_graph)
    else:
        assert batch == BatchDescriptor(batch.num_tokens)
    assert expected is NONE or batch in found.cudagraph_keys[expected]
    assert found.explain(num_tokens, uniform_decode=uniform, invalid_modes=invalid).descriptor == batch


@given(settings())
def test_plan_and_padding(given: dict[str, Any]) -> None:
    found, sizes = CudagraphDispatcher(**given), sorted(given["capture_sizes"])
    assert list(found.padding_table) == [0] + [min(s for s in sizes if s >= n) for n in range(1, sizes[-1] + 1)]
    plan = found.get_capture_descs()
    assert [mode for mode, _ in plan] == [m for m in (PIECEWISE, FULL) if found.cudagraph_keys[m]]
    for mode, descs in plan:
        assert set(descs) == found.cudagraph_keys[mode]
        assert len(descs) == len(set(descs))
        assert [d.num_tokens for d in descs] == sorted((d.num_tokens for d in descs), reverse=True)
        # Each planned graph is reached by the batch that it describes.
        assert all(found.dispatch(d.num_tokens, uniform_decode=d.uniform, valid_modes={mode}) == (mode, d) for d in descs)


def test_the_order_of_sizes_says_nothing() -> None:
    one, other = (CudagraphDispatcher(FULL, sizes, max_num_seqs=8) for sizes in (SIZES, SIZES[::-1]))
    assert one.get_capture_descs() == other.get_capture_descs()
    assert one.padding_table == other.padding_table


def test_larger_than_the_largest_is_none_and_no_error() -> None:
    found = CudagraphDispatcher(CUDAGraphMode.FULL_AND_PIECEWISE, SIZES, max_num_seqs=8)
    assert found.dispatch(64)[0] is PIECEWISE
    assert found.dispatch(65) == (NONE, BatchDescriptor(65))
    why = found.explain(65, uniform_decode=True)
    assert why.fallback_reason is FallbackReason.SHAPE_NOT_COVERED
    assert str(why) == (
        "65 tokens → NONE\n"
        "  FULL: 65 tokens are more than the largest captured size, 64\n"
        "  PIECEWISE: 65 tokens are more than the largest captured size, 64\n"
        "  NONE 65 tok: chosen"
    )


@pytest.mark.parametrize(
    ("mode", "arguments", "reason", "words"),
    [
        (FULL, {"num_tokens": 5, "invalid_modes": {FULL}}, FallbackReason.DISABLED, "FULL: the caller excludes it"),
        (FULL, {"num_tokens": 5, "valid_modes": {NONE, PIECEWISE}}, FallbackReason.DISABLED, "cudagraph_mode FULL captures no PIECEWISE"),
        (NONE, {"num_tokens": 5}, FallbackReason.DISABLED, "cudagraph_mode NONE captures no FULL graphs"),
        (CUDAGraphMode.FULL_DECODE_ONLY, {"num_tokens": 5}, FallbackReason.STATE_NOT_COVERED, "uniform decode only, the batch is mixed"),
        (
            CUDAGraphMode.FULL_DECODE_ONLY,
            {"num_tokens": 32, "uniform_decode": True},
            FallbackReason.SHAPE_NOT_COVERED,
            "decode graphs end at 16 tokens (8 requests of 2), the batch pads to 64",
        ),
    ],
)
def test_explanations(mode: CUDAGraphMode, arguments: dict[str, Any], reason: FallbackReason, words: str) -> None:
    why = CudagraphDispatcher(mode, SIZES, max_num_seqs=8, uniform_decode_query_len=2).explain(**arguments)
    assert why.mode is NONE
    assert why.fallback_reason is reason
    assert words in str(why)


def test_explanations_of_small_decode_and_lora() -> None:
    found = CudagraphDispatcher(CUDAGraphMode.FULL_DECODE_ONLY, [1, 2, 8], max_num_seqs=8, uniform_decode_query_len=4)
    assert "begin at one request of 4 tokens, the batch pads to 2" in str(found.explain(2, uniform_decode=True))
    lora = CudagraphDispatcher(FULL, SIZES, max_num_seqs=8, max_loras=2)
    why = lora.explain(5)
    assert why.mode is NONE
    assert "with adapters only (cudagraph_specialize_lora is off)" in str(why)
    assert why.fallback_reason is FallbackReason.STATE_NOT_COVERED
    both = CudagraphDispatcher(CUDAGraphMode.FULL_AND_PIECEWISE, SIZES, max_num_seqs=8, max_loras=2)
    assert both.explain(5, invalid_modes={FULL}).fallback_reason is FallbackReason.STATE_NOT_COVERED  # not what the caller chose
    assert "8 tok×8 req·3 LoRA: chosen" in str(lora.explain(5, num_active_loras=1))


def test_a_graph_says_how_much_it_pads() -> None:
    why = CudagraphDispatcher(FULL, SIZES, max_num_seqs=8).explain(5)
    assert str(why).splitlines()[0] == "5 tokens (+3 padding) → FULL"
    assert why.fallback_reason is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"num_tokens": 0}, "at least one token, got 0"),
        ({"num_tokens": 5, "num_active_loras": 1}, "max_loras=None"),
        ({"num_tokens": 5, "invalid_modes": {CUDAGraphMode.FULL_DECODE_ONLY}}, "is not a runtime mode"),
        ({"num_tokens": 65, "invalid_modes": {NONE}}, "Allow NONE"),
        ({"num_tokens": 5, "valid_modes": {PIECEWISE}}, "no graph serves 5 tokens"),
    ],
)
def test_impossible_batches_fail(arguments: dict[str, Any], words: str) -> None:
    found = CudagraphDispatcher(FULL, SIZES, max_num_seqs=8)
    for call in (found.dispatch, found.explain):
        with pytest.raises(InputError, match=words):
            call(**arguments)


@pytest.mark.parametrize(
    ("num_tokens", "arguments", "words"),
    [
        (2.5, {}, r"num_tokens: a batch has a whole number of tokens, got 2\.5"),
        ("3", {}, "a whole number of tokens, got '3'"),
        (True, {}, "a whole number of tokens, got True"),
        (3, {"invalid_modes": CUDAGraphMode.FULL}, r"invalid_modes: must be several modes, such as \{CUDAGraphMode\.FULL\}, got <CUDA"),
        (3, {"valid_modes": "FULL"}, "valid_modes: must be several modes"),
        (3, {"valid_modes": {CUDAGraphMode.FULL}, "invalid_modes": {CUDAGraphMode.FULL}}, "leave no mode at all. Allow NONE"),
        (30, {"invalid_modes": {CUDAGraphMode.NONE}}, r"in the modes allowed \(FULL, PIECEWISE\)"),
    ],
)
def test_arguments_of_another_kind_are_told(num_tokens: Any, arguments: dict[str, Any], words: str) -> None:
    dispatcher = CudagraphDispatcher(CUDAGraphMode.FULL_AND_PIECEWISE, [1, 4], max_num_seqs=4)
    for ask in (dispatcher.dispatch, dispatcher.explain):
        with pytest.raises(InputError, match=words):
            ask(num_tokens, **arguments)
    assert dispatcher.dispatch(np.int64(3)) == dispatcher.dispatch(3)  # type: ignore[arg-type]


def test_more_adapters_than_configured_fails() -> None:
    found = CudagraphDispatcher(FULL, SIZES, max_num_seqs=8, max_loras=2)
    for count in (3, -1):
        with pytest.raises(InputError, match=f"{count} active adapters in one batch, but max_loras is 2"):
            found.dispatch(4, num_active_loras=count)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"capture_sizes": [4, 0]}, "0 cannot be captured"),
        ({"capture_sizes": [4, -8, 2.5]}, "-8, 2.5 cannot be captured"),
        ({"capture_sizes": 5}, r"must be several token counts, such as \[1, 2, 4\], got 5"),
        ({"capture_sizes": [8, 4, 8]}, r"repeats 8. Name each size once: \[4, 8\]"),
        ({"max_num_batched_tokens": 32}, "no batch reaches 64, max_num_batched_tokens is 32"),
        ({"capture_sizes": []}, "FULL_AND_PIECEWISE needs at least one"),
        ({"max_num_seqs": 0}, "max_num_seqs: must be a whole number from 1, got 0"),
        ({"uniform_decode_query_len": True}, "uniform_decode_query_len"),
        ({"max_loras": 0}, "max_loras"),
        ({"uniform_decode_query_len": 3}, r"4, 8, 16 would split one. Multiples near yours: \[6, 9, 18, 66\]"),
        ({"cudagraph_mode": "full"}, "Did you mean 'FULL'"),
    ],
)
def test_bad_settings_fail(changes: dict[str, Any], words: str) -> None:
    settings: dict[str, Any] = {"cudagraph_mode": CUDAGraphMode.FULL_AND_PIECEWISE, "capture_sizes": SIZES, "max_num_seqs": 8}
    with pytest.raises(ConfigError, match=words):
        CudagraphDispatcher(**settings | changes)


def test_a_mode_of_none_needs_no_sizes() -> None:
    found = CudagraphDispatcher(NONE, [], max_num_seqs=8)
    assert found.get_capture_descs() == []
    assert found.dispatch(3) == (NONE, BatchDescriptor(3))


def test_a_decode_batch_that_pads_to_a_split_request_goes_on() -> None:
    """A size beyond the decode graphs need not be a multiple: such a batch runs PIECEWISE."""
    found = CudagraphDispatcher(CUDAGraphMode.FULL_AND_PIECEWISE, [4, 9], max_num_seqs=4, uniform_decode_query_len=2)
    assert found.dispatch(8, uniform_decode=True) == (PIECEWISE, BatchDescriptor(9))


def test_descriptors_are_keys_like_any_other() -> None:
    batch = BatchDescriptor(8, 2, True, True, 3)
    assert isinstance(batch, Descriptor)
    assert batch.work == 8
    assert batch.relax_for_piecewise_cudagraphs() == BatchDescriptor(8, None, False, True, 3)
    assert str(batch) == "8 tok×2 req·uniform·3 LoRA"
    assert repr(batch) == "BatchDescriptor(num_tokens=8, num_reqs=2, uniform=True, has_lora=True, num_active_loras=3)"
    assert len({batch, BatchDescriptor(8, 2, True, True, 3), BatchDescriptor(8, 2, True), Descriptor(1, 8, "uniform")}) == 3
    sink = StatsSink()
    sink.recorder("v1.model").record_graph_hit(BatchDescriptor(7), batch)
    assert sink.snapshot().graph_hits("v1.model", batch) == 1


@pytest.mark.parametrize("fields", [(0,), (4, 0), (4, 1, False, False, 1), (4, 1, False, True, -1)])
def test_bad_descriptors_fail(fields: tuple[Any, ...]) -> None:
    with pytest.raises(InputError):
        BatchDescriptor(*fields)
