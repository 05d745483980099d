"""The A/B player and the blind test in a real browser: rendered samples, the Web Audio clock, keys, and what Python reads."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pytest
from playwright.sync_api import Browser, Page

from vgraph_lab.views.ab_player import ABPlayer

RATE = 24_000
LONGEST_CROSSFADE_MS = 5.0

# ------------------------------------------------------------------------------------- the engine, rendered sample by sample


@pytest.fixture(scope="module")
def module(browser: Browser) -> Iterator[Page]:
    """A page with the player's module as ``window.vgl``."""
    page = browser.new_page()
    page.evaluate(
        """async (source) => {
            window.vgl = await import(URL.createObjectURL(new Blob([source], {type: 'text/javascript'})));
        }""",
        str(ABPlayer._esm),
    )
    yield page
    page.close()


def render(
    page: Page, tracks: list[np.ndarray], seconds: float, steps: dict[float, str], **options: Any
) -> tuple[np.ndarray, list[dict[str, Any]]]:
    """What the engine plays when these JavaScript steps are taken at these times, and its records of switches."""
    samples, switches = page.evaluate(
        """async ([tracks, rate, seconds, steps, options]) => {
            const context = new OfflineAudioContext(1, Math.round(seconds * rate), rate);
            const switches = [], heard = [];
            const engine = new vgl.AudioEngine({sampleRate: rate, gain: options.gain ?? 1, createContext: () => context,
                onSwitch: (record) => switches.push(record)});
            engine.load({name: 'clip', tracks: tracks.map((track) => Float32Array.from(track)), amplify: options.amplify});
            engine.setLoop(options.region ?? null, options.loop ?? false);
            engine.begin();
            for (const [at, step] of steps) context.suspend(at).then(() => { new Function('engine', step)(engine); context.resume(); });
            const rendered = await context.startRendering();
            return [Array.from(rendered.getChannelData(0)), switches];
        }""",
        [[track.tolist() for track in tracks], RATE, seconds, list(steps.items()), options],
    )
    return np.array(samples, np.float32), switches


def noise(seconds: float, seed: int) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(int(seconds * RATE)) * 0.1).astype(np.float32)


def frame(seconds: float) -> int:
    return round(seconds * RATE)


def test_tracks_are_played_bit_for_bit_and_switch_in_step_within_5_ms(module):
    a, b = noise(1.0, 1), noise(1.0, 2)
    out, switches = render(module, [a, b], 1.0, {0.25: "engine.select(1)", 0.5: "engine.select(0)"})
    assert len(switches) == 2
    at, current, other = 0, a, b
    for switch in switches:
        begins, ends = switch["begins_s"], switch["ends_s"]
        assert 0 < (ends - begins) * 1e3 <= LONGEST_CROSSFADE_MS
        assert begins - switch["requested_s"] <= 0.03
        first, last = int(np.ceil(begins * RATE)), int(np.ceil(ends * RATE))
        np.testing.assert_array_equal(out[at:first], current[at:first])
        share = (np.arange(first, last) / RATE - begins) / (ends - begins)
        np.testing.assert_allclose(out[first:last], current[first:last] * (1 - share) + other[first:last] * share, atol=2e-6)
        at, current, other = last, other, current
    np.testing.assert_array_equal(out[at:], current[at:])


def test_a_switch_during_a_crossfade_waits_for_its_end(module):
    a, b, c = noise(1.0, 1), noise(1.0, 2), noise(1.0, 3)
    out, switches = render(module, [a, b, c], 1.0, {0.25: "engine.select(1); engine.select(2)"})
    assert switches[1]["begins_s"] >= switches[0]["ends_s"]
    np.testing.assert_array_equal(out[frame(0.3) :], c[frame(0.3) :])


