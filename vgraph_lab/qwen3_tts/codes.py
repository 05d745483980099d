"""The codes format: codec codes of named utterances in one safetensors file, and a reader for other people's dumps.

A file of ours holds one integer tensor ``[num_quantizers, frames]`` per utterance, under the utterance's id:

* dtype int16, or int32 when ``codebook_size`` does not fit into int16;
* metadata (strings, as safetensors has it): ``format`` = ``vgraph_lab.codes``, ``version`` = ``1``, ``frame_rate_hz``,
  ``num_quantizers`` and ``codebook_size``;
* every code is in ``0 .. codebook_size - 1`` and every utterance has at least one frame.

:func:`read_codes` also takes ``.npz``, ``.npy``, foreign safetensors and JSON (a nested list, or an object of utterance id
to nested list). Such dumps say nothing about themselves, so their orientation is read from the shape: the axis with
``num_quantizers`` entries is the codebook axis, and ``[16, 16]`` is ambiguous until the caller says which it is. The
content of a file decides how it is read, not its suffix; pickles are refused, because reading one runs whatever code it
carries.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from vgraph_lab.errors import CodesError, did_you_mean

from . import foreign_codes

__all__ = ["CODES_FORMAT", "CODES_VERSION", "CodesFile", "Layout", "read_codes", "write_codes"]

CODES_FORMAT = "vgraph_lab.codes"
CODES_VERSION = 1
FRAME_RATE_HZ = 12.5

_NumberT = TypeVar("_NumberT", int, float)

Layout = Literal["qf", "fq"]
"""``qf``: ``[num_quantizers, frames]``; ``fq``: ``[frames, num_quantizers]``."""


@dataclass(frozen=True)
class CodesFile(Mapping[str, torch.Tensor]):
    """Codes by utterance id, with what the file said about them.

    Attributes:
        path: the file they were read from.
        codes: utterance id → int64 tensor ``[num_quantizers, frames]`` on the CPU, in the order of the file.
        num_quantizers: codebooks per frame.
        frame_rate_hz: frames per second; ``None`` where the file does not say.
        codebook_size: entries per codebook; ``None`` where the file does not say (codes are then unchecked upwards).
    """

    path: Path
    codes: Mapping[str, torch.Tensor]
    num_quantizers: int
    frame_rate_hz: float | None = None
    codebook_size: int | None = None

    def __getitem__(self, utterance_id: str) -> torch.Tensor:
        try:
            return self.codes[utterance_id]
        except KeyError:
            near = did_you_mean(utterance_id, self.codes) or f" It has {_shortened(list(self.codes))}."
            raise KeyError(f"{self.path.name} has no utterance {utterance_id!r} among its {len(self.codes)}.{near}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self.codes)

    def __len__(self) -> int:
        return len(self.codes)

    def __repr__(self) -> str:
        frames = sum(codes.shape[1] for codes in self.codes.values())
        size = "unknown" if self.codebook_size is None else self.codebook_size
        return f"CodesFile({self.path.name}: {len(self)} utterances, {frames} frames, {self.num_quantizers} codebooks of {size})"


def write_codes(
    path: str | os.PathLike[str],
    utterances: Mapping[str, torch.Tensor | np.ndarray[Any, Any]],
    *,
    codebook_size: int,
    frame_rate_hz: float = FRAME_RATE_HZ,
) -> Path:
    """Write codes in the format above. The file appears whole or not at all.

    Args:
        path: the file to write; an existing one is replaced.
        utterances: utterance id → integer codes ``[num_quantizers, frames]``, the same ``num_quantizers`` in all.
        codebook_size: entries per codebook; codes must be smaller.
        frame_rate_hz: frames per second.

    Returns:
        The path written.

    Raises:
        CodesError: no utterance, an id or a frame rate that the format cannot hold, a wrong shape or dtype, or a code
            out of range. Nothing was written.
    """
    path = Path(path)
    _check_sizes("", codebook_size, frame_rate_hz)
    if not utterances:
        raise CodesError(f"there is no utterance to write to {path.name}")
    dtype = torch.int16 if codebook_size <= 2**15 else torch.int32
    tensors: dict[str, torch.Tensor] = {}
    for utterance_id, given in utterances.items():
        _check_id(utterance_id)
        array = foreign_codes.to_numpy(utterance_id, given) if isinstance(given, torch.Tensor) else np.asarray(given)
        codes = foreign_codes.as_codes(array, f"utterance {utterance_id!r}")
        if codes.ndim != 2 or 0 in codes.shape:
            raise CodesError(
                f"utterance {utterance_id!r} has shape {list(codes.shape)}; expected [num_quantizers, frames], neither of them 0"
            )
        _check_range(codes, utterance_id, codebook_size)
        tensors[utterance_id] = torch.from_numpy(codes).to(dtype).contiguous()
    counts = {codes.shape[0] for codes in tensors.values()}
    if len(counts) > 1:
        raise CodesError(f"utterances differ in the number of codebooks ({sorted(counts)}); is one of them [frames, num_quantizers]?")
    metadata = {
        "format": CODES_FORMAT,
        "version": str(CODES_VERSION),
        "frame_rate_hz": repr(float(frame_rate_hz)),
        "num_quantizers": str(counts.pop()),
        "codebook_size": str(codebook_size),
    }
    # Bytes first, then a rename: a reader never sees half a file, and the file gets the user's ordinary permissions.
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(save(tensors, metadata))
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def read_codes(path: str | os.PathLike[str], *, layout: Layout | None = None, num_quantizers: int = 16) -> CodesFile:
    """Read a file of codes: ours, ``.npz``, ``.npy``, other safetensors or JSON.

    Args:
        path: the file. Its content decides how it is read, whatever its suffix.
        layout: orientation of a foreign dump, needed only where both axes have ``num_quantizers`` entries.
        num_quantizers: codebooks per frame that the caller expects.

    Returns:
        The codes as int64 tensors ``[num_quantizers, frames]``. A file with one unnamed array gives one utterance named
        after the file.

    Raises:
        CodesError: the file is missing, empty, truncated, a pickle, of a newer version or not codes: negative or
            fractional values, NaN, ragged rows, no axis with ``num_quantizers`` entries, no frames.
    """
    path = Path(path)
    if layout not in (None, "qf", "fq"):
        raise CodesError(f"layout is {layout!r}; accepted are 'qf' ([num_quantizers, frames]) and 'fq' ([frames, num_quantizers])")
    if num_quantizers < 1:
        raise CodesError(f"num_quantizers is {num_quantizers}; a codec has at least one codebook")
    kind = foreign_codes.sniff(path)
    if kind == "safetensors":
        try:
            return _read_safetensors(path, layout, num_quantizers)
        except SafetensorError as error:
            raise CodesError(f"{path} is not a whole safetensors file ({error}); it may be truncated: copy or write it again") from None
    arrays = {"npz": foreign_codes.read_npz, "npy": foreign_codes.read_npy, "json": foreign_codes.read_json}[kind](path)
    return _foreign(path, arrays, layout, num_quantizers)


def _read_safetensors(path: Path, layout: Layout | None, num_quantizers: int) -> CodesFile:
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (safe_open is not iterable)
    if metadata.get("format") != CODES_FORMAT:
        return _foreign(path, {name: foreign_codes.to_numpy(name, tensor) for name, tensor in tensors.items()}, layout, num_quantizers)

    version = _number(path, metadata, "version", int)
    if version > CODES_VERSION:
        raise CodesError(
            f"{path} has version {version} of the codes format and this reader knows up to {CODES_VERSION}: upgrade vgraph-lab"
        )
    if version < 1:
        raise CodesError(f"{path} states version {version} of the codes format; versions begin at 1")
    stated, size = _number(path, metadata, "num_quantizers", int), _number(path, metadata, "codebook_size", int)
    frame_rate_hz = _number(path, metadata, "frame_rate_hz", float)
    _check_sizes(f"{path}: ", size, frame_rate_hz)
    if stated != num_quantizers:
        raise CodesError(
            f"{path} has {stated} codebooks per frame and {num_quantizers} were asked for: pass num_quantizers={stated} if that is meant"
        )
    if layout == "fq":
        raise CodesError(f"{path} is in the codes format, which is always [num_quantizers, frames]: leave layout out")
    if not tensors:
        raise CodesError(f"{path} holds no utterance")
    codes = {}
    for utterance_id, tensor in tensors.items():
        if tensor.dtype not in (torch.int16, torch.int32) or tensor.ndim != 2 or tensor.shape[0] != stated or tensor.shape[1] == 0:
            raise CodesError(
                f"{path}: {utterance_id!r} is {tensor.dtype} {list(tensor.shape)}; the format has int16 or int32 [{stated}, frames ≥ 1]"
            )
        _check_range(tensor.numpy(), utterance_id, size)
        codes[utterance_id] = tensor.long()
    return CodesFile(path, codes, stated, frame_rate_hz, size)


def _foreign(path: Path, arrays: Mapping[str, np.ndarray[Any, Any]], layout: Layout | None, num_quantizers: int) -> CodesFile:
    if not arrays:
        raise CodesError(f"{path} holds no array of codes")
    codes = {}
    for name, array in arrays.items():
        where = f"{path}: {name!r}"
        codes[name] = torch.from_numpy(foreign_codes.oriented(foreign_codes.as_codes(array, where), layout, num_quantizers, where))
    return CodesFile(path, codes, num_quantizers)


def _check_sizes(where: str, codebook_size: int, frame_rate_hz: float) -> None:
    if not 1 <= codebook_size <= 2**31:
        raise CodesError(f"{where}codebook_size is {codebook_size}; a codebook has between 1 and 2**31 entries")
    if not (math.isfinite(frame_rate_hz) and frame_rate_hz > 0):
        raise CodesError(f"{where}frame_rate_hz is {frame_rate_hz}; a frame rate is a finite number above 0 (the published one is 12.5)")


def _check_id(utterance_id: str) -> None:
    if not isinstance(utterance_id, str):
        raise CodesError(f"utterance id {utterance_id!r} is {type(utterance_id).__name__}; ids are strings")
    if utterance_id == "__metadata__":
        raise CodesError("'__metadata__' cannot be an utterance id: safetensors files keep their metadata under it. Choose another")
    try:
        utterance_id.encode()
    except UnicodeEncodeError as error:
        raise CodesError(f"utterance id {utterance_id!r} has no UTF-8 form ({error.reason} at {error.start}). Choose another") from None


def _shortened(names: list[str], shown: int = 4) -> str:
    more = len(names) - shown
    return ", ".join(names[:shown]) + (f" and {more} more" if more > 0 else "")


def _check_range(codes: np.ndarray[Any, Any], utterance_id: str, codebook_size: int) -> None:
    low, high = int(codes.min()), int(codes.max())
    if low < 0 or high >= codebook_size:
        raise CodesError(
            f"utterance {utterance_id!r} has codes from {low} to {high}; a codebook of {codebook_size} has 0 … {codebook_size - 1}"
        )


def _number(path: Path, metadata: Mapping[str, str], key: str, kind: Callable[[str], _NumberT]) -> _NumberT:
    try:
        return kind(metadata[key])
    except KeyError:
        raise CodesError(f"{path} is in the codes format but does not state {key}") from None
    except ValueError:
        raise CodesError(f"{path} states {key} = {metadata[key]!r}, which is not a number") from None
