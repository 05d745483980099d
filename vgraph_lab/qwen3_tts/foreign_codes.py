"""Codes that other tools dumped: what kind of file it is, its arrays, and whether they can be codes at all.

Nothing here knows our own format; :mod:`vgraph_lab.qwen3_tts.codes` does, and calls into this module for the rest.
"""

from __future__ import annotations

import json
import struct
import zipfile
import zlib
from pathlib import Path
from tokenize import TokenError
from typing import IO, Any, Literal

import numpy as np
import torch

from vgraph_lab.errors import CodesError

__all__ = ["as_codes", "oriented", "read_json", "read_npy", "read_npz", "sniff", "to_numpy"]

Kind = Literal["safetensors", "npz", "npy", "json"]
Array = np.ndarray[Any, Any]

_PICKLE_SUFFIXES = {".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".bin", ".joblib"}
_ACCEPTED = "accepted are this package's codes format, other safetensors, .npz, .npy and JSON"
_ZIP_ENCRYPTED = 0x41  # flag bits of an entry: encrypted, strongly encrypted
_ZIP_ERRORS = (NotImplementedError, ValueError, OSError, struct.error)  # what zipfile lets through for a damaged directory
_LONGEST_INTEGER = 20  # digits in JSON; 2**64 has as many, and Python itself refuses to convert a few thousand

# What NumPy lets through for a damaged header, which it parses as Python source: wrong syntax, wrong types inside the
# literal, and shapes that are too large for the memory or for a machine integer.
_NUMPY_ERRORS = (
    *(ValueError, EOFError, SyntaxError, TokenError, TypeError, IndexError),
    *(MemoryError, OverflowError, RecursionError),
)


def _refuse_pickle(path: Path, found: str) -> CodesError:
    return CodesError(
        f"{path} is refused: {found}, and reading a pickle runs whatever code it carries. Where you trust it, convert it once: "
        "codes = torch.load(path, weights_only=True) (or pickle.load), then vgraph_lab.write_codes('codes.safetensors', "
        "{'name': codes}, codebook_size=…)"
    )


def sniff(path: Path) -> Kind:
    """The kind of file at ``path``, from its first bytes.

    Raises:
        CodesError: no such file, a folder, an empty file, a pickle, or something else that is not accepted.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(64)
    except FileNotFoundError:
        raise CodesError(f"there is no file {path}") from None
    except IsADirectoryError:
        raise CodesError(f"{path} is a folder; give the file of codes inside it") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = error.strerror if isinstance(error, OSError) else error
        raise CodesError(f"{str(path)[:200]!r} cannot be opened ({reason})") from None
    if not size:
        raise CodesError(f"{path} is empty")
    if head.startswith(b"PK\x03\x04"):
        return _sniff_zip(path)
    if head.startswith(b"\x93NUMPY"):
        return "npy"
    if head[0] == 0x80 and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        raise _refuse_pickle(path, "its content is a Python pickle")
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= 100_000_000:  # safetensors: header length, header
        return "safetensors"
    if head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] in (b"[", b"{"):
        return "json"
    if path.suffix.lower() in _PICKLE_SUFFIXES:  # pickle protocols 0 and 1 have no signature
        raise _refuse_pickle(path, f"a {path.suffix} file is a pickle as a rule")
    raise CodesError(f"{path} begins with {head[:8]!r}, which is no file of codes: {_ACCEPTED}")


def _sniff_zip(path: Path) -> Kind:
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, *_ZIP_ERRORS) as error:
        raise CodesError(f"{path} is not a whole .npz file ({error}); it may be truncated: copy or write it again") from None
    names = [entry.filename for entry in entries]
    pickles = [name for name in names if name.endswith(".pkl")]
    if pickles:
        raise _refuse_pickle(path, f"it is an archive with a pickle in it ({pickles[0]}), as torch.save writes")
    if not names or not all(name.endswith(".npy") for name in names):
        raise CodesError(f"{path} is a zip archive but no .npz (it holds {', '.join(names[:3]) or 'nothing'}): {_ACCEPTED}")
    for entry in entries:
        if entry.flag_bits & _ZIP_ENCRYPTED:
            raise CodesError(f"{path}: {entry.filename!r} is encrypted; unpack it with its password and save it with np.savez")
        if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise CodesError(
                f"{path}: {entry.filename!r} is compressed by method {entry.compress_type}; accepted are stored and deflated entries, "
                "as np.savez and np.savez_compressed write"
            )
    return "npz"


def read_npz(path: Path) -> dict[str, Array]:
    """The arrays of an ``.npz``; object arrays are refused."""
    try:
        with zipfile.ZipFile(path) as archive:
            return {name.removesuffix(".npy"): _read_npz_entry(archive, name) for name in archive.namelist()}
    except (*_NUMPY_ERRORS, *_ZIP_ERRORS, zipfile.BadZipFile, zlib.error) as error:
        raise _numpy_error(path, error) from None


def _read_npz_entry(archive: zipfile.ZipFile, name: str) -> Array:
    with archive.open(name) as file:
        return _read_array(file)


def read_npy(path: Path) -> dict[str, Array]:
    """The array of an ``.npy``, named after the file; object arrays are refused."""
    try:
        with path.open("rb") as file:
            return {path.stem: _read_array(file)}
    except _NUMPY_ERRORS as error:
        raise _numpy_error(path, error) from None


def _read_array(file: IO[bytes]) -> Array:
    array: Array = np.lib.format.read_array(file, allow_pickle=False)
    return array


def _numpy_error(path: Path, error: Exception) -> CodesError:
    if "allow_pickle" in str(error):
        return _refuse_pickle(path, "it holds an object array, which NumPy stores as a pickle")
    if isinstance(error, (MemoryError, OverflowError)):
        return CodesError(f"{path} claims a shape that no memory holds ({error or 'out of memory'}); its header may be damaged")
    return CodesError(f"{path} cannot be read as NumPy data ({error}); it may be truncated: copy or write it again")


def read_json(path: Path) -> dict[str, Array]:
    """A nested list, named after the file, or an object of utterance id → nested list."""
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=_without_duplicates, parse_int=_integer)
        named = content if isinstance(content, dict) else {path.stem: content}
        return {name: _array_from_lists(value, f"{path}: {name!r}") for name, value in named.items()}
    except UnicodeDecodeError as error:
        raise CodesError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise CodesError(f"{path} is not valid JSON: {error.msg} in line {error.lineno}; it may be truncated") from None
    except RecursionError:
        raise CodesError(f"{path} is nested too deeply to be codes; expected [num_quantizers, frames]") from None


def _integer(text: str) -> int:
    digits = len(text.lstrip("-"))
    if digits > _LONGEST_INTEGER:
        raise CodesError(f"the JSON contains an integer of {digits} digits; no codebook has that many entries")
    return int(text)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        repeated = next(key for key, _ in pairs if sum(key == other for other, _ in pairs) > 1)
        raise CodesError(f"the JSON has the utterance id {repeated!r} twice; ids must be unique")
    return result


def _array_from_lists(value: Any, where: str) -> Array:
    if not isinstance(value, list):
        raise CodesError(f"{where} is {type(value).__name__}; expected a nested list of codes, or an object of utterance id to nested list")
    _check_leaves(value, where)
    try:
        return np.array(value)
    except (ValueError, OverflowError) as error:
        reason = "its rows differ in length" if "inhomogeneous" in str(error) else str(error)
        raise CodesError(f"{where} is not a rectangular array: {reason}; every codebook needs one code per frame") from None


def _check_leaves(value: list[Any], where: str) -> None:
    """NumPy would turn true into 1 and mixed lists into text; say which leaf it was instead."""
    for item in value:
        if isinstance(item, list):
            _check_leaves(item, where)
        elif isinstance(item, bool) or not isinstance(item, (int, float)):
            raise CodesError(f"{where} contains {item!r}, which is no code; codes are whole numbers from 0")


def to_numpy(name: str, tensor: torch.Tensor) -> Array:
    """A tensor as NumPy array, on the host."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta:
        kind = "nested" if tensor.is_nested else "meta" if tensor.is_meta else str(tensor.layout)
        raise CodesError(f"{name!r} is a {kind} tensor; codes are dense tensors with values")
    if tensor.dtype in (torch.float16, torch.bfloat16) or (tensor.dtype.itemsize == 1 and tensor.is_floating_point()):
        raise CodesError(
            f"{name!r} is {tensor.dtype}: too coarse for codes, some may have been rounded. Dump them as integers (codes.long())"
        )
    array: Array = tensor.detach().cpu().numpy()
    return array


def as_codes(array: Array, where: str) -> Array:
    """``array`` as int64, if it holds whole numbers from 0 up and loses nothing by it.

    float32 and float64 arrays of whole numbers are accepted, since some tools store every array as floats; half
    precision is not, since a code may already have been rounded.
    """
    if array.dtype.kind == "f" and array.dtype.itemsize >= 4:
        if not np.isfinite(array).all():
            raise CodesError(f"{where} contains NaN or infinity; codes are whole numbers from 0")
        if (array != np.floor(array)).any():
            raise CodesError(f"{where} contains fractions such as {array[array != np.floor(array)].flat[0]}; these are values, not codes")
    elif array.dtype.kind not in "iu":
        raise CodesError(f"{where} has dtype {array.dtype}; codes are integers (or float32/float64 holding whole numbers)")
    if array.size and array.min() < 0:
        raise CodesError(f"{where} contains {array.min():g}; codes start at 0 (padding such as -1 must be cut off first)")
    if array.size and array.max() >= 2**31:
        raise CodesError(f"{where} contains {array.max():g}; no codebook has that many entries")
    return array.astype(np.int64)


def oriented(codes: Array, layout: str | None, num_quantizers: int, where: str) -> Array:
    """Codes as ``[num_quantizers, frames]``, from either orientation and with or without a leading batch axis of 1."""
    shape = list(codes.shape)
    if codes.ndim == 3 and shape[0] == 1:
        codes = codes[0]
    if codes.ndim != 2:
        hint = "; split the batch into utterances" if codes.ndim == 3 else ""
        raise CodesError(f"{where} has shape {shape}; expected [{num_quantizers}, frames] or [frames, {num_quantizers}]{hint}")
    if codes.size == 0:
        raise CodesError(f"{where} has shape {shape}, which is no frame at all")
    rows, columns = codes.shape
    if layout is None and rows == columns == num_quantizers:
        raise CodesError(
            f"{where} has shape {shape}, which reads both ways: pass layout='qf' ([codebooks, frames]) or 'fq' ([frames, codebooks])"
        )
    as_qf = rows == num_quantizers and layout != "fq"
    if not as_qf and (columns != num_quantizers or layout == "qf"):
        wanted = {
            "qf": f"[{num_quantizers}, frames]",
            "fq": f"[frames, {num_quantizers}]",
            None: f"[{num_quantizers}, frames] or [frames, {num_quantizers}]",
        }
        raise CodesError(
            f"{where} has shape {shape}; expected {wanted[layout]}. For a codec with another number of codebooks pass num_quantizers=…"
        )
    return np.ascontiguousarray(codes if as_qf else codes.T)
