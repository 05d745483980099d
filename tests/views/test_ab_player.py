"""The A/B player without a browser: traits, messages, buffers and the static form."""

from __future__ import annotations

import gc
import math
import re
import shutil
import subprocess
import weakref
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from views.test_players import Players

from vgraph_lab.errors import InputError
from vgraph_lab.inspect.listening.abx import ABXTest
from vgraph_lab.inspect.listening.audio_set import AudioSet
from vgraph_lab.views import ab_player
from vgraph_lab.views.ab_player import ABPlayer
from vgraph_lab.views.blind_test import BlindTest
from vgraph_lab.views.levels import difference_between, difference_label
from vgraph_lab.views.players import static_players

RATE = 24_000
RNG = np.random.default_rng(0)
WAVE = (RNG.standard_normal(2400) * 0.1).astype(np.float32)


def audio_set(*, seams: tuple[int, ...] = (1200,), **waveforms: np.ndarray) -> AudioSet:
    given = waveforms or {"eager": WAVE, "graph": WAVE + np.float32(0.01), "streamed": WAVE[:2000]}
    names = ["hello", "bye"]
    return AudioSet.from_waveforms(
        {condition: dict.fromkeys(names, wave) for condition, wave in given.items()},
        RATE,
        seams={"hello": list(seams)} if seams else {},
        details={"hello": "“hello”"},
    )


@pytest.fixture
def player() -> ABPlayer:
    return ABPlayer(audio_set())


def answers(widget: Any, content: dict[str, Any]) -> list[tuple[dict[str, Any], list[bytes]]]:
    """What Python sends when the browser says this."""
    sent: list[tuple[dict[str, Any], list[bytes]]] = []
    widget.send = lambda content, buffers=(): sent.append((content, [bytes(b) for b in buffers]))
    widget._handle_custom_msg(content, [])
    return sent


def tracks(sent: list[tuple[dict[str, Any], list[bytes]]]) -> list[np.ndarray]:
    """Waveforms put together from their pieces, as the browser does it."""
    pieces: dict[int, dict[int, np.ndarray]] = {}
    for content, buffers in sent:
        if content["kind"] == "piece":
            pieces.setdefault(content["track"], {})[content["offset"]] = np.frombuffer(buffers[0], "<f4")
    found = []
    for track in sorted(pieces):
        length = max(offset + len(piece) for offset, piece in pieces[track].items())
        whole = np.full(length, np.nan, np.float32)
        for offset, piece in pieces[track].items():
            assert np.isnan(whole[offset : offset + len(piece)]).all(), "pieces overlap"
            whole[offset : offset + len(piece)] = piece
        found.append(whole)
    return found


# ------------------------------------------------------------------------------------------------------------- what is sent


def test_audio_arrives_bit_for_bit_and_only_when_asked_for(player):
    state = {name: value for name, value in player.get_state().items() if name not in ("_esm", "_css")}
    assert len(str(state)) < 2000  # nothing but names and figures until then
    sent = answers(player, {"kind": "fetch", "sample": "hello"})
    found = tracks(sent)
    for condition, wave in zip(player.audio_set.conditions, found, strict=True):
        assert wave.tobytes() == player.audio_set.waveform(condition, "hello").tobytes()
    assert [difference["gain_db"] for difference in sent[0][0]["differences"]] == [None, 30, None]
    assert sent[0][0]["differences"][1]["label"] == "peak −40.0 dBFS, +30 dB amplified"
    assert sent[0][0]["differences"][2]["label"] == "none, 400 samples shorter than the reference"


def test_long_audio_goes_in_pieces(monkeypatch, player):
    monkeypatch.setattr(ab_player, "_PIECE_SAMPLES", 1000)
    sent = answers(player, {"kind": "fetch", "sample": "bye"})
    assert [content["offset"] for content, _ in sent if content.get("track") == 0] == [0, 1000, 2000]
    assert tracks(sent)[2].tobytes() == WAVE[:2000].tobytes()


