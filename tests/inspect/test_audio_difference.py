"""The difference between two waveforms, and the verdict. Truth: closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vgraph_lab.errors import InputError
from vgraph_lab.inspect.audio import EXACT, Tolerance, dbfs, dbfs_text, tolerance_for, verdict, waveform_difference

SINE = torch.sin(torch.arange(4800) * 0.1) * 0.5
TENTH = Tolerance(0.1, "a test")


def test_identical_waveforms():
    found = waveform_difference(SINE, SINE.clone())
    assert found.is_identical
    assert (found.max_abs, found.max_dbfs, found.rms_dbfs, found.snr_db) == (0.0, -math.inf, -math.inf, math.inf)
    assert verdict(found, EXACT).passed


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_one_sample_off_by_a_known_amount(dtype):
    x = torch.zeros(1, 1, 100, dtype=dtype)
    y = x.clone()
    y[..., 42] = 0.125
    found = waveform_difference(x, y)
    assert found.first_differing_sample == 42
    assert found.max_dbfs == pytest.approx(20 * math.log10(0.125))
    assert found.rms == pytest.approx(0.125 / 10)
    assert found.snr_db == -math.inf  # the reference is silent


@given(st.floats(1e-6, 1.0), st.floats(1e-6, 1.0))
def test_snr_is_the_ratio_of_the_amplitudes(signal, error):
    x = torch.full((64,), signal, dtype=torch.float64)
    assert waveform_difference(x, x + error).snr_db == pytest.approx(20 * math.log10(signal / error), abs=1e-3)


def test_signed_zeros_differ_in_bits_but_not_in_level():
    found = waveform_difference(torch.zeros(4), -torch.zeros(4))
    assert not found.is_identical
    assert found.max_abs == 0
    assert not verdict(found, EXACT).passed
    assert verdict(found, TENTH).passed


@pytest.mark.parametrize("change", [1e-3, -1e-3])
def test_verdict_at_the_tolerance(change):
    found = waveform_difference(SINE, SINE + change)
    assert verdict(found, Tolerance(1.01e-3, "a test")).passed
    assert not verdict(found, Tolerance(0.99e-3, "a test")).passed
    refused = verdict(found, EXACT)
    assert not refused.passed
    assert "bit for bit" in str(refused)


def test_other_lengths_never_pass():
    found = waveform_difference(SINE, SINE[:-1])
    assert not found.has_equal_length
    assert found.first_differing_sample == 4799
    refused = verdict(found, TENTH)
    assert not refused.passed
    assert "4799 samples instead of 4800" in str(refused)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_and_infinity_never_pass(bad):
    broken = SINE.clone()
    broken[7] = bad
    for pair in ((SINE, broken), (broken, SINE)):
        found = waveform_difference(*pair)
        assert (found.nonfinite_samples, found.max_abs) == (1, math.inf)
        assert not verdict(found, TENTH).passed


def test_arrays_and_tensors_are_the_same():
    assert waveform_difference(SINE.numpy(), (SINE * 0.9).numpy()) == waveform_difference(SINE, SINE * 0.9)


@pytest.mark.parametrize(
    ("reference", "candidate", "message"),
    [
        (SINE, SINE.double(), "dtype"),
        (SINE[None], SINE, "all axes but the last"),
        (torch.zeros(0), torch.zeros(0), "no samples"),
        (torch.tensor(1.0), torch.tensor(1.0), "no samples"),
        (torch.zeros(4, dtype=torch.int16), torch.zeros(4, dtype=torch.int16), "floating point"),
        (np.zeros(4, dtype=np.int16), np.zeros(4, dtype=np.int16), "floating point"),
    ],
)
def test_what_cannot_be_compared_fails(reference, candidate, message):
    with pytest.raises(InputError, match=message):
        waveform_difference(reference, candidate)


def test_every_stated_tolerance_is_tighter_for_finer_dtypes():
    for device in ("cpu", "cuda"):
        fp32, fp16, bf16 = (tolerance_for(d, device).max_abs for d in (torch.float32, torch.float16, torch.bfloat16))
        assert 0 < fp32 < fp16 < bf16
    assert tolerance_for(torch.float32, torch.device("cuda", 1)) == tolerance_for(torch.float32, "cuda")


def test_unstated_tolerance_fails():
    with pytest.raises(InputError, match=r"float64 on cpu.*Stated:"):
        tolerance_for(torch.float64, "cpu")


def test_levels():
    assert dbfs(1.0) == 0
    assert dbfs(0.1) == pytest.approx(-20)
    assert dbfs_text(0.0) == "−∞ dBFS"
    assert dbfs_text(0.1) == "−20.0 dBFS"