def test_differences_are_subtracted_before_they_are_amplified(module):
    a = noise(0.5, 1)
    b = a.copy()
    b[6000:] += (np.random.default_rng(5).standard_normal(6000) * 1e-6).astype(np.float32)
    out, _ = render(module, [a, b], 0.5, {0.1: "engine.select(1, true)"}, amplify=[None, 1e5])
    assert (out[frame(0.15) : 6000] == 0).all()  # equal samples: silence, not rounding
    np.testing.assert_array_equal(out[6000:], (b - a)[6000:] * np.float32(1e5))


@pytest.mark.parametrize("track", [0, 1])
def test_the_reference_and_tracks_of_other_lengths_have_no_difference(module, track):
    a, b = noise(0.2, 1), noise(0.2, 2)
    out, switches = render(module, [a, b], 0.2, {0.05: f"engine.select({track}, true)"}, amplify=[None, None])
    assert switches == []
    np.testing.assert_array_equal(out, a)


def test_a_region_is_looped_in_step_without_a_missing_sample(module):
    a, b = noise(1.0, 1), noise(1.0, 2)
    begin, end = 4800, 7200  # 0.2 to 0.3 s
    out, _ = render(module, [a, b], 1.0, {0.5: "engine.select(1)"}, region=[begin / RATE, end / RATE], loop=True)
    along = begin + np.arange(RATE) % (end - begin)
    fade = frame(0.004)  # it begins within the clip, and would click
    np.testing.assert_array_equal(out[fade : frame(0.5)], a[along][fade : frame(0.5)])
    np.testing.assert_array_equal(out[frame(0.55) :], b[along][frame(0.55) :])


def test_seeking_goes_to_the_very_sample(module):
    a = noise(1.0, 1)
    out, _ = render(module, [a], 0.6, {0.2: "engine.seek(0.7)"})
    start = frame(0.2) + int(
        np.argmax([np.array_equal(out[frame(0.25) : frame(0.3)], a[frame(0.7) + s : frame(0.7) + s + frame(0.05)]) for s in range(1200)])
    )
    settled = frame(0.25)
    shift = start - frame(0.2)
    np.testing.assert_array_equal(out[settled : frame(0.4)], a[frame(0.7) + shift : frame(0.7) + shift + frame(0.4) - settled])
    np.testing.assert_array_equal(out[: frame(0.2)], a[: frame(0.2)])


def test_one_gain_is_for_everything(module):
    loud = np.full(2400, 2.0, np.float32)
    out, _ = render(module, [loud, loud / 4], 0.1, {0.03: "engine.select(1)"}, gain=0.5)
    assert out[0] == 1.0
    assert out[-1] == 0.25


def test_a_shorter_track_ends_in_silence_and_stays_in_step(module):
    a, b = noise(0.4, 1), noise(0.2, 2)
    out, _ = render(module, [a, b], 0.4, {0.1: "engine.select(1)", 0.3: "engine.select(0)"})
    np.testing.assert_array_equal(out[frame(0.15) : frame(0.2)], b[frame(0.15) :])
    assert (out[frame(0.2) : frame(0.3)] == 0).all()
    np.testing.assert_array_equal(out[frame(0.35) :], a[frame(0.35) :])


def test_one_sample_of_audio_is_played(module):
    out, _ = render(module, [np.ones(1, np.float32), np.ones(1, np.float32)], 0.1, {})
    assert out[0] == 1.0
    assert (out[1:] == 0).all()


# ----------------------------------------------------------------------------------------------------- pictures, by numbers


def test_the_spectrum_equals_numpys(module):
    wave = noise(0.1, 7)
    power = module.evaluate("(wave) => Array.from(new vgl.Spectrum(1024).at(Float32Array.from(wave), 1200, 2))", wave.tolist())
    window = np.hanning(1025)[:-1]
    expected = np.abs(np.fft.rfft(wave[688:1712].astype(float) * window) * 2 / window.sum() * 2) ** 2
    np.testing.assert_allclose(power, expected, rtol=1e-4, atol=1e-9)


