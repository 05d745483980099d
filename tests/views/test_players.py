"""Players. Truth: the WAV files inside the markup, decoded."""

from __future__ import annotations

import base64
import io
import math
import re
from html.parser import HTMLParser

import numpy as np
import pandas as pd
import pytest
import soundfile
import torch
from hypothesis import given
from hypothesis import strategies as st

from vgraph_lab.errors import FallbackReason, InputError
from vgraph_lab.graphs import CallKind, Descriptor
from vgraph_lab.inspect.audio import EXACT, verdict, waveform_difference
from vgraph_lab.inspect.parity import Comparison
from vgraph_lab.inspect.request_life import RequestLife
from vgraph_lab.inspect.stream_parity import StreamComparison
from vgraph_lab.views.levels import difference_gain_db, difference_label, shared_gain
from vgraph_lab.views.players import ABPair, ab_players, wav_data_uri

RATE = 24_000
LSB = 1 / 32767
EAGER = (np.sin(np.arange(2400) * 0.05) * 0.5).astype(np.float32)


class Players(HTMLParser):
    """All audio elements of a page, as track → decoded samples, in order."""

    def __init__(self, markup: str) -> None:
        super().__init__()
        self.tracks: list[tuple[str, np.ndarray, int]] = []
        self.labels: list[str] = []
        self.feed(markup)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "audio":
            found = dict(attrs)
            assert "controls" in found
            samples, rate = soundfile.read(io.BytesIO(base64.b64decode((found["src"] or "").partition("base64,")[2])))
            self.tracks.append((found["data-track"] or "", samples, rate))
            self.labels.append(found["aria-label"] or "")


def players(*pairs: ABPair, **options: object) -> tuple[Players, str]:
    markup = ab_players(pairs, RATE, show_waveforms=False, **options).markup
    return Players(markup), markup


def test_wavs_hold_the_waveforms_at_the_shared_gain():
    graph = EAGER + np.float32(0.01)
    found, markup = players(ABPair("one", EAGER, graph))
    assert [track for track, _, _ in found.tracks] == ["eager", "graph", "difference"]
    (_, eager, rate), (_, other, _), (_, difference, _) = found.tracks
    assert rate == RATE
    np.testing.assert_allclose(eager, EAGER, atol=LSB)
    np.testing.assert_allclose(other, graph, atol=LSB)
    np.testing.assert_allclose(difference, (graph.astype(float) - EAGER) * 10 ** (30 / 20), atol=LSB)
    assert "peak −40.0 dBFS, +30 dB amplified" in markup
    assert "gain 0 dB" in markup


def test_one_gain_for_all_pairs_if_one_sample_exceeds_full_scale():
    loud = EAGER * 4  # peak 2
    found, markup = players(ABPair("loud", loud, loud), ABPair("soft", EAGER, EAGER))
    played = [np.abs(samples).max() for _, samples, _ in found.tracks]
    assert played == pytest.approx([1.0, 1.0, 0.25, 0.25], abs=1e-3)
    assert "gain −6.0 dB because a sample exceeds full scale" in markup


def test_identical_signals_are_labelled_silent_and_have_no_third_player():
    found, markup = players(ABPair("same", EAGER, EAGER.copy()))
    assert [track for track, _, _ in found.tracks] == ["eager", "graph"]
    assert "silent: identical" in markup


def test_silence_is_not_divided_by():
    found, _ = players(ABPair("silence", np.zeros(10), np.zeros(10)))
    assert [np.abs(samples).max() for _, samples, _ in found.tracks] == [0, 0]


def test_long_items_are_cut_and_say_so():
    graph = EAGER.copy()
    graph[-1] += np.float32(0.25)  # the only difference lies behind the cut
    found, markup = players(ABPair("long", EAGER, graph), max_seconds=0.05)
    assert {len(samples) for _, samples, _ in found.tracks} == {1200}
    assert "the first 0.05 s of 0.10 s" in markup
    assert "peak −12.0 dBFS" in markup


def test_short_items_are_whole():
    _, markup = players(ABPair("short", EAGER, EAGER))
    assert "the first" not in markup


def test_labels_are_escaped_and_spoken():
    found, markup = players(ABPair("<b>x</b> & 'y'", EAGER, EAGER, detail="says <script>\nline two"))
    assert found.labels == ["<b>x</b> & 'y', eager", "<b>x</b> & 'y', graph"]
    assert "<script>" not in markup
    assert "<b>x</b>" not in markup