def test_ten_minutes_of_audio_are_described_at_once_and_sent_as_they_are():
    wave = np.zeros(600 * RATE, np.float32)
    wave[-1] = 0.5
    long = ABPlayer(AudioSet.from_waveforms({"eager": {"long": wave}, "graph": {"long": wave}}, RATE))
    sent = answers(long, {"kind": "fetch", "sample": "long"})
    assert max(len(buffers[0]) for _, buffers in sent if buffers) <= 8 * 2**20
    assert tracks(sent)[1].tobytes() == wave.tobytes()
    html = long._repr_mimebundle_()[0]["text/html"]
    assert len(html) < 1_500_000
    assert "the first 5.00 s of 600.00 s" in html


def test_an_unknown_sample_is_refused_in_words(player):
    ((content, buffers),) = answers(player, {"kind": "fetch", "sample": "hallo"})
    assert content["kind"] == "refused"
    assert "did you mean 'hello'" in content["message"].lower()
    assert buffers == []


def test_the_index_tells_all_but_the_audio(player):
    index = player._index
    assert index["sampleRate"] == RATE
    assert [condition["name"] for condition in index["conditions"]] == ["eager", "graph", "streamed"]
    assert len({condition["colour"] for condition in index["conditions"]}) == 3
    hello = index["samples"][0]
    assert (hello["name"], hello["lengths"], hello["seams"], hello["detail"]) == ("hello", [2400, 2400, 2000], [1200], "“hello”")
    assert hello["peak"] == max(np.abs(WAVE).max(), np.abs(WAVE + np.float32(0.01)).max())
    assert (index["gain"], index["gainText"]) == (1.0, "0 dB")


def test_one_gain_keeps_the_loudest_sample_within_full_scale():
    index = ABPlayer(audio_set(eager=WAVE, graph=np.full(2400, 2.0, np.float32)))._index
    assert index["gain"] == 0.5
    assert index["gainText"] == "−6.0 dB because a sample exceeds full scale"


# -------------------------------------------------------------------------------------------------------- settable from Python


def test_python_chooses_and_a_new_sample_begins_at_its_start(player):
    player.condition, player.position_s, player.region_s, player.is_looping = "graph", 0.05, (0.01, 0.06), True
    player.is_difference = True
    assert repr(player).endswith("hello: graph − eager at 0.05 s)")
    player.sample = "bye"
    assert (player.position_s, player.region_s, player.condition, player.is_difference) == (0.0, None, "graph", True)
    player.condition = "eager"  # which has no difference from itself
    assert not player.is_difference
    player.play()
    assert player.is_playing
    player.pause()
    assert not player.is_playing


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("sample", "hallo", "no sample 'hallo'.*Did you mean 'hello'"),
        ("condition", "grap", "no condition 'grap'.*Did you mean 'graph'"),
        ("position_s", -0.1, "from 0 to 0.100 s"),
        ("position_s", 0.2, "from 0 to 0.100 s"),
        ("position_s", math.nan, "from 0 to 0.100 s"),
        ("region_s", (0.05, 0.06), "0.02 s at least"),
        ("region_s", (0.08, 0.01), "0.02 s at least"),
        ("region_s", (0.0, 0.3), "within 0 and 0.100 s"),
        ("region_s", (math.nan, 0.05), "within 0 and"),
        ("is_difference", True, "eager is the reference"),
    ],
)
def test_what_does_not_exist_is_refused_and_changes_nothing(player, name, value, message):
    before = {trait: getattr(player, trait) for trait in ("sample", "condition", "position_s", "region_s", "is_difference")}
    with pytest.raises(InputError, match=message):
        setattr(player, name, value)
    assert {trait: getattr(player, trait) for trait in before} == before


def test_waveforms_of_different_lengths_have_no_difference_track(player):
    player.condition = "streamed"
    with pytest.raises(InputError, match="2000 samples and eager 2400"):
        player.is_difference = True
    player.condition, player.is_difference = "graph", True
    player.condition = "streamed"
    assert not player.is_difference


@pytest.mark.parametrize("arguments", [{"static_seconds": 0}, {"static_seconds": math.nan}, {"static_bytes": 0}])
def test_senseless_limits_fail(arguments):
    with pytest.raises(InputError, match="must be positive"):
        ABPlayer(audio_set(), **arguments)


def test_only_an_audio_set_is_played():
    with pytest.raises(InputError, match="takes an AudioSet, got dict"):
        ABPlayer({"eager": WAVE})


