"""The codes format, and the reader for foreign dumps. Truth: arrays that the test itself made."""

from __future__ import annotations

import io
import json
import pickle
import stat
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors import safe_open
from safetensors.torch import save_file

from vgraph_lab.errors import CodesError
from vgraph_lab.qwen3_tts.codes import CODES_FORMAT, CODES_VERSION, read_codes, write_codes

Q = 16


def codes_array(frames: int, *, size: int = 2048, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, size, (Q, frames))


def dump(path: Path, kind: str, array: np.ndarray[Any, Any]) -> Path:
    """One array under the name 'a' in a foreign file of the given kind."""
    file = path / f"dump.{kind}"
    if kind == "npz":
        np.savez(file, a=array)
    elif kind == "npy":
        np.save(file, array)
    elif kind == "json":
        file.write_text(json.dumps({"a": array.tolist()}))
    else:
        save_file({"a": torch.from_numpy(np.ascontiguousarray(array))}, file)
    return file


# ------------------------------------------------------------------------------------------------------- our own format


@given(
    arrays=st.dictionaries(
        st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=12).filter(lambda name: name != "__metadata__"),
        st.integers(1, 40).flatmap(lambda frames: hnp.arrays(np.int64, (Q, frames), elements=st.integers(0, 511))),
        min_size=1,
        max_size=4,
    )
)
def test_written_codes_are_read_back(tmp_path_factory: pytest.TempPathFactory, arrays: dict[str, np.ndarray[Any, Any]]) -> None:
    path = tmp_path_factory.mktemp("codes") / "codes.safetensors"
    write_codes(path, arrays, codebook_size=512)
    read = read_codes(path)
    assert set(read) == set(arrays)
    assert (read.num_quantizers, read.codebook_size, read.frame_rate_hz) == (Q, 512, 12.5)
    for name, array in arrays.items():
        assert read[name].dtype == torch.int64
        np.testing.assert_array_equal(read[name].numpy(), array)


@pytest.mark.parametrize(("codebook_size", "dtype"), [(512, "I16"), (32_768, "I16"), (32_769, "I32"), (1_000_000, "I32")])
def test_the_file_is_as_documented(tmp_path: Path, codebook_size: int, dtype: str) -> None:
    top = codes_array(5, size=codebook_size)
    top[0, 0] = codebook_size - 1
    path = write_codes(tmp_path / "c.safetensors", {"x": torch.from_numpy(top)}, codebook_size=codebook_size, frame_rate_hz=25)
    with safe_open(path, framework="pt") as file:
        assert file.get_slice("x").get_dtype() == dtype
        assert file.metadata() == {
            "format": CODES_FORMAT,
            "version": str(CODES_VERSION),
            "frame_rate_hz": "25.0",
            "num_quantizers": "16",
            "codebook_size": str(codebook_size),
        }
    np.testing.assert_array_equal(read_codes(path)["x"].numpy(), top)


def test_a_written_file_has_the_users_permissions_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    reference = tmp_path / "reference"
    reference.write_bytes(b"")
    path = write_codes(tmp_path / "c.safetensors", {"x": codes_array(3)}, codebook_size=2048)
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(reference.stat().st_mode)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c.safetensors", "reference"]


@pytest.mark.parametrize(
    ("utterances", "codebook_size", "message"),
    [
        ({}, 512, "no utterance"),
        ({"x": codes_array(3)}, 0, "between 1 and"),
        ({"x": np.full((Q, 3), 512)}, 512, "from 512 to 512; a codebook of 512 has 0 … 511"),
        ({"x": np.full((Q, 3), -1)}, 512, "start at 0"),
        ({"x": np.zeros((Q, 0), int)}, 512, "neither of them 0"),
        ({"x": np.zeros((1, Q, 3), int)}, 512, r"\[num_quantizers, frames\]"),
        ({"x": np.zeros((Q, 3), int), "y": np.zeros((3, Q), int)}, 512, "differ in the number of codebooks"),
        ({"x": np.full((Q, 3), 0.5)}, 512, "not codes"),
        ({"__metadata__": codes_array(3)}, 2048, "cannot be an utterance id"),
        ({"caf\ud800": codes_array(3)}, 2048, "no UTF-8 form .surrogates not allowed at 3"),
        ({7: codes_array(3)}, 2048, "utterance id 7 is int"),
        ({"x": torch.zeros(Q, 3, dtype=torch.bfloat16)}, 2048, "too coarse for codes"),
        ({"x": torch.zeros(Q, 3, dtype=torch.int64).to_sparse()}, 2048, r"torch\.sparse_coo tensor; codes are dense"),
        ({"x": torch.zeros(Q, 3, dtype=torch.int64, device="meta")}, 2048, "a meta tensor"),
    ],
)
def test_writing_what_is_not_codes_fails_and_keeps_the_old_file(
    tmp_path: Path, utterances: dict[str, np.ndarray[Any, Any] | torch.Tensor], codebook_size: int, message: str
) -> None:
    path = tmp_path / "c.safetensors"
    path.write_bytes(b"precious")
    with pytest.raises(CodesError, match=message):
        write_codes(path, utterances, codebook_size=codebook_size)
    assert path.read_bytes() == b"precious"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("frame_rate_hz", [float("nan"), float("inf"), -1.0, 0])