def test_markup_needs_nothing_from_outside():
    markup = ab_players([ABPair("one", EAGER, EAGER * 0.9)], RATE).markup
    for address in re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?([^"')\s>]+)""", markup):
        assert address.startswith(("data:", "#")), address[:60]
    assert "<script" not in markup


def test_tensors_and_leading_axes_of_one_are_welcome():
    found, _ = players(ABPair("tensor", torch.from_numpy(EAGER)[None, None], EAGER[None]))
    assert all(len(samples) == len(EAGER) for _, samples, _ in found.tracks)


@pytest.mark.parametrize(
    ("eager", "graph", "message"),
    [
        (EAGER, EAGER[:-1], "2400 samples and graph 2399"),
        (np.stack([EAGER, EAGER]), np.stack([EAGER, EAGER]), "one channel"),
        (np.zeros(0), np.zeros(0), "no samples"),
        (np.array([0.0, math.nan]), np.zeros(2), "eager has 1 samples that are NaN"),
        (np.zeros(2), np.array([0.0, -math.inf]), "graph has 1 samples that are NaN or infinite"),
        (np.zeros(2, dtype=np.int16), np.zeros(2), "floating point"),
    ],
)
def test_unplayable_signals_fail_with_the_name_of_the_pair(eager, graph, message):
    with pytest.raises(InputError, match=f"clip 7: .*{message}"):
        ab_players([ABPair("clip 7", eager, graph)], RATE)


PAIRS = [ABPair("x", EAGER, EAGER)]


@pytest.mark.parametrize(("pairs", "rate", "seconds"), [([], RATE, 1.0), (PAIRS, 0, 1.0), (PAIRS, RATE, 0.0), (PAIRS, RATE, math.nan)])
def test_senseless_arguments_fail(pairs, rate, seconds):
    with pytest.raises(InputError):
        ab_players(pairs, rate, max_seconds=seconds)


def test_wav_refuses_to_clip():
    with pytest.raises(InputError, match="would be clipped"):
        wav_data_uri(np.array([0.0, 1.5]), RATE)


@given(st.lists(st.floats(-10, 10), min_size=1), st.lists(st.floats(-10, 10), min_size=1))
def test_shared_gain_never_clips_and_never_amplifies(one, other):
    gain = shared_gain([np.array(one), np.array(other)])
    assert 0 < gain <= 1
    assert max(map(abs, [*one, *other])) * gain <= 1 + 1e-12


@given(st.floats(1e-9, 4.0))
def test_differences_are_amplified_to_be_heard_and_never_clipped(level):
    gain_db = difference_gain_db(level)
    assert gain_db % 10 == 0
    played = 20 * math.log10(level) + gain_db
    assert played <= 1e-9
    if level < 0.1:
        assert -16 - 1e-9 <= played <= -6 + 1e-9
    assert f"{abs(gain_db)} dB" in difference_label(level) or gain_db == 0


@pytest.mark.parametrize(
    ("level", "label"),
    [(0.0, "silent: identical"), (0.5, "peak −6.0 dBFS, as it is"), (2.0, "peak 6.0 dBFS, −10 dB attenuated")],
)
def test_labels_state_the_true_level(level, label):
    assert difference_label(level) == label


def test_tracks_can_have_names_of_their_own():
    found, markup = players(ABPair("one", EAGER, EAGER, names=("whole", "<cut>")))
    assert found.labels == ["one, whole", "one, <cut>"]
    assert "<b>whole</b>" in markup
    assert "<b>&lt;cut&gt;</b>" in markup
    assert "<b>graph</b>" not in markup


def comparison(kind: CallKind) -> Comparison:
    difference = waveform_difference(EAGER, EAGER)
    return Comparison("one", kind, EAGER, EAGER, difference, EXACT, verdict(difference, EXACT), 1.0, 1.0)


def test_a_fallback_is_not_called_a_graph():
    key = Descriptor(1, 4)
    hit = ABPair.of(comparison(CallKind("t", key, descriptor=key)))
    missed = ABPair.of(comparison(CallKind("t", key, reason=FallbackReason.SHAPE_NOT_COVERED)))
    assert hit.names == ("eager", "graph")
    assert missed.names == ("eager", "eager (fallback)")
    assert "<b>graph</b>" not in players(missed)[1]


@pytest.mark.parametrize(("outcomes", "name"), [(["exact hit", "ended"], "graph"), (["exact hit", "fallback"], "graph + eager")])
def test_a_stream_says_what_became_of_its_chunks(outcomes, name):
    table = pd.DataFrame({"outcome": outcomes, "why": ["", "no_graph" if "fallback" in outcomes else ""]})
    life = RequestLife("one", table, (EAGER, EAGER[:0]), None)
    parity = pd.DataFrame({"agreement": ["bit for bit"]})
    pair = ABPair.of_stream(StreamComparison("one", EAGER, EAGER, life, parity, waveform_difference(EAGER, EAGER)), "said")
    assert pair.names == ("eager", name)
    assert pair.detail == f"said\n{life.route()} · 1 chunk bit for bit"