# ----------------------------------------------------------------------------------------------------------- what was heard


def test_the_browser_reports_and_python_reads(player):
    player.set_state({"condition": "graph", "position_s": 0.03, "is_playing": True, "region_s": [0.0, 0.05], "audio_state": "running"})
    assert (player.condition, player.position_s, player.is_playing, player.region_s) == ("graph", 0.03, True, (0.0, 0.05))
    heard = {"kind": "heard", "sample": "hello", "condition": "eager", "is_difference": False, "position_s": 0.0, "seconds": 0.5}
    times = {"position_s": 0.5, "requested_s": 1.0, "begins_s": 1.02, "ends_s": 1.024}
    answers(player, heard)
    answers(player, {"kind": "switch", "sample": "hello", "before": "eager", "after": "graph", **times})
    assert pd.DataFrame(player.played).to_dict("records") == [{key: heard[key] for key in heard if key != "kind"}]
    (switch,) = player.switches
    assert (switch.before, switch.after) == ("eager", "graph")
    assert switch.crossfade_ms == pytest.approx(4.0)
    with pytest.raises(AttributeError):
        player.played = ()


def test_a_late_report_of_another_sample_is_cut_to_this_one(player):
    player.set_state({"position_s": 7.0, "region_s": [1.0, 2.0]})
    assert (player.position_s, player.region_s) == (pytest.approx(0.1), None)


HEARD = {"kind": "heard", "sample": "hello", "condition": "eager", "is_difference": False, "position_s": 0.0, "seconds": 0.5}


@pytest.mark.parametrize(
    "content",
    [{"kind": "heard"}, {"kind": "switch"}, {**HEARD, "seconds": "long"}, {**HEARD, "sample": None}, {"kind": "x"}, {}, None, [1]],
)
def test_damaged_messages_are_ignored_and_logged(player, content, caplog):
    assert answers(player, content) == []
    assert (player.played, player.switches) == ((), ())
    assert "ABPlayer ignores a" in caplog.text


@pytest.mark.parametrize("sample", [None, 1, ["hello"]])
def test_samples_that_are_no_names_are_refused(player, sample):
    ((content, _),) = answers(player, {"kind": "fetch", "sample": sample})
    assert content["kind"] == "refused"


@pytest.mark.parametrize(
    "state",
    [
        {"region_s": [1]}, {"region_s": 1}, {"region_s": "ab"}, {"region_s": [0.0, None]}, {"region_s": [0.0, 0.03, 0.05]},
        {"region_s": {}}, {"region_s": []}, {"position_s": "0"}, {"position_s": None}, {"sample": 1}, {"sample": None}, {"condition": 1},
        {"is_playing": "yes"},
        {"condition": "nope"}, {"sample": "bye", "condition": "nope"}, {"condition": "eager", "is_difference": True},
        {"condition": "eager", "region_s": [0.05, 0.051]}, {"is_playing": True, "position_s": math.nan},
    ],
)  # fmt: skip
def test_damaged_states_are_refused_and_change_nothing(player, state):
    player.condition, player.region_s = "graph", (0.01, 0.05)
    before = player.get_state(["sample", "condition", "position_s", "region_s", "is_playing"])
    with pytest.raises(InputError):
        player.set_state(state)
    assert player.get_state(list(before)) == before


# ------------------------------------------------------------------------------------------------------------- edges of sound


@pytest.mark.parametrize("wave", [np.zeros(2400, np.float32), np.zeros(1, np.float32), np.ones(1, np.float32)], ids=["silence", "0", "1"])
def test_silence_and_one_sample_are_played(wave):
    player = ABPlayer(audio_set(eager=wave, graph=wave, seams=()))
    sent = answers(player, {"kind": "fetch", "sample": "hello"})
    assert sent[0][0]["differences"][1] == {"gain_db": 0, "peak": 0.0, "label": "silent: identical"}
    assert len(tracks(sent)[0]) == len(wave)
    assert "nothing to hear" in player._repr_mimebundle_()[0]["text/html"]


# --------------------------------------------------------------------------------------------------------------- static form


