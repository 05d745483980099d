"""ABX tests. Truth: counts, and binomial tails added up with whole numbers."""

from __future__ import annotations

import json
import math
import tempfile
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vgraph_lab.errors import InputError, LifecycleError
from vgraph_lab.inspect.listening.abx import ABX_COLUMNS, ABXResult, ABXTest
from vgraph_lab.inspect.listening.binomial import chance_of, critical_count, hit_rate_bounds, trials_needed

PAIR = ("eager", "graph")


def made(num_trials: int = 4, seed: int = 0) -> ABXTest:
    return ABXTest(["one", "two"], PAIR, num_trials=num_trials, seed=seed)


def answered(test: ABXTest, right: int) -> ABXTest:
    for trial in test.trials:
        test.answer(trial.number, trial.x if trial.number <= right else "AB"[trial.x == "A"], seconds=2.5)  # type: ignore[arg-type]
    return test


def tail(correct: int, answered: int) -> float:
    return sum(math.comb(answered, k) for k in range(correct, answered + 1)) / 2**answered


# ------------------------------------------------------------------------------------------------------------------ trials


@given(st.integers(1, 7), st.integers(1, 60), st.integers(0, 2**40))
def test_trials_are_balanced(num_samples: int, num_trials: int, seed: int) -> None:
    samples = [f"s{i}" for i in range(num_samples)]
    trials = ABXTest(samples, PAIR, num_trials=num_trials, seed=seed).trials
    assert [trial.number for trial in trials] == list(range(1, num_trials + 1))
    assert all({trial.a, trial.b} == set(PAIR) for trial in trials)
    counts = Counter(trial.sample for trial in trials)
    assert max(counts[s] for s in samples) - min(counts[s] for s in samples) <= 1

    def excess(values: list[bool]) -> int:
        return abs(2 * sum(values) - len(values))

    assert excess([trial.a == PAIR[0] for trial in trials]) <= 1
    for sample in samples:
        assert excess([trial.a == PAIR[0] for trial in trials if trial.sample == sample]) <= 1


@given(st.integers(0, 10**6))
def test_no_sample_comes_again_before_all_had_their_turn(seed: int) -> None:
    trials = ABXTest(list("abc"), PAIR, num_trials=9, seed=seed).trials
    assert all({trial.sample for trial in trials[first : first + 3]} == set("abc") for first in (0, 3, 6))


def test_the_same_seed_gives_the_same_trials_and_others_do_not() -> None:
    assert made(24, seed=5).trials == made(24, seed=5).trials
    assert len({made(24, seed=seed).trials for seed in range(20)}) == 20


def test_trials_of_a_seed_do_not_change_with_versions() -> None:
    """Python promises it for ``random()`` only; where another one draws differently, saved runs are still whole."""
    found = [f"{t.sample} {t.a} {t.x}" for t in made(6, seed=1).trials]
    assert found == ["one graph A", "two eager B", "two eager B", "one eager A", "one graph B", "two graph A"]


@pytest.mark.parametrize(
    "guess", ["AAAAAAAA", "ABABABAB", "AAAABBBB", "BAABBBAA", "eager", "the last X", "not the last X", "the rarer one"]
)
def test_whoever_guesses_is_right_binomially(guess: str) -> None:
    """Answers that owe nothing to what is heard, whatever their plan: χ² over 3000 tests of 8 trials, and its 99.9 % quantile."""
    counts: Counter[int] = Counter()
    for seed in range(3000):
        xs: list[str] = []
        right = 0
        for trial in made(8, seed=seed).trials:
            last = xs[-1] if xs else "A"
            said = {
                "eager": "A" if trial.a == "eager" else "B",
                "the last X": last,
                "not the last X": "B" if last == "A" else "A",
                "the rarer one": "A" if xs.count("A") <= len(xs) / 2 else "B",
            }.get(guess) or guess[trial.number - 1]
            right += said == trial.x
            xs.append(trial.x)
        counts[right] += 1
    expected = [3000 * math.comb(8, k) / 2**8 for k in range(9)]
    assert sum((counts[k] - e) ** 2 / e for k, e in enumerate(expected)) < 26.1