def test_a_sine_at_full_scale_has_0_db(module):
    wave = np.cos(2 * np.pi * 100 * np.arange(4096) / 1024)
    power = module.evaluate("(wave) => Array.from(new vgl.Spectrum(1024).at(Float32Array.from(wave), 2048))", wave.tolist())
    assert int(np.argmax(power)) == 100
    assert power[100] == pytest.approx(1.0, rel=1e-4)


@pytest.mark.parametrize(("begin", "end", "columns"), [(0, 30_000, 7), (100, 29_000, 400), (5.5, 6.5, 3), (-100, 40_000, 5)])
def test_envelopes_hold_the_extremes(module, begin, end, columns):
    wave = noise(1.25, 3)
    low, high = module.evaluate(
        """([wave, begin, end, columns]) => {
            const { low, high } = new vgl.Envelope(Float32Array.from(wave)).over(begin, end, columns);
            return [Array.from(low), Array.from(high)];
        }""",
        [wave.tolist(), begin, end, columns],
    )
    step = (end - begin) / columns
    for column in range(columns):
        a, b = int(np.floor(begin + column * step)), int(np.floor(begin + (column + 1) * step))
        inner, outer = wave[max(a, 0) : max(b, a + 1)], wave[max(a - 256, 0) : b + 257]  # coarse envelopes know blocks of 256
        if len(inner):
            assert outer.min() <= low[column] <= inner.min()
            assert inner.max() <= high[column] <= outer.max()


# --------------------------------------------------------------------------------------------------------- live in JupyterLab

CELLS = {
    "make": """
import numpy as np
from vgraph_lab.inspect.listening.audio_set import AudioSet
from vgraph_lab.inspect.listening.abx import ABXTest
from vgraph_lab.inspect.listening.mushra import MushraTest
from vgraph_lab.views.ab_player import ABPlayer
from vgraph_lab.views.blind_test import BlindTest
rate, seconds, names = 24_000, SECONDS, [f"clip {n:02d}" for n in range(12)]
time = np.arange(rate * seconds) / rate
eager = {n: (0.3 * np.sin(2 * np.pi * (200 + 20 * i) * time) * np.sin(2 * np.pi * time) ** 2).astype("f4") for i, n in enumerate(names)}
graph = {n: w + np.float32(1e-4) for n, w in eager.items()}
streamed = {n: w * np.float32(0.5) for n, w in eager.items()}
original = {n: np.append(w, np.zeros(240, "f4")) for n, w in eager.items()}
audio = AudioSet.from_waveforms({"eager": eager, "graph": graph, "streamed": streamed, "original": original}, rate,
                                seams={n: [1920, 49920] for n in names}, details={names[0]: "“a sine”"})
""",
    "player": "player = ABPlayer(audio)\nplayer",
    "abx": "abx = BlindTest(audio, ABXTest(names, ('eager', 'streamed'), num_trials=5, seed=4))\nabx",
    "mushra": "mushra = BlindTest(audio, MushraTest(names[:2], ('eager', 'graph', 'streamed'), seed=4))\nmushra",
    "edges": """
edge = lambda w: ABPlayer(AudioSet.from_waveforms({"eager": {"x": w}, "graph": {"x": w}}, rate))
one, silent, long = edge(np.ones(1, "f4")), edge(np.zeros(rate, "f4")), edge(np.sin(np.arange(600 * rate) * 0.05).astype("f4"))
display(one, silent, long)
""",
}


LONG_S = 12.01  # with the 10 ms that one condition is longer; a busy machine must not hear the end of it


