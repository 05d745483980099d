"""Audio sets. Truth: the arrays that were put in, and files that soundfile wrote."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from vgraph_lab.errors import InputError
from vgraph_lab.inspect.listening.audio_set import AudioSet

RATE = 24_000
PAIR = {"eager": {"one": np.array([0.5, -0.25], np.float32)}, "graph": {"one": np.array([0.5, -0.125, 0.75], np.float32)}}


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return AudioSet.from_waveforms(PAIR, RATE).save(tmp_path / "ab")


# -------------------------------------------------------------------------------------------------------------- waveforms


def test_names_keep_their_order_and_the_first_condition_is_the_reference() -> None:
    audio = AudioSet.from_waveforms({"z": {"b": np.ones(1), "a": np.ones(1)}, "a": {"a": np.ones(1), "b": np.ones(1)}}, RATE)
    assert (audio.conditions, audio.samples, audio.sample_rate) == (("z", "a"), ("b", "a"), RATE)


@pytest.mark.parametrize("shape", [(5,), (1, 5), (1, 1, 5)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_any_floats_of_one_channel_are_taken(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    given = torch.tensor([0.5, -1.5, 0.0, 3.0, -0.125]).to(dtype).reshape(shape)
    wav = AudioSet.from_waveforms({"a": {"s": given}}, RATE).waveform("a", "s")
    assert wav.dtype == np.float32
    np.testing.assert_array_equal(wav, [0.5, -1.5, 0.0, 3.0, -0.125])  # beyond full scale, and still there


def test_waveforms_are_copies_that_nobody_can_change() -> None:
    given = np.zeros(4, np.float32)
    audio = AudioSet.from_waveforms({"a": {"s": given}}, RATE)
    given[:] = 1
    wav = audio.waveform("a", "s")
    assert not wav.any()
    with pytest.raises(ValueError, match="read-only"):
        wav[0] = 1
    with pytest.raises(AttributeError):
        audio.sample_rate = 8_000  # type: ignore[misc]


def test_strides_and_foreign_byte_orders_are_taken() -> None:
    given = np.array([1, 2, 3, 4], ">f4")[::-2] / 4
    np.testing.assert_array_equal(AudioSet.from_waveforms({"a": {"s": given}}, RATE).waveform("a", "s"), [1.0, 0.5])


def test_seams_details_and_durations() -> None:
    audio = AudioSet.from_waveforms(PAIR, 2, seams={"one": np.array([1, 2])}, details={"one": "hello"})
    assert (audio.seams("one"), audio.detail("one"), audio.duration_s("one")) == ((1, 2), "hello", 1.5)
    bare = AudioSet.from_waveforms(PAIR, RATE)
    assert (bare.seams("one"), bare.detail("one")) == ((), "")
    assert repr(bare) == "AudioSet(eager | graph: 1 samples, 0.0 s at 24000 Hz)"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (np.array([0.0, np.nan, np.inf]), r"a/s contains NaN or infinity: 2 of 3 samples, the first at 1"),
        (np.zeros((2, 9)), r"\[2, 9\].*Mix 2 channels down first: wav\.mean\(-2\)"),
        (np.zeros((9, 2)), r"Mix 2 channels down first: wav\.mean\(-1\)"),
        (np.zeros((9, 1)), r"\[9, 1\].*It is transposed: wav\.squeeze\(-1\)"),
        (np.zeros((1, 9, 1)), r"It is transposed: wav\.squeeze\(-1\)"),
        (np.zeros((1, 2, 9)), r"Mix 2 channels down first: wav\.mean\(-2\)"),
        (np.zeros((3, 1, 9)), "Give each row of a batch a name"),
        (np.zeros(0), "has no samples"),
        (np.float32(1), "has no samples"),
        (np.zeros(3, np.int16), "int16; a waveform is floating point.*32768"),
        (torch.zeros(3, dtype=torch.int32), "torch.int32; a waveform is floating point"),
        (["a"], "a waveform is floating point"),
        ([[0.5], [0.5, 0.5]], r"a/s has no values in a row \(.*inhomogeneous.*Give a dense array or tensor"),
        (torch.zeros(3).to_sparse(), r"no values in a row \(.*[Ss]parse"),
        (torch.zeros(3, device="meta"), r"no values in a row \(.*meta tensor"),
        (np.full(3, 12_000.0), "reaches 12000; full scale is ±1"),
    ],
)
def test_waveforms_that_cannot_be_heard_fail(given: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        AudioSet.from_waveforms({"a": {"s": given}}, RATE)


def test_the_advice_for_stereo_helps() -> None:
    for stereo in (np.random.default_rng(0).random((2, 9)), np.random.default_rng(0).random((9, 2))):
        with pytest.raises(InputError) as found:
            AudioSet.from_waveforms({"a": {"s": stereo}}, RATE)
        axis = int(str(found.value).split("wav.mean(")[1].split(")")[0])
        assert len(AudioSet.from_waveforms({"a": {"s": stereo.mean(axis)}}, RATE).waveform("a", "s")) == 9


@pytest.mark.parametrize(
    ("waveforms", "options", "message"),
    [
        ({}, {}, "there is no condition"),
        ({"a": {}}, {}, "there is no sample"),
        ({"a": {"s": np.ones(1)}, "b": {}}, {}, "missing: 'b/s'"),
        ({"a": {"": np.ones(1)}}, {}, "names that can be read"),
        ({3: {"s": np.ones(1)}}, {}, "names that can be read, got 3"),
        ({"\ud800": {"s": np.ones(1)}}, {}, r"names that can be read, got '\\ud800'"),
        ({"a": {"x\udfff": np.ones(1)}}, {}, "names that can be read"),
        ({"a": 1}, {}, r"waveforms are {'a': 1}; two mappings are needed"),
        ([np.ones(1)], {}, "two mappings are needed"),
        (PAIR, {"sample_rate": 2**31}, "sample_rate is 2147483648; a whole number of Hz from 1 to 2147483647"),
        (PAIR, {"seams": {"one": [[1], [1, 2]]}}, "whole positions"),
        (PAIR, {"details": {"one": "\ud800"}}, r"detail of 'one' is '\\ud800'; it is a line of text"),
        (PAIR, {"sample_rate": 0}, "sample_rate is 0"),
        (PAIR, {"sample_rate": 24e3}, "sample_rate is 24000.0"),
        (PAIR, {"sample_rate": True}, "sample_rate is True"),
        (PAIR, {"seams": {"two": [1]}}, "no sample 'two'"),
        (PAIR, {"seams": {"one": [0, 1]}}, "run from 0 to 1.*between 1 and 2"),
        (PAIR, {"seams": {"one": [3]}}, "between 1 and 2"),
        (PAIR, {"seams": {"one": [2, 1]}}, "ascending"),
        (PAIR, {"seams": {"one": [1, 1]}}, "ascending"),
        (PAIR, {"seams": {"one": [1.5]}}, "whole positions"),
        (PAIR, {"seams": {"one": [True]}}, "whole positions"),
        (PAIR, {"details": {"two": "x"}}, "no sample 'two'"),
        (PAIR, {"details": {"one": 3}}, "it is a line of text"),
    ],
)
def test_sets_that_do_not_fit_fail(waveforms: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        AudioSet.from_waveforms(waveforms, **{"sample_rate": RATE} | options)


def test_an_unknown_name_is_met_with_the_nearest_one() -> None:
    audio = AudioSet.from_waveforms(PAIR, RATE)
    with pytest.raises(InputError, match=r"no condition 'grap'; there are 'eager', 'graph'. Did you mean 'graph'\?"):
        audio.waveform("grap", "one")
    for ask in (audio.seams, audio.detail, audio.duration_s, lambda name: audio.waveform("eager", name)):
        with pytest.raises(InputError, match="no sample 'tow'"):
            ask("tow")


# ----------------------------------------------------------------------------------------------------------------- folders

WAVEFORMS = hnp.arrays(np.float32, st.integers(1, 40), elements=st.floats(-4, 4, width=32))
NAMES = st.lists(st.text("abcé _-1", min_size=1, max_size=6).map(str.strip).filter(bool), min_size=1, max_size=3, unique_by=str.casefold)


@settings(max_examples=40)
@given(st.data(), NAMES, NAMES, st.sampled_from([8_000, 24_000, 44_100]))
def test_floats_come_back_bit_for_bit(data: st.DataObject, conditions: list[str], samples: list[str], rate: int) -> None:
    waveforms = {c: {s: data.draw(WAVEFORMS) for s in samples} for c in conditions}
    lengths = {s: max(len(group[s]) for group in waveforms.values()) for s in samples}
    seams = {s: data.draw(st.lists(st.integers(1, n - 1), unique=True).map(sorted)) for s, n in lengths.items() if n > 1}
    audio = AudioSet.from_waveforms(waveforms, rate, seams=seams, details={samples[0]: data.draw(st.text('aä\n"', max_size=9))})
    with tempfile.TemporaryDirectory() as folder:
        again = AudioSet.load(audio.save(folder))
    assert (again.conditions, again.samples, again.sample_rate) == (audio.conditions, audio.samples, rate)
    for sample in samples:
        assert (again.seams(sample), again.detail(sample)) == (audio.seams(sample), audio.detail(sample))
        for condition in conditions:
            assert again.waveform(condition, sample).tobytes() == audio.waveform(condition, sample).tobytes()


@settings(max_examples=40)
@given(hnp.arrays(np.float32, st.integers(1, 40), elements=st.floats(-1, 1 - 2**-23, width=32)))
def test_24_bits_are_off_by_half_a_step_at_most(wav: np.ndarray[Any, np.dtype[np.float32]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        again = AudioSet.load(AudioSet.from_waveforms({"a": {"s": wav}}, RATE).save(folder, subtype="PCM_24"))
        assert soundfile.info(Path(folder) / "a" / "s.wav").subtype == "PCM_24"
    assert np.abs(again.waveform("a", "s").astype(np.float64) - wav).max() <= 2**-24


@pytest.mark.parametrize(("value", "fits"), [(-1.0, True), (1 - 2**-23, True), (1.0, False), (-1.0001, False)])
def test_24_bits_clip_nothing(tmp_path: Path, value: float, fits: bool) -> None:
    audio = AudioSet.from_waveforms({"a": {"s": np.array([value])}}, RATE)
    if fits:
        assert AudioSet.load(audio.save(tmp_path / "ab", subtype="PCM_24")).waveform("a", "s")[0] == np.float32(value)
    else:
        with pytest.raises(InputError, match=r"would clip it\. Save as 'FLOAT'"):
            audio.save(tmp_path / "ab", subtype="PCM_24")
        assert not (tmp_path / "ab").exists()


@pytest.mark.parametrize("wav", [np.zeros(4_800), np.zeros(1), np.full(600 * RATE, 0.25, np.float32)], ids=["silence", "one", "10 minutes"])
def test_silence_one_sample_and_ten_minutes_are_kept(tmp_path: Path, wav: Any) -> None:
    again = AudioSet.load(AudioSet.from_waveforms({"a": {"s": wav}}, RATE).save(tmp_path)).waveform("a", "s")
    np.testing.assert_array_equal(again, wav)


def test_nothing_is_written_over_unless_asked(saved: Path) -> None:
    before = files(saved)
    assert set(before) == {"eager/one.wav", "graph/one.wav", "audio_set.json"}
    other = AudioSet.from_waveforms({"eager": {"one": np.ones(3)}}, RATE)
    with pytest.raises(InputError, match=r"holds 'eager/one\.wav', 'audio_set\.json' already"):
        other.save(saved)
    with pytest.raises(InputError, match=r"holds 'graph/one\.wav', which would be read as part of this set"):
        other.save(saved, overwrite=True)
    assert files(saved) == before
    AudioSet.from_waveforms({c: {"one": np.ones(3)} for c in PAIR}, RATE).save(saved, overwrite=True)
    np.testing.assert_array_equal(AudioSet.load(saved).waveform("graph", "one"), np.ones(3))
    assert set(files(saved)) == set(before)


def test_recordings_of_others_are_not_mixed_in(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    soundfile.write(tmp_path / "theirs" / "x.wav", np.zeros(3), RATE)
    with pytest.raises(InputError, match="would be read as part of this set"):
        AudioSet.from_waveforms(PAIR, RATE).save(tmp_path)
    assert set(files(tmp_path)) == {"theirs/x.wav"}


@pytest.mark.parametrize("name", ["a/b", "..", ".hidden", "a:b", "end.", "end ", "a\nb", "x" * 201])
def test_names_that_are_no_file_names_fail(tmp_path: Path, name: str) -> None:
    for waveforms in ({name: {"s": np.ones(1)}}, {"a": {name: np.ones(1)}}):
        with pytest.raises(InputError, match="cannot be the name of a file"):
            AudioSet.from_waveforms(waveforms, RATE).save(tmp_path / "ab")
    assert not (tmp_path / "ab").exists()


def test_names_that_differ_in_case_only_fail(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="upper and lower case only"):
        AudioSet.from_waveforms({"a": {"s": np.ones(1), "S": np.ones(1)}}, RATE).save(tmp_path)


def test_names_that_differ_in_how_accents_are_encoded_only_fail(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="in how accents are encoded"):
        AudioSet.from_waveforms({"a": {"\u00e9": np.ones(1), "e\u0301": np.ones(1)}}, RATE).save(tmp_path / "ab")
    assert not (tmp_path / "ab").exists()


@pytest.mark.parametrize("name", ["audio_set.json", "Audio_Set.JSON"])
def test_a_condition_with_the_name_of_the_json_fails(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match=r"a condition cannot be called 'audio_set\.json'"):
        AudioSet.from_waveforms({name: {"s": np.ones(1)}}, RATE).save(tmp_path / "ab")
    assert not (tmp_path / "ab").exists()
    AudioSet.from_waveforms({"a": {name: np.ones(1)}}, RATE).save(tmp_path / "ab")  # a sample may be called so


@pytest.mark.parametrize("overwrite", [False, True])
def test_nothing_is_written_through_a_link(tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "ab").mkdir()
    (tmp_path / "ab" / "graph").symlink_to(tmp_path / "theirs")
    with pytest.raises(InputError, match=r"graph is a link to .*theirs, and nothing is written through it"):
        AudioSet.from_waveforms(PAIR, RATE).save(tmp_path / "ab", overwrite=overwrite)
    assert files(tmp_path) == {}


def test_unknown_subtypes_and_places_that_are_no_folders_fail(tmp_path: Path) -> None:
    audio = AudioSet.from_waveforms(PAIR, RATE)
    with pytest.raises(InputError, match="subtype is 'PCM_16'; accepted are 'FLOAT' and 'PCM_24'"):
        audio.save(tmp_path, subtype="PCM_16")  # type: ignore[arg-type]
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match=r"is a file\. Name a folder"):
        audio.save(tmp_path / "file")
    with pytest.raises(InputError, match="cannot be written"):
        audio.save(tmp_path / "file" / "below")


def test_a_failed_save_leaves_what_was_there(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, write = files(saved), soundfile.write

    def full(path: Path, *args: Any, **options: Any) -> None:
        if "graph" in str(path):
            raise OSError("no space left")
        write(path, *args, **options)

    monkeypatch.setattr(soundfile, "write", full)
    with pytest.raises(InputError, match="no space left"):
        AudioSet.from_waveforms({c: {"one": np.ones(3)} for c in PAIR}, RATE).save(saved, overwrite=True)
    assert files(saved) == before


def test_the_json_is_optional_and_a_reference_can_be_chosen(saved: Path) -> None:
    (saved / "audio_set.json").unlink()
    (saved / "eager").rename(saved / "plain")
    (saved / "graph" / "notes.txt").write_text("not audio, and not read")
    assert AudioSet.load(saved).conditions == ("graph", "plain")
    assert AudioSet.load(saved, reference="plain").conditions == ("plain", "graph")
    with pytest.raises(InputError, match="no condition 'eager'"):
        AudioSet.load(saved, reference="eager")


def test_recordings_may_be_added_by_hand(saved: Path) -> None:
    (saved / "another").mkdir()
    soundfile.write(saved / "another" / "one.wav", np.array([0.5]), RATE, subtype="PCM_16")
    audio = AudioSet.load(saved)
    assert audio.conditions == ("eager", "graph", "another")
    np.testing.assert_array_equal(audio.waveform("another", "one"), [0.5])


def test_two_files_of_one_sample_fail(saved: Path) -> None:
    (saved / "graph" / "one.WAV").write_bytes((saved / "graph" / "one.wav").read_bytes())
    with pytest.raises(InputError, match=r"graph holds both 'one\.WAV' and 'one\.wav', which would be one sample"):
        AudioSet.load(saved)


def _break(saved: Path, how: str) -> None:
    path = saved / "graph" / "one.wav"
    if how == "missing":
        path.unlink()
        (saved / "graph" / "two.wav").write_bytes((saved / "eager" / "one.wav").read_bytes())
    elif how == "gone":
        path.unlink()
    elif how == "text":
        path.write_text("this is no audio")
    elif how == "empty file":
        path.write_bytes(b"")
    elif how == "no samples":
        soundfile.write(path, np.zeros(0), RATE)
    elif how == "stereo":
        soundfile.write(path, np.zeros((3, 2)), RATE)
    elif how == "rate":
        soundfile.write(path, np.zeros(3), 16_000)
    elif how == "nan":
        soundfile.write(path, np.array([0, np.nan]), RATE, subtype="FLOAT")
    elif how == "folder":
        path.unlink()
        path.mkdir()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("missing", r"missing: 'eager/two\.wav', 'graph/one\.wav'"),
        ("gone", r"missing: 'graph/one\.wav'.*in audio_set\.json, too"),
        ("text", r"one\.wav cannot be read as audio"),
        ("empty file", r"one\.wav cannot be read as audio"),
        ("folder", r"one\.wav cannot be read as audio"),
        ("no samples", r"one\.wav has no samples"),
        ("stereo", r"one\.wav has 2 channels; one is needed. Mix it down: read_audio\(path, sample_rate=24000\)"),
        ("rate", r"different sample rates: .*eager.one\.wav is at 24000 Hz; .*graph.one\.wav is at 16000 Hz"),
        ("nan", r"graph/one contains NaN or infinity: 1 of 2"),
    ],
)
def test_folders_that_cannot_be_heard_fail(saved: Path, how: str, message: str) -> None:
    _break(saved, how)
    with pytest.raises(InputError, match=message):
        AudioSet.load(saved)


def test_places_without_recordings_fail(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty" / "condition").mkdir(parents=True)
    for name, message in (("none", "does not exist"), ("file", "is a file"), ("empty", "holds no recordings")):
        with pytest.raises(InputError, match=message):
            AudioSet.load(tmp_path / name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2, "written_by": "vgraph-lab 9"}, r"version 2, written by vgraph-lab 9.*reads versions up to 1. Update"),
        ({"version": 0}, "is no audio set"),
        ({"format": "something"}, "is no audio set of vgraph_lab: it states the format 'something'"),
        ({"content": {}}, "is damaged: conditions"),
        ({"content": None}, "is damaged"),
    ],
)
def test_a_json_of_another_kind_fails(saved: Path, change: dict[str, Any], message: str) -> None:
    path = saved / "audio_set.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(InputError, match=message):
        AudioSet.load(saved)


@pytest.mark.parametrize("text", ["", "{", "[]", "\xff"])
def test_a_damaged_json_fails(saved: Path, text: str) -> None:
    (saved / "audio_set.json").write_text(text, encoding="latin-1")
    with pytest.raises(InputError, match=r"audio_set\.json is no"):
        AudioSet.load(saved)
