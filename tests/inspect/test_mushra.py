"""MUSHRA ratings and the low anchor. Truth: means and t quantiles from tables, and sines that pass or do not."""

from __future__ import annotations

import json
import math
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vgraph_lab.errors import InputError, LifecycleError
from vgraph_lab.inspect.listening.audio_set import AudioSet
from vgraph_lab.inspect.listening.filters import ANCHOR, anchor_of, with_anchor
from vgraph_lab.inspect.listening.mushra import MUSHRA_COLUMNS, MUSHRA_SUMMARY_COLUMNS, MushraTest

THREE = ("original", "graph", "low anchor")
T_3 = 3.182446  # 97.5 % quantile of Student's t with 3 degrees of freedom


def made(samples: int = 4, seed: int = 0) -> MushraTest:
    return MushraTest([f"s{i}" for i in range(samples)], THREE, seed=seed)


def rated(test: MushraTest, scores: dict[str, list[float]]) -> MushraTest:
    """Rate each page with the scores of its sample."""
    for page in test.pages:
        of_sample = {condition: values[test.samples.index(page.sample)] for condition, values in scores.items()}
        test.rate(page.number, {letter: of_sample[condition] for letter, condition in page.stimuli.items()}, 3.0)
    return test


SCORES = {"original": [100.0, 95.0, 90.0, 95.0], "graph": [70.0, 80.0, 90.0, 80.0], "low anchor": [20.0, 20.0, 20.0, 20.0]}


# ------------------------------------------------------------------------------------------------------------------- pages


@given(st.integers(1, 20), st.integers(2, 6), st.integers(0, 2**40))
def test_pages_are_complete(num_samples: int, num_conditions: int, seed: int) -> None:
    samples, conditions = [f"s{i}" for i in range(num_samples)], [f"c{i}" for i in range(num_conditions)]
    pages = MushraTest(samples, conditions, seed=seed).pages
    assert sorted(page.sample for page in pages) == sorted(samples)
    assert [page.number for page in pages] == list(range(1, num_samples + 1))
    assert all(sorted(page.stimuli.values()) == conditions for page in pages)
    assert all("".join(page.stimuli) == "ABCDEF"[:num_conditions] for page in pages)


def test_each_condition_stands_under_each_letter_equally_often_on_average() -> None:
    counts = Counter(item for seed in range(200) for page in made(12, seed).pages for item in page.stimuli.items())
    assert len(counts) == 9
    assert max(abs(count - 800) for count in counts.values()) < 115  # five standard deviations of 2400 draws


@pytest.mark.parametrize("other", [1, 2, 5])
def test_whoever_finds_the_anchor_on_every_page_knows_no_more_about_the_rest(other: int) -> None:
    """Wherever the anchor is on two pages, the letter after it is the same condition in half of the tests."""
    same: dict[tuple[str, str], list[bool]] = {}
    for seed in range(3000):
        found = []
        for page in (made(6, seed).pages[i] for i in (0, other)):
            letter = next(letter for letter, condition in page.stimuli.items() if condition == "low anchor")
            found.append((letter, page.stimuli["ABCA"["ABC".index(letter) + 1]]))
        (first, after_first), (second, after_second) = found
        same.setdefault((first, second), []).append(after_first == after_second)
    assert len(same) == 9
    for cases in same.values():
        assert abs(sum(cases) / len(cases) - 0.5) < 2.5 / math.sqrt(len(cases))  # five standard deviations


def test_the_same_seed_gives_the_same_pages() -> None:
    assert made(12, 3).pages == made(12, 3).pages
    assert made(12, 3).pages != made(12, 4).pages


