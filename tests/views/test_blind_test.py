"""The blind test without a browser: what is sent, what is kept back, answers and files."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_ab_player import answers, tracks

from vgraph_lab.errors import InputError, LifecycleError
from vgraph_lab.inspect.listening.abx import ABXTest
from vgraph_lab.inspect.listening.audio_set import AudioSet
from vgraph_lab.inspect.listening.mushra import MushraTest
from vgraph_lab.views.blind_test import BlindTest

RATE = 24_000
SAMPLES = ("hello", "bye", "why")
WAVES = {name: (np.random.default_rng(seed).standard_normal(2000) * 0.1).astype(np.float32) for seed, name in enumerate(SAMPLES)}
AUDIO = AudioSet.from_waveforms(
    {"eager-secret": WAVES, "graph-secret": {name: wave[:1500] + np.float32(0.01) for name, wave in WAVES.items()}}, RATE
)


def abx(num_trials: int = 6, seed: int = 3) -> BlindTest:
    return BlindTest(AUDIO, ABXTest(AUDIO.samples, ("eager-secret", "graph-secret"), num_trials=num_trials, seed=seed))


def mushra() -> BlindTest:
    return BlindTest(AUDIO, MushraTest(AUDIO.samples, AUDIO.conditions, seed=1))


def state_and_audio(blind: BlindTest) -> tuple[str, list[np.ndarray]]:
    """All that the browser can know: synced state and messages as text, and waveforms."""
    sent = answers(blind, {"kind": "fetch", "number": blind._page["number"]})
    state = {name: value for name, value in blind.get_state().items() if name not in ("_esm", "_css", "layout")}
    return json.dumps([state, [content for content, _ in sent]], default=str), tracks(sent)


@settings(max_examples=15)
@given(st.integers(0, 2**31))
def test_nothing_but_the_waveforms_tells_what_x_is(seed):
    """Trials of one sample that differ in A, B and X have the same state and messages, but for their numbers."""
    texts: dict[str, str] = {}
    blind = abx(num_trials=12, seed=seed)
    for trial in blind.test.trials:
        text, (a, b, x) = state_and_audio(blind)
        assert "secret" not in text
        assert len(a) == len(b) == len(x) == 2000  # the shorter condition cannot be told by its length
        assert x.tobytes() == (a if trial.x == "A" else b).tobytes()
        assert a[:1500].tobytes() == AUDIO.waveform(trial.a, trial.sample)[:1500].tobytes()
        neutral = text.replace(f'"number": {trial.number}', '"number": 0').replace(f'"answered": {trial.number - 1}', '"answered": 0')
        assert texts.setdefault(trial.sample, neutral) == neutral
        blind.answer("A")


def test_a_mushra_page_tells_letters_only():
    blind = mushra()
    text, (reference, *letters) = state_and_audio(blind)
    assert "secret" not in text
    page = blind.test.pages[0]
    assert reference.tobytes() == AUDIO.waveform("eager-secret", page.sample).tobytes()
    for wave, condition in zip(letters, page.stimuli.values(), strict=True):
        np.testing.assert_array_equal(wave[:1500], AUDIO.waveform(condition, page.sample)[:1500])


def test_an_abx_run_by_code_to_its_end(tmp_path):
    file = tmp_path / "run.json"
    blind = BlindTest(AUDIO, ABXTest(AUDIO.samples, ("eager-secret", "graph-secret"), num_trials=6, seed=3), save_to=file)
    assert file.exists()
    for trial in blind.test.trials:
        assert "result" not in blind._page
        assert blind._page["number"] == trial.number
        blind.answer(trial.x, 1.5)
        assert len(ABXTest.load(file).answers) == trial.number  # nothing is lost if the kernel ends here
    assert blind.is_finished
    assert (blind.result().correct, blind.result().p_value) == (6, pytest.approx(2.0**-6))
    assert blind._page["result"]["headline"] == "6 of 6 right, p = 0.016"
    assert "A difference was heard" in blind._page["result"]["text"]
    assert [row[-2:] for row in blind._page["result"]["rows"]] == [["right", "1.5"]] * 6
    assert list(blind.table()["is_correct"]) == [True] * 6
    with pytest.raises(LifecycleError, match="the test is finished"):
        blind.answer("A")


def test_a_mushra_run_by_code_to_its_end():
    blind = mushra()
    while not blind.is_finished:
        page = blind.test.next_page
        blind.answer({letter: 100 if condition == "eager-secret" else 40 for letter, condition in page.stimuli.items()})
    assert dict(zip(blind.result().table["condition"], blind.result().table["mean"], strict=True)) == {
        "eager-secret": 100,
        "graph-secret": 40,
    }
    assert "Reliable" in blind._page["result"]["text"]


def test_clicks_answer_too_and_a_second_click_is_told_and_changes_nothing():
    blind = abx()
    click = {"kind": "answer", "number": 1, "given": "B", "seconds": 2.0}
    assert answers(blind, click) == []
    ((content, _),) = answers(blind, click)
    assert content["kind"] == "refused"
    assert "answered already" in content["message"]
    assert blind.message == content["message"]
    assert [answer.choice for answer in blind.test.answers] == ["B"]
    answers(blind, {"kind": "answer", "number": 2, "given": "A", "seconds": 0.5})
    assert blind.message == ""
    assert blind._page["number"] == 3


def test_a_test_that_is_answered_elsewhere_stays_in_step():
    """What is sent belongs to the trial that it names, and one that has passed brings the next one."""
    blind = abx()
    blind.test.answer(1, "A")
    assert answers(blind, {"kind": "fetch", "number": 1}) == []
    trial = blind.test.trials[1]
    assert (blind._page["number"], blind._page["sample"], blind._page["answered"]) == (2, trial.sample, 1)
    _, (a, _, x) = state_and_audio(blind)
    assert a[:1500].tobytes() == AUDIO.waveform(trial.a, trial.sample)[:1500].tobytes()
    assert x[:1500].tobytes() == AUDIO.waveform(trial.x_condition, trial.sample)[:1500].tobytes()

    blind.test.answer(2, "A")
    ((content, _),) = answers(blind, {"kind": "answer", "number": 2, "given": "B", "seconds": 1.0})
    assert "trial 3 is next" in content["message"]
    assert blind._page["number"] == 3  # so that the next click counts
    assert answers(blind, {"kind": "answer", "number": 3, "given": "B", "seconds": 1.0}) == []
    blind.test.answer(4, "A")
    blind.answer("B")  # trial 5, which is next by now
    assert [(answer.number, answer.choice) for answer in blind.test.answers] == [(1, "A"), (2, "A"), (3, "B"), (4, "A"), (5, "B")]
    blind.test.answer(6, "A")
    assert "eager-secret" in blind._repr_mimebundle_()[0]["text/html"]  # finished elsewhere, and known here


@pytest.mark.parametrize("made", [abx, mushra])
def test_two_widgets_over_one_test_take_turns(made):
    first = made()
    second = BlindTest(AUDIO, first.test)
    for turn in range(first._page["total"]):
        blind = (first, second)[turn % 2]
        answers(blind, {"kind": "fetch", "number": blind._page["number"]})  # as the browser does whenever it is shown
        _, found = state_and_audio(blind)
        assert blind._page["number"] == turn + 1
        for wave, condition in zip(found, blind._behind(turn + 1).values(), strict=True):
            assert wave[:1500].tobytes() == AUDIO.waveform(condition, blind._page["sample"])[:1500].tobytes()
        blind.answer("A" if made is abx else {"A": 100, "B": np.float32(50)}, np.float32(1))
    with pytest.raises(LifecycleError, match="the test is finished"):
        (first if first._page.get("number") else second).answer("A")
    assert first.is_finished


@pytest.mark.parametrize("content", [{}, {"kind": "unknown"}, None, [1], "fetch"])
def test_messages_that_are_none_are_ignored_and_logged(content, caplog):
    assert answers(abx(), content) == []
    assert "BlindTest ignores a message" in caplog.text


@pytest.mark.parametrize("number", [None, [1], {"a": 1}, "1", True, 10**400])
def test_numbers_that_are_none_do_no_harm(number):
    blind = abx()
    assert number is True or answers(blind, {"kind": "fetch", "number": number}) == []
    ((content, _),) = answers(blind, {"kind": "answer", "number": number, "given": "A", "seconds": 1.0})
    assert content["kind"] == "refused"
    assert blind.test.answers == ()


@pytest.mark.parametrize("given", ["C", "", None, {"A": 1}])
def test_senseless_clicks_are_refused(given):
    blind = abx()
    ((content, _),) = answers(blind, {"kind": "answer", "number": 1, "given": given, "seconds": 1.0})
    assert content["kind"] == "refused"
    assert blind.test.answers == ()


def test_a_stale_request_gets_nothing():
    assert answers(abx(), {"kind": "fetch", "number": 2}) == []


@pytest.mark.parametrize(
    ("blind", "given"), [(abx, "C"), (abx, {"A": 100.0}), (mushra, "A"), (mushra, {"A": 100.0}), (mushra, {"A": 101.0, "B": 0.0})]
)
def test_answers_that_do_not_fit_fail(blind, given):
    made = blind()
    with pytest.raises(InputError):
        made.answer(given)
    assert made._page["answered"] == 0


def test_a_begun_test_goes_on_where_it_stopped():
    test = ABXTest(AUDIO.samples, ("eager-secret", "graph-secret"), num_trials=4, seed=0)
    test.answer(1, "A")
    test.answer(2, "B")
    blind = BlindTest(AUDIO, test)
    assert (blind._page["number"], blind._page["answered"], blind._page["total"]) == (3, 2, 4)


def test_a_finished_test_shows_its_result():
    blind = abx(num_trials=1)
    blind.answer("A")
    again = BlindTest(AUDIO, blind.test)
    assert again._page == blind._page
    assert "number" not in again._page


@pytest.mark.parametrize(
    "test",
    [
        ABXTest(("other",), ("eager-secret", "graph-secret"), num_trials=1, seed=0),
        ABXTest(SAMPLES, ("eager", "graph"), num_trials=1, seed=0),
    ],
)
def test_a_test_of_other_audio_fails(test):
    with pytest.raises(InputError, match=r"there is no (sample|condition)"):
        BlindTest(AUDIO, test)


@pytest.mark.parametrize(("audio", "test"), [(AUDIO, None), ({}, ABXTest(SAMPLES, ("a", "b"), num_trials=1, seed=0))])
def test_something_else_fails(audio, test):
    with pytest.raises(InputError, match="takes an AudioSet and an ABXTest or MushraTest"):
        BlindTest(audio, test)


def test_a_file_of_another_test_is_refused_before_anybody_listens(tmp_path):
    abx(seed=1).test.save(tmp_path / "run.json")
    with pytest.raises(InputError, match="holds another test"):
        BlindTest(AUDIO, abx(seed=2).test, save_to=tmp_path / "run.json")


def test_an_answer_that_cannot_be_saved_is_kept_and_told(tmp_path):
    file = tmp_path / "run.json"
    blind = BlindTest(AUDIO, abx().test, save_to=file)
    abx(seed=9).test.save(file, overwrite=True)  # somebody else's file by now
    ((content, _),) = answers(blind, {"kind": "answer", "number": 1, "given": "A", "seconds": 1.0})
    assert "holds another test" in content["message"]
    assert len(blind.test.answers) == 1
    assert blind._page["number"] == 2


def test_the_static_form_says_how_far_it_is_and_later_what_came_out():
    blind = abx(num_trials=2)
    assert "0 of 2 answered" in blind._repr_mimebundle_()[0]["text/html"]
    assert "secret" not in blind._repr_mimebundle_()[0]["text/html"] + blind._page.__repr__()
    blind.answer("A")
    blind.answer("A")
    html = blind._repr_mimebundle_()[0]["text/html"]
    assert "eager-secret" in html
    assert html.count("<tr>") == 3