@pytest.mark.parametrize(
    ("samples", "conditions", "num_trials", "seed", "message"),
    [
        ([], PAIR, 4, 0, "at least one is needed"),
        (["a", "a"], PAIR, 4, 0, "none twice"),
        ("ab", PAIR, 4, 0, "a sequence of names"),
        (["a", " "], PAIR, 4, 0, "a sequence of names"),
        (["a", "\ud800"], PAIR, 4, 0, r"\['a', '\\ud800'\]; a sequence of names"),
        (["a"], ("x", "\udfff"), 4, 0, "a sequence of names"),
        (None, PAIR, 4, 0, "samples are None; a sequence of names"),
        (["a"], ("x", "x"), 4, 0, "none twice"),
        (["a"], ("x",), 4, 0, "two conditions"),
        (["a"], ("x", "y", "z"), 4, 0, "Choose two of them"),
        (["a"], PAIR, 0, 0, "num_trials is 0; a whole number from 1"),
        (["a"], PAIR, -3, 0, "num_trials is -3"),
        (["a"], PAIR, 2.0, 0, "num_trials is 2.0"),
        (["a"], PAIR, True, 0, "num_trials is True"),
        (["a"], PAIR, 10**6, 0, "nobody answers more than 100000"),
        (["a"], PAIR, 4, -1, "seed is -1"),
        (["a"], PAIR, 4, None, "seed is None"),
    ],
)
def test_tests_that_make_no_sense_fail(samples: Any, conditions: Any, num_trials: Any, seed: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        ABXTest(samples, conditions, num_trials=num_trials, seed=seed)


# ----------------------------------------------------------------------------------------------------------------- answers


def test_a_run_from_the_first_trial_to_the_last() -> None:
    test = made(4)
    numbers = []
    while (trial := test.next_trial) is not None:
        assert not test.is_finished
        numbers.append(trial.number)
        test.answer(trial.number, trial.x)
    assert numbers == [1, 2, 3, 4]
    assert test.is_finished
    assert (test.result().answered, test.result().correct) == (4, 4)


def test_answers_that_are_none_fail_and_lose_nothing() -> None:
    test = made(4)
    test.answer(1, "A", 1.0)
    kept = test.answers
    for number, choice, seconds, error, message in (
        (0, "A", None, InputError, "no trial 0; trials are numbered from 1 to 4"),
        (5, "A", None, InputError, "no trial 5"),
        (True, "A", None, InputError, "no trial True"),
        ("2", "A", None, InputError, "no trial '2'"),
        (2, "X", None, InputError, "accepted are 'A' and 'B'"),
        (2, "a", None, InputError, "accepted are 'A' and 'B'"),
        (2, None, None, InputError, "accepted are 'A' and 'B'"),
        (2, np.array(["A", "B"]), None, InputError, "accepted are 'A' and 'B'"),
        (np.True_, "A", None, InputError, "no trial"),
        (2, "A", 10**400, InputError, "seconds is 1000"),
        (2, "A", np.True_, InputError, "seconds is"),
        (2, "A", -1.0, InputError, "seconds is -1.0"),
        (2, "A", math.nan, InputError, "seconds is nan"),
        (2, "A", "1", InputError, "seconds is '1'"),
        (1, "B", None, LifecycleError, r"trial 1 was answered already \(A\), and the first answer stands; trial 2 is next"),
    ):
        with pytest.raises(error, match=message):
            test.answer(number, choice, seconds)  # type: ignore[arg-type]
    assert test.answers == kept


def test_numbers_may_be_numpys(tmp_path: Path) -> None:
    test = ABXTest(["one", "two"], PAIR, num_trials=np.int64(4), seed=np.uint8(0))  # type: ignore[arg-type]
    assert test.trials == made(4).trials
    test.answer(np.int64(1), "A", np.float32(1.5))  # type: ignore[arg-type]
    test.answer(2, "B", Fraction(1, 4))  # type: ignore[arg-type]
    assert [(a.number, a.seconds) for a in ABXTest.load(test.save(tmp_path / "run.json")).answers] == [(1, 1.5), (2, 0.25)]


def test_a_finished_test_takes_no_answers() -> None:
    test = answered(made(4), 4)
    with pytest.raises(LifecycleError, match=r"the test is finished: read result\(\)"):
        test.answer(2, "A")
    assert test.result().correct == 4


def test_the_table_hides_x_until_the_end() -> None:
    test = made(4)
    test.answer(1, "A", 1.5)
    table = test.table()
    assert list(table) == list(ABX_COLUMNS)
    assert len(table) == 4
    assert table["x"].isna().all()
    assert table["is_correct"].isna().all()
    assert table["answer"].isna().tolist() == [False, True, True, True]
    assert table["seconds"].tolist()[:1] == [1.5]
    for number in (2, 3, 4):
        test.answer(number, "B")
    table = test.table()
    assert table["x"].tolist() == [trial.x for trial in test.trials]
    assert table["is_correct"].tolist() == [choice == x for choice, x in zip("ABBB", table["x"], strict=True)]


# -------------------------------------------------------------------------------------------------------------- statistics


@given(st.integers(0, 40).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_p_is_the_exact_tail(counts: tuple[int, int]) -> None:
    assert chance_of(*counts) == pytest.approx(tail(*counts), rel=1e-9)


@pytest.mark.parametrize(
    ("correct", "answered", "p"), [(9, 10, 11 / 1024), (5, 5, 1 / 32), (12, 16, 2517 / 65536), (0, 7, 1.0), (0, 0, 1.0)]
)
def test_p_of_known_results(correct: int, answered: int, p: float) -> None:
    assert chance_of(correct, answered) == pytest.approx(p, rel=1e-12)


@pytest.mark.parametrize("counts", [(-1, 3), (4, 3)])
def test_impossible_counts_fail(counts: tuple[int, int]) -> None:
    with pytest.raises(InputError, match="is impossible"):
        chance_of(*counts)


@given(st.integers(1, 60))
def test_the_critical_count_is_the_least_that_is_significant(num_trials: int) -> None:
    found = critical_count(num_trials)
    least = next((k for k in range(num_trials + 1) if tail(k, num_trials) <= 0.05), None)
    assert found == least
    assert (found is None) == (num_trials < 5)


def power(num_trials: int, hit_rate: float) -> float:
    needed = next((k for k in range(num_trials + 1) if tail(k, num_trials) <= 0.05), num_trials + 1)
    return sum(math.comb(num_trials, k) * hit_rate**k * (1 - hit_rate) ** (num_trials - k) for k in range(needed, num_trials + 1))


@pytest.mark.parametrize("hit_rate", [0.65, 0.75, 0.9, 1.0])
def test_trials_needed_are_the_fewest_with_the_power(hit_rate: float) -> None:
    assert trials_needed(hit_rate) == next(n for n in range(1, 300) if power(n, hit_rate) >= 0.8)


def test_known_numbers_of_trials() -> None:
    assert (trials_needed(0.75), critical_count(23)) == (23, 16)
    assert trials_needed(1.0) == 5


@pytest.mark.parametrize("hit_rate", [0.5, 0.2, 1.1, math.nan])
def test_listeners_who_guess_are_never_found(hit_rate: float) -> None:
    with pytest.raises(InputError, match=r"a share above 0\.5"):
        trials_needed(hit_rate)


def test_listeners_who_nearly_guess_need_too_many_trials() -> None:
    with pytest.raises(InputError, match="is not found with 100000"):
        trials_needed(0.5001)


@given(st.integers(1, 30).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_bounds_are_where_the_tails_are_a_twentieth(counts: tuple[int, int]) -> None:
    correct, answers = counts
    low, high = hit_rate_bounds(correct, answers)

    def at_least(share: float) -> float:
        return sum(math.comb(answers, k) * share**k * (1 - share) ** (answers - k) for k in range(correct, answers + 1))

    assert low == 0 if correct == 0 else at_least(low) == pytest.approx(0.05, rel=1e-6)
    at_most = at_least(high) - math.comb(answers, correct) * high**correct * (1 - high) ** (answers - correct)
    assert high == 1 if correct == answers else 1 - at_most == pytest.approx(0.05, rel=1e-6)


def test_the_detectable_share_has_the_power() -> None:
    for trials in (5, 12, 24, 60):
        found = ABXResult(trials, 0, 0).detectable_hit_rate
        assert found is not None
        assert power(trials, found) == pytest.approx(0.8, rel=1e-6)
    assert ABXResult(4, 0, 0).detectable_hit_rate is None


def test_a_heard_difference() -> None:
    found = answered(made(12), 11).result()
    assert (found.correct, found.p_value) == (11, pytest.approx(13 / 4096))
    assert found.is_heard is True
    assert found.hit_rate == pytest.approx(11 / 12)
    assert found.text.startswith("A difference was heard: 11 of 12 right; guessing does as well or better with p = 0.0032.")
    assert str(found) == found.text


def test_a_difference_that_was_not_shown_is_not_called_equality() -> None:
    found = answered(made(12), 6).result()
    assert found.is_heard is False
    assert "No difference was shown" in found.text
    assert "no proof of equality" in found.text
    assert "12 trials need 10 right answers" in found.text
    assert "takes 23 trials" in found.text


def test_too_few_trials_say_so() -> None:
    found = answered(made(4), 4).result()
    assert (found.needed, found.is_heard) == (None, False)
    assert "4 trials cannot show anything" in found.text


def test_unfinished_tests_say_so() -> None:
    test = made(12)
    assert test.result().text.startswith("No answer yet, 12 trials to go.")
    assert math.isnan(test.result().hit_rate)
    assert test.result().p_value == 1
    for number in range(1, 7):
        test.answer(number, test.trials[number - 1].x)
    found = test.result()
    assert found.is_heard is None
    assert found.text.startswith("Unfinished, 6 of 12 trials to go: 6 of 6 right")


# ------------------------------------------------------------------------------------------------------------------- files


@settings(max_examples=30)
@given(st.integers(1, 12), st.integers(0, 99), st.lists(st.tuples(st.sampled_from("AB"), st.none() | st.floats(0, 99)), max_size=12))
def test_saved_tests_come_back(num_trials: int, seed: int, answers: list[Any]) -> None:
    test = made(num_trials, seed)
    for number, (choice, seconds) in enumerate(answers[:num_trials], start=1):
        test.answer(number, choice, seconds)
    with tempfile.TemporaryDirectory() as folder:
        again = ABXTest.load(test.save(Path(folder) / "new" / "run.json"))
    assert (again.samples, again.conditions, again.seed) == (test.samples, test.conditions, test.seed)
    assert (again.trials, again.answers) == (test.trials, test.answers)
    assert again.result().text == test.result().text


def test_saving_goes_on_in_the_same_file_and_spares_others(tmp_path: Path) -> None:
    path, test = tmp_path / "run.json", made(4)
    test.save(path)
    early = ABXTest.load(path)
    test.answer(1, "A")
    test.save(path)
    kept = path.read_bytes()
    with pytest.raises(InputError, match="answers that this one lacks"):
        early.save(path)
    with pytest.raises(InputError, match="another test"):
        made(4, seed=9).save(path)
    assert path.read_bytes() == kept
    assert [p.name for p in tmp_path.iterdir()] == ["run.json"]
    made(4, seed=9).save(path, overwrite=True)
    assert ABXTest.load(path).seed == 9


def test_another_test_without_answers_is_not_written_over(tmp_path: Path) -> None:
    path = made(4, seed=9).save(tmp_path / "run.json")
    kept = path.read_bytes()
    with pytest.raises(InputError, match="holds another test"):
        made(4).save(path)
    assert path.read_bytes() == kept


def test_places_that_cannot_be_written_fail(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("mine")
    for path, message in (
        (tmp_path / "text", "is no JSON"),
        (tmp_path, "holds another test"),
        (tmp_path / "text" / "run", "cannot be written"),
    ):
        with pytest.raises(InputError, match=message):
            made().save(path)
    assert (tmp_path / "text").read_text() == "mine"


def _content(change: Any) -> Any:
    return lambda file: file | {"content": file["content"] | change}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda file: file | {"version": 2, "written_by": "vgraph-lab 7"}, "version 2, written by vgraph-lab 7.*Update vgraph-lab"),
        (lambda file: file | {"version": "1"}, "is no ABX test"),
        (lambda file: file | {"format": "vgraph_lab MUSHRA test"}, "is no ABX test of vgraph_lab"),
        (lambda file: [file], "is no ABX test"),
        (lambda file: {"format": file["format"], "version": 1}, "is damaged"),
        (_content({"answers": [{"number": 99, "choice": "A", "seconds": None}]}), "is damaged: there is no trial 99"),
        (_content({"answers": [{"number": 1, "choice": "C", "seconds": None}]}), r"is damaged: answers\.0\.choice"),
        (_content({"answers": [{"number": 1, "choice": "A", "seconds": None}] * 2}), "is damaged: trial 1 was answered already"),
        (_content({"trials": []}), "is damaged: it has no trials"),
        (_content({"samples": ["x"]}), "is damaged: trial 1 is"),
        (_content({"seed": -1}), "is damaged: seed is -1"),
        (_content({"seed": "1"}), "is damaged: seed"),
    ],
)
def test_files_that_are_no_tests_fail(tmp_path: Path, change: Any, message: str) -> None:
    path = made().save(tmp_path / "run.json")
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(InputError, match=message):
        ABXTest.load(path)


def test_files_that_are_not_there_or_no_json_fail(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read: No such file"):
        ABXTest.load(tmp_path / "none.json")
    (tmp_path / "half.json").write_text('{"format": "vgraph_lab ABX')
    with pytest.raises(InputError, match="is no JSON, or damaged"):
        ABXTest.load(tmp_path / "half.json")