def test_the_bundle_has_a_live_view_and_a_static_one(player):
    data, _ = player._repr_mimebundle_()
    assert data["application/vnd.jupyter.widget-view+json"]["model_id"] == player.model_id
    assert data["text/plain"] == repr(player)
    found = Players(data["text/html"])
    assert [track for track, _, _ in found.tracks] == ["eager", "graph", "streamed", "difference"] * 2
    assert {rate for _, _, rate in found.tracks} == {RATE}


def test_static_players_hold_every_condition_and_difference():
    html = static_players(audio_set(), samples=["hello"]).markup
    found = Players(html)
    roles, waves = [role for role, _, _ in found.tracks], [wave for _, wave, _ in found.tracks]
    assert roles == ["eager", "graph", "streamed", "difference"]
    np.testing.assert_allclose(waves[2], WAVE[:2000], atol=1 / 32767)
    np.testing.assert_allclose(waves[3], np.float32(0.01) * 10 ** (30 / 20), atol=1e-3)
    assert found.labels[3] == "hello, graph − eager"
    assert "0.083 s, gain 0 dB" in html  # the odd length is told
    assert "none, 400 samples shorter than the reference" in html
    assert "1 chunk seams" in html
    assert html.count("stroke-dasharray") == 1
    for address in re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?([^"')\s>]+)""", html):
        assert address.startswith("data:"), address[:60]


def test_a_limit_of_bytes_leaves_samples_out_and_says_so():
    audio = audio_set(eager=WAVE, graph=WAVE)  # identical: two tracks of 4800 bytes each
    html = static_players(audio, max_bytes=10_000).markup
    assert len(Players(html).tracks) == 2
    assert "Left out to keep this page below 0.01 MB of audio: bye." in html
    short = Players(static_players(audio, max_bytes=1000).markup)
    assert [len(wave) for _, wave, _ in short.tracks] == [250, 250]  # the first is cut rather than left out


@given(st.integers(1, 20_000))
def test_static_audio_stays_below_its_limit(limit):
    found = Players(static_players(audio_set(), max_bytes=limit, show_waveforms=False).markup)
    assert 2 * sum(len(wave) for _, wave, _ in found.tracks) <= max(limit, 2 * 4)  # but one sample of each track


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"samples": ["no"]}, "no sample 'no'"),
        ({"samples": []}, "nothing to compare"),
        ({"max_bytes": 0}, "positive"),
        ({"max_seconds": -1.0}, "positive"),
    ],
)
def test_static_players_refuse_what_is_not_there(arguments, message):
    with pytest.raises(InputError, match=message):
        static_players(audio_set(), **arguments)


# -------------------------------------------------------------------------------------------------------------- differences


@given(st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=50), st.integers(0, 60))
def test_differences_have_the_level_that_they_state(values, shift):
    reference = np.array(values, np.float32)
    candidate = reference + np.float32(2.0**-shift)
    found = difference_between(reference, candidate)
    exact = candidate.astype(np.float64) - reference.astype(np.float64)
    assert found.samples is not None
    assert found.samples.tolist() == exact.tolist()
    assert found.label == difference_label(np.abs(exact).max())
    assert found.is_silent == (not exact.any())
    assert np.abs(found.played).max() <= 1 + 1e-12


# ------------------------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize(
    "make", [ABPlayer, lambda audio: BlindTest(audio, ABXTest(audio.samples, ("eager", "graph"), num_trials=1, seed=0))]
)
def test_a_closed_widget_gives_its_audio_back(make):
    audio = audio_set()
    held, widget = weakref.ref(audio), make(audio)
    del audio
    widget.close()
    del widget
    gc.collect()
    assert held() is None


# ------------------------------------------------------------------------------------------------------------------ scripts


@pytest.mark.parametrize("widget", [ABPlayer, BlindTest])
def test_scripts_are_one_module_that_fetches_nothing(widget, tmp_path):
    script = str(widget._esm)
    assert not re.search(r"^import ", script, re.MULTILINE)
    assert re.findall(r"https?://", script + str(widget._css)) == []
    assert script.count("export default") == 1
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node here; browsers parse it in tests/browser")
    file = tmp_path / "module.mjs"
    file.write_text(script)
    subprocess.run([node, "--check", str(file)], check=True, capture_output=True)
