"""Speech metrics. Truth: closed forms, and a word distance written the slow way."""

from __future__ import annotations

import math
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vgraph_lab.errors import InputError
from vgraph_lab.inspect.speech_metrics import level_dbfs, log_mel_distance, mel_filters, stoi, word_errors


def tone(amplitude: float, frequency_hz: float = 1000.0, samples: int = 24_000) -> torch.Tensor:
    return amplitude * torch.sin(2 * torch.pi * frequency_hz * torch.arange(samples) / 24_000)


def noise(samples: int = 24_000, seed: int = 0) -> torch.Tensor:
    return 0.1 * torch.randn(samples, generator=torch.Generator().manual_seed(seed))


@given(st.floats(1e-3, 1.0))
def test_the_level_of_a_sine_is_3_db_below_its_peak(amplitude: float) -> None:
    assert level_dbfs(tone(amplitude)) == pytest.approx(20 * math.log10(amplitude) - 10 * math.log10(2), abs=1e-3)


def test_the_level_of_silence_is_finite() -> None:
    assert level_dbfs(torch.zeros(100)) == pytest.approx(-180)


@pytest.mark.parametrize(("size", "bands"), [(2048, 128), (1024, 96), (512, 64)])
def test_mel_filters_average_their_band(size: int, bands: int) -> None:
    filters = mel_filters(size, bands, 24_000)
    assert filters.shape == (bands, size // 2 + 1)
    assert (filters >= 0).all()
    sums = filters.sum(dim=1)
    assert ((sums - 1).abs().lt(1e-5) | sums.eq(0)).all()
    centres = (filters * torch.linspace(0, 12_000, size // 2 + 1)).sum(dim=1)[sums > 0]
    assert (centres.diff() >= 0).all()


@pytest.mark.parametrize("gain", [0.5, 0.25, 2.0])
def test_the_mel_distance_of_scaled_noise_is_the_log_of_the_gain(gain: float) -> None:
    # Exact but for the floor, the empty bands and the silent edges, which all pull towards 0.
    distance = log_mel_distance(noise(), gain * noise())
    assert 0.85 * abs(math.log10(gain)) < distance <= abs(math.log10(gain)) + 1e-6


def test_the_mel_distance_is_a_distance() -> None:
    assert log_mel_distance(noise(), noise()) == 0
    assert log_mel_distance(noise(), noise(seed=1)) == pytest.approx(log_mel_distance(noise(seed=1), noise()), rel=1e-6)
    assert log_mel_distance(noise(), noise(seed=1)) > 0.1


def test_intelligibility_falls_with_noise() -> None:
    speech = noise(48_000) * (1 + torch.sin(2 * torch.pi * 4 * torch.arange(48_000) / 24_000))  # modulated at 4 Hz, as syllables are
    scores = [stoi(speech, speech + level * noise(48_000, seed=1)) for level in (0.0, 0.5, 2.0, 10.0)]
    assert scores[0] == pytest.approx(1, abs=1e-6)
    assert all(better > worse for better, worse in pairwise(scores))


def test_the_intelligibility_of_too_little_speech_is_unknown() -> None:
    assert math.isnan(stoi(noise(4000), noise(4000)))


@pytest.mark.parametrize("metric", [log_mel_distance, stoi])
@pytest.mark.parametrize(("one", "other"), [((10,), (11,)), ((1, 10), (1, 10)), ((0,), (0,))])
def test_waveforms_that_cannot_be_compared_fail(metric: object, one: tuple[int, ...], other: tuple[int, ...]) -> None:
    assert callable(metric)
    with pytest.raises(InputError, match="two waveforms"):
        metric(torch.zeros(one), torch.zeros(other))


def slow_word_errors(reference: tuple[str, ...], heard: tuple[str, ...]) -> int:
    @cache
    def distance(i: int, j: int) -> int:
        if i == 0 or j == 0:
            return i + j
        if reference[i - 1] == heard[j - 1]:
            return distance(i - 1, j - 1)
        return 1 + min(distance(i - 1, j), distance(i, j - 1), distance(i - 1, j - 1))

    return distance(len(reference), len(heard))


WORDS = st.lists(st.sampled_from(["a", "b", "c", "d"]), max_size=9).map(tuple)


@given(WORDS, WORDS)
def test_word_errors_are_the_least_number_of_edits(reference: tuple[str, ...], heard: tuple[str, ...]) -> None:
    errors = word_errors(reference, heard)
    assert errors == slow_word_errors(reference, heard) == word_errors(heard, reference)
    assert (errors == 0) == (reference == heard)


@pytest.mark.parametrize(
    ("heard", "errors"),
    [
        ("please turn left after the bridge", 0),
        ("please turn left after the branch", 1),
        ("turn left after a bridge now", 3),
        ("", 6),
    ],
)
def test_word_errors_of_known_sentences(heard: str, errors: int) -> None:
    said = ["please", "turn", "left", "after", "the", "bridge"]
    assert word_errors(said, heard.split()) == word_errors(heard.split(), said) == errors


def test_metrics_take_numpy_backed_tensors() -> None:
    wav = torch.from_numpy(np.linspace(-1, 1, 24_000, dtype=np.float32))
    assert log_mel_distance(wav, wav) == 0