def test_a_frame_rate_that_is_none_is_not_written(tmp_path: Path, frame_rate_hz: float) -> None:
    with pytest.raises(CodesError, match=f"frame_rate_hz is {frame_rate_hz}; a frame rate is a finite number above 0"):
        write_codes(tmp_path / "c.safetensors", {"x": codes_array(3)}, codebook_size=2048, frame_rate_hz=frame_rate_hz)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": str(CODES_VERSION + 1)}, "upgrade vgraph-lab"),
        ({"version": "0"}, "versions begin at 1"),
        ({"version": "new"}, "not a number"),
        ({"version": None}, "does not state version"),
        ({"codebook_size": None}, "does not state codebook_size"),
        ({"frame_rate_hz": "fast"}, "not a number"),
        ({"frame_rate_hz": "nan"}, "frame_rate_hz is nan; a frame rate is"),
        ({"frame_rate_hz": "-1"}, "frame_rate_hz is -1.0; a frame rate is"),
        ({"frame_rate_hz": "0"}, "frame_rate_hz is 0.0; a frame rate is"),
        ({"codebook_size": "-5"}, "codebook_size is -5; a codebook has between 1"),
        ({"num_quantizers": "8"}, "pass num_quantizers=8"),
        ({"codebook_size": "4"}, "a codebook of 4 has 0 … 3"),
    ],
)
def test_metadata_that_do_not_hold_fail(tmp_path: Path, change: dict[str, str | None], message: str) -> None:
    metadata = {"format": CODES_FORMAT, "version": "1", "frame_rate_hz": "12.5", "num_quantizers": "16", "codebook_size": "2048"}
    merged = {key: value for key, value in {**metadata, **change}.items() if value is not None}
    path = tmp_path / "c.safetensors"
    save_file({"x": torch.from_numpy(codes_array(9)).short()}, path, merged)
    with pytest.raises(CodesError, match=message):
        read_codes(path)


@pytest.mark.parametrize("tensor", [torch.zeros(Q, 3), torch.zeros(3, Q, dtype=torch.int16), torch.zeros(Q, 0, dtype=torch.int16)])
def test_a_file_of_ours_with_other_tensors_fails(tmp_path: Path, tensor: torch.Tensor) -> None:
    path = tmp_path / "c.safetensors"
    metadata = {"format": CODES_FORMAT, "version": "1", "frame_rate_hz": "12.5", "num_quantizers": "16", "codebook_size": "8"}
    save_file({"x": tensor}, path, metadata)
    with pytest.raises(CodesError, match="int16 or int32"):
        read_codes(path)


def test_layout_cannot_contradict_the_format(tmp_path: Path) -> None:
    path = write_codes(tmp_path / "c.safetensors", {"x": codes_array(16)}, codebook_size=2048)
    assert read_codes(path, layout="qf")["x"].shape == (Q, 16)
    with pytest.raises(CodesError, match="leave layout out"):
        read_codes(path, layout="fq")


def test_an_unknown_utterance_names_the_nearest(tmp_path: Path) -> None:
    codes = read_codes(write_codes(tmp_path / "c.safetensors", {"hello_1": codes_array(3)}, codebook_size=2048))
    assert "1 utterances, 3 frames, 16 codebooks of 2048" in repr(codes)
    with pytest.raises(KeyError, match="hello_1"):
        codes["helo_1"]