def open_cells(lab: Any, open_notebook: Any, name: str, cells: list[str]) -> Any:
    """A notebook of these cells, run."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source.strip()) for source in cells])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    (Path(lab.folder) / "notebooks" / name).write_text(nbformat.writes(notebook))
    opened = open_notebook(name)
    opened.run_all()
    return opened


@pytest.fixture(scope="module")
def opened(lab: Any, open_notebook: Any) -> Any:
    return open_cells(lab, open_notebook, "listen_live.ipynb", [cell.replace("SECONDS", "12") for cell in CELLS.values()])


def widget(opened: Any, cell: str, kind: str = ".vgl-player") -> Any:
    found = opened.output(cell).locator(kind).first
    found.wait_for()
    found.scroll_into_view_if_needed()
    return found


def note(name: str, value: Any) -> None:
    """Measured figures go beside the screenshots: nobody should assert wall time."""
    file = Path(__file__).parents[2] / "build" / "screenshots" / "measured.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    found = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**found, name: value}, indent=1))


def test_twelve_clips_in_four_conditions_are_ready(lab, open_notebook):
    opened = open_cells(lab, open_notebook, "listen_ready.ipynb", [CELLS["make"].replace("SECONDS", "5"), CELLS["player"]])
    widget(opened, "player = ABPlayer")
    opened.wait_for("player.loaded_ms > 0")
    ready, loaded = opened.value("[player.ready_ms, player.loaded_ms]")
    assert 0 < ready <= loaded
    note("ab_player, 12 clips of 5 s in 4 conditions, ms", {"ready": ready, "all loaded": loaded, "cores": os.cpu_count()})
    note(
        "ab_player, its static form, s",
        float(opened.python("import time; t = time.perf_counter(); player._repr_mimebundle_(); print(time.perf_counter() - t)")),
    )


def test_switching_while_playing_reaches_python(opened):
    player = widget(opened, "player = ABPlayer")
    player.get_by_role("button", name="Play (space)").click()
    opened.wait_for("player.is_playing and player.position_s > 0")
    for key in "2314":
        opened.page.keyboard.press(key)
        opened.page.wait_for_timeout(120)
    opened.wait_for("len(player.switches) == 4")
    assert opened.value("[s.after for s in player.switches]") == ["graph", "streamed", "eager", "original"]
    crossfades = opened.value("[s.crossfade_ms for s in player.switches]")
    assert all(0 < milliseconds <= LONGEST_CROSSFADE_MS for milliseconds in crossfades)
    note("crossfades by the Web Audio clock, ms", [round(value, 6) for value in crossfades])
    assert opened.value("player.condition") == "original"
    assert player.get_by_role("button", name="Hear original").get_attribute("aria-pressed") == "true"
    opened.page.keyboard.press("Space")
    opened.wait_for("not player.is_playing")
    heard = opened.value("[[h.condition, h.position_s, h.seconds] for h in player.played]")
    assert [condition for condition, *_ in heard] == ["eager", "graph", "streamed", "eager", "original"]
    for (_, begin, seconds), (_, following, _) in itertools.pairwise(heard):
        assert begin + seconds == pytest.approx(following, abs=1e-6)  # in step: nothing left out, nothing twice


def test_the_difference_states_its_level(opened):
    player = widget(opened, "player = ABPlayer")
    opened.page.keyboard.press("2")
    opened.page.keyboard.press("d")
    opened.wait_for("player.is_difference and player.condition == 'graph'")
    assert "difference: peak −80.0 dBFS, +70 dB amplified" in player.get_by_role("button", name="Hear graph").inner_text()
    assert "Shown and heard: graph − eager, peak −80.0 dBFS, +70 dB amplified" in player.inner_text()
    opened.page.keyboard.press("4")
    opened.wait_for("player.condition == 'original' and not player.is_difference")
    opened.page.keyboard.press("d")
    assert "240 samples longer than the reference" in player.get_by_role("status").inner_text()
    opened.page.keyboard.press("1")
    opened.page.keyboard.press("d")
    player.get_by_role("status").get_by_text("eager is the reference").wait_for()


def test_dragging_loops_a_region_and_keys_move_about(opened):
    player = widget(opened, "player = ABPlayer")
    picture = player.get_by_role("slider", name="Position")
    box = picture.bounding_box()
    opened.page.mouse.move(box["x"] + box["width"] * 0.2, box["y"] + 40)
    opened.page.mouse.down()
    opened.page.mouse.move(box["x"] + box["width"] * 0.4, box["y"] + 40, steps=3)
    opened.page.mouse.up()
    opened.wait_for("player.region_s is not None and player.is_looping")
    assert opened.value("player.region_s") == pytest.approx([0.2 * LONG_S, 0.4 * LONG_S], abs=0.02 * LONG_S / 5)
    opened.page.keyboard.press("Space")
    opened.wait_for("player.is_playing")
    opened.page.wait_for_timeout(1300)  # once around
    opened.page.keyboard.press("Space")
    opened.wait_for("not player.is_playing")
    assert opened.value("player.played[-1].seconds") > 1.0
    assert opened.value("player.region_s[0] <= player.position_s <= player.region_s[1]")
    opened.page.keyboard.press("Escape")
    opened.wait_for("player.region_s is None and not player.is_looping")
    opened.page.keyboard.press("Home")
    opened.page.keyboard.press("ArrowRight")
    opened.wait_for("abs(player.position_s - 0.5) < 1e-9")
    opened.page.keyboard.press("+")
    opened.page.keyboard.press("0")
    opened.page.keyboard.press("?")
    player.get_by_text("difference from the reference").wait_for()
    opened.page.keyboard.press("?")
    opened.page.keyboard.press("n")
    opened.wait_for("player.sample == 'clip 01'")
    assert opened.value("player.position_s") == 0


def test_shortcuts_of_jupyterlab_stay_out(opened):
    widget(opened, "player = ABPlayer").get_by_role("button", name="Hear graph").focus()
    cells = opened.page.locator(".jp-Cell").count()
    for key in "ddxab":
        opened.page.keyboard.press(key)
    assert opened.page.locator(".jp-Cell").count() == cells


def test_python_sets_what_is_heard(opened):
    player = widget(opened, "player = ABPlayer")
    opened.python("player.sample, player.condition, player.position_s, player.region_s = 'clip 05', 'graph', 2.0, (1.0, 3.0)")
    player.get_by_text("region 1.00 to 3.00 s").wait_for()
    assert player.get_by_role("combobox", name="Sample").input_value() == "clip 05"
    assert "2.00 s of" in player.inner_text()
    opened.python("player.play()")
    opened.wait_for("player.position_s > 2.0")
    opened.python("player.pause()")
    player.get_by_role("button", name="Play (space)").wait_for()
    opened.python("player.region_s, player.sample, player.condition, player.position_s = None, names[0], 'streamed', 1.25")
    player.get_by_text("1.25 s of").wait_for()
    opened.page.wait_for_timeout(400)  # the picture is drawn in slices
    opened.screenshots("ab_player_lab", player)


def test_running_the_cell_again_silences_the_old_player(opened):
    widget(opened, "player = ABPlayer").get_by_role("button", name="Play (space)").click()
    opened.wait_for("player.is_playing and player.audio_state == 'running'")
    opened.python("first = player")
    opened.run_all()
    opened.wait_for("player is not first")
    opened.wait_for("first.audio_state == 'idle' and not first.is_playing")


def test_an_abx_run_to_its_end_by_hand(opened):
    blind = widget(opened, "abx = BlindTest", ".vgl-blind")
    opened.wait_for("not abx.is_finished")
    for number, answer in enumerate("ABABA", start=1):
        blind.get_by_text(f"Trial {number} of 5").wait_for()
        choice = blind.get_by_role("button", name=f"X is {answer}")
        assert choice.is_disabled()  # nobody answers unheard
        for letter in "AXBX":
            blind.get_by_role("button", name=f"Listen to {letter}").click()
            opened.page.wait_for_timeout(60)
        if number == 2:
            opened.screenshots("blind_abx_lab", blind)
        assert all(secret not in blind.inner_html() for secret in ("eager", "streamed"))
        if number == 3:  # answered elsewhere meanwhile: the click is refused, and the next trial comes
            opened.python("abx.test.answer(3, 'A', 1.0)")
        choice.click()
        if number == 3:
            blind.get_by_text("trial 3 was answered already (A)").wait_for()
    blind.get_by_text("Every answer").click()
    opened.wait_for("abx.is_finished")
    assert opened.value("[a.choice for a in abx.test.answers]") == list("ABABA")
    assert opened.value("all(a.seconds > 0 for a in abx.test.answers)")
    correct, p_value = opened.value("[abx.result().correct, abx.result().p_value]")
    assert f"{correct} of 5 right, p = {p_value:.2g}" in blind.inner_text()
    assert blind.locator("tbody tr").count() == 5
    opened.screenshots("blind_abx_result_lab", blind)


def test_a_mushra_run_to_its_end_by_hand(opened):
    blind = widget(opened, "mushra = BlindTest", ".vgl-blind")
    for number in (1, 2):
        blind.get_by_text(f"Page {number} of 2").wait_for()
        for letter in ("Reference", "A", "B", "C"):
            blind.get_by_role("button", name=f"Listen to {letter}").click()
            opened.page.wait_for_timeout(60)
        for letter, score in zip("ABC", (100, 60, 20), strict=True):
            blind.get_by_role("slider", name=f"Score of {letter}").fill(str(score))
        if number == 1:
            opened.screenshots("blind_mushra_lab", blind)
        blind.get_by_role("button", name="Next page" if number == 1 else "Finish").click()
    opened.wait_for("mushra.is_finished")
    letters = opened.value("[[r.scores[p.stimuli[l]] for l in 'ABC'] for p, r in zip(mushra.test.pages, mushra.test.ratings)]")
    assert letters == [[100, 60, 20]] * 2


@pytest.mark.parametrize(("name", "place", "duration"), [("one", 0, "0.00"), ("silent", 1, "1.00"), ("long", 2, "10:00.00")])
def test_one_sample_silence_and_ten_minutes_behave(opened, name, place, duration):
    player = opened.output("edge = lambda").locator(".vgl-player").nth(place)
    player.scroll_into_view_if_needed()
    opened.wait_for(f"{name}.ready_ms > 0")
    assert f"of {duration} s" in player.inner_text()
    player.get_by_role("button", name="Play (space)").click()
    opened.wait_for(f"len({name}.played) > 0 or {name}.is_playing")
    if name != "one":
        opened.page.keyboard.press("2")
        opened.wait_for(f"len({name}.switches) == 1")
        opened.page.keyboard.press("Space")
    opened.wait_for(f"not {name}.is_playing")
    assert "difference: silent, identical" in player.inner_text()
    note(f"{name}: ready, ms", opened.value(f"{name}.ready_ms"))


def test_a_browser_that_waits_for_a_gesture_is_told_about(browser, chromium, tmp_path):
    (tmp_path / "page.html").write_text(
        """<script type="module">
        const source = document.getElementById("source").textContent;
        const { AudioEngine } = await import(URL.createObjectURL(new Blob([source], { type: "text/javascript" })));
        let isBlocked = false;
        const engine = new AudioEngine({ sampleRate: 24000, onBlocked: () => (isBlocked = true) });
        engine.load({ name: "x", tracks: [new Float32Array(2400)] });
        await engine.play();
        console.log("outcome", isBlocked, engine.isPlaying, engine.context.state);
        </script><script type="text/plain" id="source">"""
        + str(ABPlayer._esm)
        + "</script>"
    )
    strict = browser.browser_type.launch(executable_path=chromium, args=["--no-sandbox", "--disable-dev-shm-usage"])
    try:
        page = strict.new_page()
        with page.expect_console_message(lambda message: message.text.startswith("outcome")) as said:  # page.evaluate() would be a gesture
            page.goto((tmp_path / "page.html").as_uri())
        assert said.value.text == "outcome true false suspended"
    finally:
        strict.close()