@pytest.mark.parametrize(
    ("samples", "conditions", "seed", "message"),
    [
        ([], THREE, 0, "at least one is needed"),
        (["a"], ("x",), 0, "1 conditions cannot be rated"),
        (["a"], [f"c{i}" for i in range(27)], 0, "27 conditions cannot be rated"),
        (["a"], ("x", "x"), 0, "none twice"),
        (["a"], THREE, -1, "seed is -1"),
    ],
)
def test_tests_that_make_no_sense_fail(samples: Any, conditions: Any, seed: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        MushraTest(samples, conditions, seed=seed)


# ----------------------------------------------------------------------------------------------------------------- ratings


def test_means_and_intervals() -> None:
    found = rated(made(), SCORES).result()
    table = found.table.set_index("condition")
    assert list(found.table) == list(MUSHRA_SUMMARY_COLUMNS)
    assert table["mean"].tolist() == [95.0, 80.0, 20.0]
    half = T_3 * math.sqrt(200 / 3) / 2
    assert table.loc["graph", "mean_low"] == pytest.approx(80 - half, abs=1e-4)
    assert table.loc["graph", "mean_high"] == pytest.approx(80 + half, abs=1e-4)
    assert table.loc["original", "mean_high"] == 100  # 101.5, cut at the end of the scale
    assert table.loc["low anchor", ["mean_low", "mean_high"]].tolist() == [20, 20]
    assert table["is_reference"].tolist() == [True, False, False]


def test_one_rating_has_no_interval() -> None:
    found = rated(made(1), {name: values[:1] for name, values in SCORES.items()}).result()
    assert found.table["mean"].tolist() == [100.0, 70.0, 20.0]
    assert found.table[["mean_low", "mean_high"]].isna().all().all()
    assert "graph 70;" in found.text


@pytest.mark.parametrize(("low", "reliable"), [(0, True), (3, True), (4, False)])
def test_who_misses_the_hidden_reference_is_not_counted(low: int, reliable: bool) -> None:
    scores = {"original": [89.9] * low + [90.0] * (20 - low), "graph": [50.0] * 20, "low anchor": [1.0] * 20}
    found = rated(made(20), scores).result()
    assert (found.low_references, found.is_reliable) == (low, reliable)
    assert f"the hidden reference was rated below 90 on {low} of 20 pages, and 15 % are accepted" in found.text
    assert found.text.startswith("Means" if reliable else "Not to be counted")


def test_unfinished_tests_say_so() -> None:
    test = made()
    assert test.result().text == "No rating yet, 4 pages to go."
    assert test.result().table["mean"].isna().all()
    page = test.next_page
    assert page is not None
    test.rate(page.number, dict.fromkeys(page.stimuli, 100))
    found = test.result()
    assert (found.is_reliable, found.is_finished, found.low_references) == (None, False, None)
    assert found.text == "Unfinished, 3 of 4 pages to go. Means are withheld until the last one is rated."
    assert found.table[["mean", "mean_low", "mean_high"]].isna().all().all()  # they would say which letter was which
    assert found.table["ratings"].tolist() == [1, 1, 1]
    assert test.table()["condition"].isna().all()
    assert test.table()["score"].notna().sum() == 3


def test_the_table_of_a_finished_test() -> None:
    test = rated(made(), SCORES)
    table = test.table()
    assert list(table) == list(MUSHRA_COLUMNS)
    assert len(table) == 12
    assert table.groupby("condition")["score"].mean().to_dict() == {"original": 95, "graph": 80, "low anchor": 20}
    assert test.next_page is None


def test_ratings_that_are_none_fail_and_lose_nothing() -> None:
    test = made()
    good = dict.fromkeys("ABC", 50.0)
    test.rate(1, {"A": np.int64(50), "B": np.float32(50), "C": 50})  # NumPy's numbers are some, too
    kept = test.ratings
    assert kept[0].scores == dict.fromkeys(THREE, 50.0)
    for number, scores, seconds, error, message in (
        (0, good, None, InputError, "no page 0; pages are numbered from 1 to 4"),
        (5, good, None, InputError, "no page 5"),
        (2, {"A": 1, "B": 2}, None, InputError, "one score for each of A, B, C; got A, B"),
        (2, {}, None, InputError, "got none"),
        (2, None, None, InputError, "got None"),
        (2, "ABC", None, InputError, "got 'ABC'"),
        (2, good | {"A": None}, None, InputError, "is None"),
        (2, good | {"A": np.True_}, None, InputError, "score of A on page 2 is"),
        (2, good | {"D": 1}, None, InputError, "got A, B, C, D"),
        (2, good | {"A": 101}, None, InputError, r"score of A on page 2 is 101; accepted are numbers from 0 \(bad\) to 100"),
        (2, good | {"A": -0.1}, None, InputError, "is -0.1"),
        (2, good | {"A": math.nan}, None, InputError, "is nan"),
        (2, good | {"A": True}, None, InputError, "is True"),
        (2, good | {"A": "50"}, None, InputError, "is '50'"),
        (2, good, -1, InputError, "seconds is -1"),
        (1, good, None, LifecycleError, "page 1 was rated already, and the first rating stands; page 2 is next"),
    ):
        with pytest.raises(error, match=message):
            test.rate(number, scores, seconds)  # type: ignore[arg-type]
    assert test.ratings == kept
    for number in (2, 3, 4):
        test.rate(number, good)
    with pytest.raises(LifecycleError, match="the test is finished"):
        test.rate(4, good)


# ------------------------------------------------------------------------------------------------------------------- files


@settings(max_examples=30)
@given(st.integers(1, 8), st.integers(0, 99), st.lists(st.lists(st.floats(0, 100), min_size=3, max_size=3), max_size=8))
def test_saved_tests_come_back(samples: int, seed: int, ratings: list[list[float]]) -> None:
    test = made(samples, seed)
    for number, scores in enumerate(ratings[:samples], start=1):
        test.rate(number, dict(zip("ABC", scores, strict=True)), None if number % 2 else 1.25)
    with tempfile.TemporaryDirectory() as folder:
        again = MushraTest.load(test.save(Path(folder) / "run.json"))
    assert (again.samples, again.conditions, again.seed) == (test.samples, test.conditions, test.seed)
    assert (again.pages, again.ratings) == (test.pages, test.ratings)


def test_saving_goes_on_in_the_same_file_and_spares_others(tmp_path: Path) -> None:
    path, test = tmp_path / "run.json", made()
    test.save(path)
    early = MushraTest.load(path)
    test.rate(1, dict.fromkeys("ABC", 50))
    test.save(path)
    kept = path.read_bytes()
    for other in (early, made(seed=9)):
        with pytest.raises(InputError, match="holds another test, or ratings that this one lacks"):
            other.save(path)
    assert path.read_bytes() == kept
    early.save(path, overwrite=True)
    with pytest.raises(InputError, match="holds another test"):  # without ratings it is another test, too
        made(seed=9).save(path)
    assert MushraTest.load(path).ratings == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ratings": [{"number": 9, "scores": {}, "seconds": None}]}, "is damaged: there is no page 9"),
        ({"ratings": [{"number": 1, "scores": {"original": 5}, "seconds": None}]}, "is damaged: page 1 needs one score"),
        ({"ratings": [{"number": 1, "scores": dict.fromkeys(THREE, 101), "seconds": None}]}, "is damaged: the score of"),
        ({"pages": []}, "is damaged: it has 0 pages for 4 samples"),
        ({"pages": [{"number": 1, "sample": "s0", "stimuli": {"A": "graph"}}]}, "is damaged: page 1 is"),
        ({"conditions": ["x"]}, "is damaged: 1 conditions"),
    ],
)
def test_files_that_are_no_tests_fail(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = made().save(tmp_path / "run.json")
    file = json.loads(path.read_text())
    path.write_text(json.dumps(file | {"content": file["content"] | change}))
    with pytest.raises(InputError, match=message):
        MushraTest.load(path)


def test_a_newer_file_fails(tmp_path: Path) -> None:
    path = made().save(tmp_path / "run.json")
    path.write_text(path.read_text().replace('"version": 1', '"version": 2'))
    with pytest.raises(InputError, match=r"MUSHRA test of version 2.*Update vgraph-lab"):
        MushraTest.load(path)


# ------------------------------------------------------------------------------------------------------------------ anchor


def sine(frequency_hz: float, rate: int) -> torch.Tensor:
    return torch.sin(2 * torch.pi * frequency_hz * torch.arange(rate // 2) / rate)


@pytest.mark.parametrize("rate", [16_000, 24_000, 44_100])
def test_the_anchor_keeps_what_is_below_3500_hz_and_nothing_above_4000(rate: int) -> None:
    middle = slice(rate // 8, -rate // 8)  # the ends ring
    for frequency_hz in (100, 1_000, 3_500):
        kept = anchor_of(sine(frequency_hz, rate), rate)
        assert (kept.dtype, kept.shape) == (torch.float32, (rate // 2,))
        np.testing.assert_allclose(kept[middle], sine(frequency_hz, rate)[middle], atol=2e-3)  # in phase, too
    for frequency_hz in (4_000, 4_500, 7_000):
        assert anchor_of(sine(frequency_hz, rate), rate)[middle].abs().max() < 2e-3  # −54 dB


def test_the_anchor_becomes_one_more_condition() -> None:
    audio = AudioSet.from_waveforms(
        {"a": {"s": sine(1_000, 24_000), "tiny": np.ones(1)}, "b": {"s": np.zeros(9), "tiny": np.zeros(1)}},
        24_000,
        seams={"s": [100]},
        details={"s": "text"},
    )
    found = with_anchor(audio)
    assert found.conditions == ("a", "b", ANCHOR)
    assert (found.seams("s"), found.detail("s")) == ((100,), "text")
    np.testing.assert_array_equal(found.waveform(ANCHOR, "s"), anchor_of(sine(1_000, 24_000), 24_000))
    assert len(found.waveform(ANCHOR, "tiny")) == 1
    with pytest.raises(InputError, match="there is a condition 'low anchor' already"):
        with_anchor(found)


def test_an_anchor_without_treble_to_take_away_fails() -> None:
    with pytest.raises(InputError, match="at 8000 Hz nothing is above 3500 Hz"):
        anchor_of(torch.zeros(10), 8_000)