def test_an_unknown_utterance_with_no_neighbour_lists_the_first_ones(tmp_path: Path) -> None:
    one = read_codes(write_codes(tmp_path / "c.safetensors", {"speech": codes_array(3)}, codebook_size=2048))
    with pytest.raises(KeyError) as error:
        one["42"]
    assert error.value.args == ("c.safetensors has no utterance '42' among its 1. It has speech.",)
    many = read_codes(write_codes(tmp_path / "d.safetensors", {f"take_{n}": codes_array(3) for n in range(6)}, codebook_size=2048))
    with pytest.raises(KeyError, match=r"It has take_0, take_1, take_2, take_3 and 2 more\."):
        many["???"]


# -------------------------------------------------------------------------------------------------------- foreign dumps


@pytest.mark.parametrize("kind", ["npz", "npy", "json", "safetensors"])
@pytest.mark.parametrize("frames", [1, 7, 40])
@pytest.mark.parametrize("form", ["qf", "fq", "1qf", "1fq", "float"])
def test_foreign_dumps_are_read_in_either_orientation(tmp_path: Path, kind: str, frames: int, form: str) -> None:
    truth = codes_array(frames, seed=frames)
    array = {"qf": truth, "fq": truth.T, "1qf": truth[None], "1fq": truth.T[None], "float": truth.astype(np.float32)}[form]
    read = read_codes(dump(tmp_path, kind, array))
    (name,) = read
    assert name == ("dump" if kind == "npy" else "a")
    assert read[name].dtype == torch.int64
    assert read.codebook_size is None
    np.testing.assert_array_equal(read[name].numpy(), truth)


@pytest.mark.parametrize("kind", ["npz", "npy", "json", "safetensors"])
def test_a_square_dump_is_ambiguous_until_told(tmp_path: Path, kind: str) -> None:
    truth = codes_array(Q)
    path = dump(tmp_path, kind, truth)
    with pytest.raises(CodesError, match="reads both ways: pass layout='qf'"):
        read_codes(path)
    (qf,), (fq,) = read_codes(path, layout="qf").values(), read_codes(path, layout="fq").values()
    np.testing.assert_array_equal(qf.numpy(), truth)
    np.testing.assert_array_equal(fq.numpy(), truth.T)


def test_json_may_be_a_bare_list(tmp_path: Path) -> None:
    path = tmp_path / "take_3.json"
    path.write_text("\ufeff" + json.dumps(codes_array(5).tolist()), encoding="utf-8")
    np.testing.assert_array_equal(read_codes(path)["take_3"].numpy(), codes_array(5))


def test_another_number_of_codebooks_can_be_asked_for(tmp_path: Path) -> None:
    path = dump(tmp_path, "npz", codes_array(20)[:8])
    assert read_codes(path, num_quantizers=8)["a"].shape == (8, 20)
    with pytest.raises(CodesError, match=r"shape \[8, 20\]; expected \[16, frames\] or \[frames, 16\]"):
        read_codes(path)


