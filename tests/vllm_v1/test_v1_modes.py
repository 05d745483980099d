"""The five modes, written out as a table, and the capture sizes in closed form."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgraph_lab import vllm_v1
from vgraph_lab.errors import ConfigError
from vgraph_lab.vllm_v1 import (
    CUDAGraphMode,
    adjust_cudagraph_sizes_for_spec_decode,
    checked_capture_sizes,
    default_capture_sizes,
    get_captured_lora_counts,
)


@pytest.mark.parametrize(
    ("name", "value", "decode", "mixed", "largest", "separate"),
    [
        ("NONE", 0, "NONE", "NONE", "NONE", False),
        ("PIECEWISE", 1, "PIECEWISE", "PIECEWISE", "PIECEWISE", False),
        ("FULL", 2, "FULL", "FULL", "FULL", False),
        ("FULL_DECODE_ONLY", (2, 0), "FULL", "NONE", "FULL", True),
        ("FULL_AND_PIECEWISE", (2, 1), "FULL", "PIECEWISE", "FULL", True),
    ],
)
def test_modes(name: str, value: object, decode: str, mixed: str, largest: str, separate: bool) -> None:
    mode = CUDAGraphMode[name]
    assert mode.value == value
    assert str(mode) == name
    assert (mode.decode_mode().name, mode.mixed_mode().name, mode.max_cudagraph_mode().name) == (decode, mixed, largest)
    assert {m.name for m in CUDAGraphMode.valid_runtime_modes() if mode.has_mode(m)} == {decode, mixed}
    assert mode.separate_routine() is separate
    assert mode.is_valid_runtime_mode() is not separate
    assert mode.has_full_cudagraphs() == ("FULL" in (decode, mixed))
    assert mode.requires_piecewise_compilation() == mode.has_piecewise_cudagraphs() == ("PIECEWISE" in (decode, mixed))
    assert bool(mode) == (name != "NONE")
    assert CUDAGraphMode.parse(name.lower()) is mode


def test_runtime_modes_are_ordered_by_value() -> None:
    """Ranks agree on a mode by the minimum of these numbers."""
    assert [CUDAGraphMode(n).name for n in range(3)] == ["NONE", "PIECEWISE", "FULL"]
    assert {m.name for m in CUDAGraphMode.valid_runtime_modes()} == {"NONE", "PIECEWISE", "FULL"}


def test_wrong_modes_fail() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'PIECEWISE'"):
        CUDAGraphMode.parse("piecewize")
    with pytest.raises(ConfigError, match="not for the pair FULL_DECODE_ONLY"):
        CUDAGraphMode.FULL.has_mode(CUDAGraphMode.FULL_DECODE_ONLY)


def test_default_sizes_of_a_large_server() -> None:
    """vLLM's documentation of its defaults: 1, 2, 4, steps of 8 below 256, steps of 16 up to 512."""
    sizes = default_capture_sizes(256, 8192)
    assert sizes[:6] == [1, 2, 4, 8, 16, 24]
    assert sizes[33:36] == [248, 256, 272]
    assert (sizes[-1], len(sizes)) == (512, 51)


@given(st.integers(1, 600), st.integers(1, 9000), st.integers(1, 8))
def test_default_sizes(max_num_seqs: int, max_num_batched_tokens: int, query_len: int) -> None:
    largest = min(512, 2 * max_num_seqs * query_len, max_num_batched_tokens)
    expected = [n for n in range(1, largest + 1) if n in (1, 2, 4) or (n % 8 == 0 and n < 256) or (n % 16 == 0 and n >= 256)]
    assert default_capture_sizes(max_num_seqs, max_num_batched_tokens, uniform_decode_query_len=query_len) == expected


def test_default_sizes_up_to_a_limit() -> None:
    assert default_capture_sizes(1, 8192, max_cudagraph_capture_size=20) == [1, 2, 4, 8, 16]
    assert default_capture_sizes(1, 10, max_cudagraph_capture_size=20) == [1, 2, 4, 8]


@given(st.sets(st.integers(1, 100), min_size=1), st.integers(1, 9))
def test_rounding_for_speculation(sizes: set[int], step: int) -> None:
    largest = max(sizes)
    expected = {n for n in range(step, largest + 1, step) if any(n - step < size <= n for size in sizes)}
    if expected:
        assert adjust_cudagraph_sizes_for_spec_decode(sizes, step) == (sorted(expected) if step > 1 else sorted(sizes))
    elif step <= largest:
        assert adjust_cudagraph_sizes_for_spec_decode(sizes, step) == [step]
    else:
        with pytest.raises(ConfigError, match=f"no multiple of uniform_decode_query_len={step}"):
            adjust_cudagraph_sizes_for_spec_decode(sizes, step)


def test_lora_counts() -> None:
    assert get_captured_lora_counts(8, True) == [1, 2, 4, 8, 9]
    assert get_captured_lora_counts(3, True) == [1, 2, 4]
    assert get_captured_lora_counts(8, False) == [9]


def test_bad_limits_fail() -> None:
    with pytest.raises(ConfigError, match="max_num_batched_tokens: must be a whole number from 1, got 0"):
        default_capture_sizes(8, 0)
    with pytest.raises(ConfigError, match="'8' cannot be captured"):
        checked_capture_sizes(["8"])  # type: ignore[list-item]


def test_exports() -> None:
    assert vllm_v1.__all__ == sorted(vllm_v1.__all__)
    assert all(hasattr(vllm_v1, name) for name in vllm_v1.__all__)