@pytest.mark.parametrize("kind", ["npz", "npy", "safetensors", "json"])
@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.full((Q, 3), -1), "contains -1; codes start at 0"),
        (np.full((Q, 3), 1.5), "fractions such as 1.5"),
        (np.full((Q, 3), np.nan), "NaN or infinity"),
        (np.full((Q, 3), 2**31), "no codebook has that many entries"),
        (np.ones((Q, 3), bool), "no code|dtype bool"),
        (np.zeros((Q, 0), int), "no frame at all"),
        (np.zeros(Q * 3, int), r"shape \[48\]; expected \[16, frames\]"),
        (np.zeros((2, Q, 3), int), "split the batch"),
        (np.zeros((Q + 1, 3), int), r"shape \[17, 3\]"),
    ],
)
def test_arrays_that_are_not_codes_fail(tmp_path: Path, kind: str, array: np.ndarray[Any, Any], message: str) -> None:
    with pytest.raises(CodesError, match=message):
        read_codes(dump(tmp_path, kind, array))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_half_precision_dumps_fail(tmp_path: Path, dtype: torch.dtype) -> None:
    # 2047 is not a bfloat16: the dump has lost the code already, so guessing would be silent damage.
    save_file({"a": torch.full((Q, 3), 2047.0).to(dtype)}, tmp_path / "a.safetensors")
    with pytest.raises(CodesError, match="too coarse for codes"):
        read_codes(tmp_path / "a.safetensors")
    np.savez(tmp_path / "a.npz", a=np.zeros((Q, 3), np.float16))
    with pytest.raises(CodesError, match="float16"):
        read_codes(tmp_path / "a.npz")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": [[1, 2], [3]]}', "rows differ in length"),
        ('{"a": [[1, true]]}', "contains True"),
        ('{"a": [[1, null]]}', "contains None"),
        ('{"a": [[1, "2"]]}', "contains '2'"),
        ('{"a": 3}', "is int; expected a nested list"),
        ('{"a": [[1]], "a": [[2]]}', "twice"),
        ('{"a": [[1, 2]', "not valid JSON"),
        ("[", "not valid JSON"),
        ("{}", "holds no array"),
        ("[]", "expected"),
        ("[" * 500 + "1" + "]" * 500, "expected|deeply|rectangular"),
        ("[" * 100_000, "nested too deeply"),
        (f"[[{2**65}]]", "dtype object|rectangular"),
        (f"[[{2**70}]]", "an integer of 22 digits; no codebook"),
        ("[[-" + "9" * 5000 + "]]", "an integer of 5000 digits; no codebook"),
    ],
)
def test_json_that_is_not_codes_fails(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(CodesError, match=message):
        read_codes(path)


# ------------------------------------------------------------------------------------------------------ refused and broken


class Bomb:
    """Unpickling an instance would create the file ``exploded``."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.target,))


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".pkl", ".json", ".npz", ".safetensors", ""])
@pytest.mark.parametrize("writer", ["pickle", "pickle protocol 0", "torch", "torch legacy", "npy objects", "npz objects"])
def test_pickles_are_refused_whatever_their_suffix(tmp_path: Path, writer: str, suffix: str) -> None:
    bomb = Bomb(tmp_path / "exploded")
    path = tmp_path / f"codes{suffix}"
    with path.open("wb") as file:
        if writer.startswith("pickle"):
            pickle.dump(bomb, file, protocol=0 if writer.endswith("0") else 4)
        elif writer.startswith("torch"):
            torch.save(bomb, file, _use_new_zipfile_serialization=not writer.endswith("legacy"))
        elif writer.startswith("npy"):
            np.save(file, np.array([bomb], dtype=object), allow_pickle=True)
        else:
            np.savez(file, a=np.array([bomb], dtype=object))  # NumPy pickles it without asking
    # A protocol-0 pickle has no signature: outside the pickle suffixes it is simply no file of codes.
    with pytest.raises(
        CodesError, match="no file of codes" if writer.endswith("0") and suffix not in {".pt", ".pth", ".pkl"} else "is refused"
    ):
        read_codes(path)
    assert not bomb.target.exists()


def test_the_content_decides_not_the_suffix(tmp_path: Path) -> None:
    path = write_codes(tmp_path / "codes.pt", {"x": codes_array(4)}, codebook_size=2048)
    np.testing.assert_array_equal(read_codes(path)["x"].numpy(), codes_array(4))


@pytest.mark.parametrize("kind", ["npz", "npy", "json", "safetensors", "ours"])
@given(data=st.data())
def test_a_truncated_file_fails_wherever_it_was_cut(tmp_path_factory: pytest.TempPathFactory, kind: str, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("cut")
    if kind == "ours":
        path = write_codes(folder / "c.safetensors", {"x": codes_array(30)}, codebook_size=2048)
    else:
        path = dump(folder, kind, codes_array(30))
    whole = path.read_bytes()
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(CodesError):
        read_codes(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"RIFF\x00\x00\x00\x00WAVE", "no file of codes"),
        (b"PK\x03\x04rubbish", "not a whole .npz"),
        (b"\x93NUMPY\x01", "cannot be read"),
    ],
)
def test_other_files_fail(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(CodesError, match=message):
        read_codes(path)


def npy(shape: str, *, descr: str = "'<i8'", data: bytes = b"\0" * 100) -> bytes:
    """An .npy whose header says what the test wants, in the layout that NumPy documents."""
    return npy_header(f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}".encode()) + data


def npy_header(header: bytes) -> bytes:
    return b"\x93NUMPY\x01\x00" + (len(header) + 1).to_bytes(2, "little") + header + b"\n"


BROKEN_NPY = [
    pytest.param(npy(f"({Q}, {10**12})"), "claims a shape that no memory holds", id="petabytes"),
    pytest.param(npy(f"({Q}, {10**30})"), "claims a shape that no memory holds", id="beyond 64 bits"),
    pytest.param(npy_header(b"(" * 20), "cannot be read as NumPy data", id="unfinished header"),
    pytest.param(npy_header(b" 1\n2\n  3"), "cannot be read as NumPy data", id="indented header"),
    pytest.param(npy("(16, 2)", descr="('<i8',)"), "cannot be read as NumPy data", id="descr of one"),
    pytest.param(npy("(16, 2)", descr="[1]"), "cannot be read as NumPy data", id="descr of numbers"),
    pytest.param(npy("(16, -1)"), "cannot be read as NumPy data", id="negative shape"),
    pytest.param(b"\x93NUMPY\x09\x00" + b"\0" * 30, "cannot be read as NumPy data", id="version 9"),
]


@pytest.mark.filterwarnings("ignore:Reading `.npy`")  # NumPy's second attempt at a header
@pytest.mark.parametrize("inside", ["file", "archive"])
@pytest.mark.parametrize(("content", "message"), BROKEN_NPY)
def test_numpy_headers_that_lie_fail(tmp_path: Path, content: bytes, message: str, inside: str) -> None:
    path = tmp_path / "codes"
    if inside == "file":
        path.write_bytes(content)
    else:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("a.npy", content)
    with pytest.raises(CodesError, match=message):
        read_codes(path)


def change_entry(archive: bytes, *, local: int, central: int, value: int) -> bytes:
    """One byte of a zip's only entry, at its offset in the local header and in the central directory."""
    changed = bytearray(archive)
    changed[local] = value
    changed[archive.rfind(b"PK\x01\x02") + central] = value
    return bytes(changed)


def test_archives_that_numpy_did_not_write_fail(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    np.savez(buffer, a=codes_array(3))
    whole, path = buffer.getvalue(), tmp_path / "codes.npz"
    path.write_bytes(whole)
    assert list(read_codes(path)) == ["a"]
    for content, message in (
        (change_entry(whole, local=6, central=8, value=1), r"'a\.npy' is encrypted"),
        (change_entry(whole, local=8, central=10, value=99), "compressed by method 99; accepted are stored and deflated"),
        (change_entry(whole, local=4, central=6, value=200), "not a whole .npz"),  # a zip version that does not exist
    ):
        path.write_bytes(content)
        with pytest.raises(CodesError, match=message):
            read_codes(path)


@pytest.mark.parametrize("content", [b"hello", b"", pickle.dumps(1)])
def test_an_archive_of_other_things_named_npy_fails(tmp_path: Path, content: bytes) -> None:
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("a.npy", content)
    with pytest.raises(CodesError, match="cannot be read as NumPy data"):
        read_codes(tmp_path / "a.npz")


@pytest.mark.filterwarnings("ignore:Reading `.npy`")
@pytest.mark.parametrize("kind", ["npz", "npy", "json", "safetensors", "ours"])
@settings(max_examples=100)
@given(data=st.data())
def test_damaged_files_give_codes_or_a_codes_error(tmp_path_factory: pytest.TempPathFactory, kind: str, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    if kind == "ours":
        path = write_codes(folder / "c.safetensors", {"x": codes_array(2)}, codebook_size=2048)
    else:
        path = dump(folder, kind, codes_array(2))
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        where = data.draw(st.integers(-len(content), len(content) - 1))
        content[where] = data.draw(st.sampled_from(b"()[]{}'\",:0123456789<|O \n-\x00\x80\xff"))
    path.write_bytes(content)
    try:
        read = read_codes(path)
    except CodesError:
        return
    assert all(codes.dtype == torch.int64 and codes.shape[0] == Q for codes in read.values())


def test_paths_that_no_file_can_have_fail(tmp_path: Path) -> None:
    for name in ("nul\0", "x" * 5000):
        with pytest.raises(CodesError, match="cannot be opened"):
            read_codes(tmp_path / name)


def test_a_missing_file_a_folder_and_wrong_arguments_fail(tmp_path: Path) -> None:
    with pytest.raises(CodesError, match="there is no file"):
        read_codes(tmp_path / "nothing")
    with pytest.raises(CodesError, match="is a folder"):
        read_codes(tmp_path)
    with pytest.raises(CodesError, match="layout is 'FQ'"):
        read_codes(tmp_path, layout="FQ")  # type: ignore[arg-type]  # the point of the test
    with pytest.raises(CodesError, match="at least one codebook"):
        read_codes(tmp_path, num_quantizers=0)
