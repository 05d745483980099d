"""One reader for all formats: it looks at every line once, keeps none, and tells formats apart by content."""

from __future__ import annotations

import gzip
import io
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, get_args

from vgraph_lab.errors import InputError

from .counts import Repetition, ReportBook
from .imported import ImportedLog, LineCounts, MalformedLine, captures_table
from .prefixes import split_prefix
from .records import CaptureRecord, LogFormat, MalformedError, Report
from .sglang_omni import SglangOmniFormat, read_telemetry
from .tables import TableFormat
from .vllm import VllmFormat
from .vllm_omni import VllmOmniFormat

__all__ = ["read_log"]

MAX_LINE_CHARS = 2**20
MAX_BLOCK_CHARS = 2**24
SHOWN_MALFORMED = 10
_SHOWN_CHARS = 200
_HEAD_BYTES = 8192
_MAY_MATTER = re.compile(r"[|{]|Graph|- Mode: |- Capture sizes: |finished in ")
_KNOWN = (
    "vllm-omni's Code2Wav statistics (VLLM_OMNI_QWEN3_CODE2WAV_CUDAGRAPH_STATS=1 or …_BATCH_STATS=1), vLLM's --cudagraph-metrics table "
    "and capture lines, sglang-omni's graph telemetry as JSON, and CSV or JSONL with batch_size and frames"
)


def read_log(source: str | Path | Iterable[str], *, repetition: Repetition = "auto", name: str | None = None) -> ImportedLog:
    """Read a log, or a dump of counters, whatever wrote it.

    Lines are read one after the other and not kept: what this takes grows with the shapes and processes in a log, not with
    its length. Formats may be mixed, and lines of several processes may alternate.

    Args:
        source: a file (``.gz`` too), a text with line breaks, or lines.
        repetition: how repeated counters are taken; ``auto`` knows it of each format.
        name: what to call the log; the file's name by default.

    Raises:
        InputError: there is no such file, it is empty or binary, or no line of it is known.
    """
    if repetition not in get_args(Repetition):
        raise InputError(f"repetition is {repetition!r}; accepted are {', '.join(map(repr, get_args(Repetition)))}.")
    if isinstance(source, Path) or (isinstance(source, str) and _is_path(source)):
        path = Path(source)
        try:
            with _opened(path) as file:
                return _read(_lines(file), name or str(path), repetition)
        except (OSError, EOFError) as error:
            raise InputError(f"{path} cannot be read: {error}. Give a file, a text with line breaks, or lines.") from error
    lines = io.StringIO(source) if isinstance(source, str) else source
    return _read(iter(lines), name or "the log", repetition)


def _is_path(text: str) -> bool:
    return bool(text) and "\n" not in text and "\0" not in text and (os.path.lexists(text) or not any(c in text for c in "{|[= "))


@contextmanager
def _opened(path: Path) -> Iterator[io.BufferedReader[Any]]:
    with path.open("rb") as raw:
        is_packed = raw.peek(2)[:2] == b"\x1f\x8b"
        with io.BufferedReader(gzip.GzipFile(fileobj=raw)) if is_packed else raw as file:
            if b"\0" in file.peek(_HEAD_BYTES)[:_HEAD_BYTES]:
                raise InputError(f"{path} is binary (or UTF-16), not a log. For UTF-16 try iconv -f UTF-16 -t UTF-8.")
            yield file


def _lines(file: IO[bytes]) -> Iterator[str]:
    """Lines of bounded length; the rest of a longer one is skipped."""
    while line := file.readline(MAX_LINE_CHARS):
        yield line.decode("utf-8", errors="replace")
        while line and not line.endswith(b"\n"):
            line = file.readline(MAX_LINE_CHARS)


def _read(lines: Iterator[str], name: str, repetition: Repetition) -> ImportedLog:
    reader = _Reader(repetition)
    for line in lines:
        if not isinstance(line, str):
            raise InputError(f"lines must be text, got {type(line).__name__}. Try (line.decode() for line in lines).")
        reader.take(line[:MAX_LINE_CHARS])
    return reader.finish(name)


class _Reader:
    """Takes one line after the other; also the sink of all formats."""

    def __init__(self, repetition: Repetition) -> None:
        self._table, self._vllm = TableFormat(), VllmFormat()
        self._formats: tuple[LogFormat, ...] = (self._table, VllmOmniFormat(), self._vllm, SglangOmniFormat())
        self._book = ReportBook(repetition)
        self._captures: list[CaptureRecord] = []
        self._read = self._recognised = self._malformed = 0
        self._shown: list[MalformedLine] = []
        self._block: _JsonBlock | None = None

    # ------------------------------------------------------------------------------------------------ sink

    def report(self, process: str, report: Report) -> None:
        self._book.take(process, report)

    def capture(self, record: CaptureRecord) -> None:
        self._captures.append(record)

    def recant(self, line: int, text: str, why: str) -> None:
        self._recognised -= 1
        self._add_malformed(line, text, why)

    # ------------------------------------------------------------------------------------------------ lines

    def take(self, line: str) -> None:
        self._read += 1
        text = line.rstrip("\r\n")
        if self._block is not None or (text.strip() in ("{", "[") and self._read == 1):
            self._take_block(text)
            return
        if not (self._table.is_open or self._vllm.has_open_table or _MAY_MATTER.search(text)):
            return  # nearly all lines of a server's log
        process, message = split_prefix(text)
        try:
            is_taken = any(log_format.read(self._read, process, message, self) for log_format in self._formats)
            self._recognised += is_taken  # in a statement of its own: a format may recant an earlier line
        except MalformedError as error:
            self._add_malformed(self._read, text, str(error))

    def _take_block(self, text: str) -> None:
        """A file that is one JSON object over many lines."""
        self._block = self._block or _JsonBlock()
        self._block.add(text)
        if self._block.is_complete:
            self._end_block()

    def _end_block(self) -> None:
        assert self._block is not None
        block, self._block = self._block, None
        try:
            if read_telemetry(block.text, "", self):
                self._recognised += block.lines
        except MalformedError as error:
            self._recognised += block.lines - 1
            self._add_malformed(self._read - block.lines + 1, block.text, str(error))

    def _add_malformed(self, line: int, text: str, why: str) -> None:
        self._malformed += 1
        if len(self._shown) < SHOWN_MALFORMED:
            short = text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "…"
            self._shown.append(MalformedLine(line, short, why))

    # ------------------------------------------------------------------------------------------------ end

    def finish(self, name: str) -> ImportedLog:
        if self._block is not None:
            self._end_block()
        for log_format in self._formats:
            log_format.finish(self)
        if not self._read:
            raise InputError(f"{name} is empty.")
        counts = LineCounts(self._read, self._recognised, self._read - self._recognised - self._malformed, self._malformed)
        calls, captures = self._book.calls(), captures_table(self._captures)
        shown = tuple(self._shown)
        if not len(calls) and not len(captures):
            examples = "".join(f"\n  {line}" for line in shown)
            raise InputError(f"{name} holds no usable line ({counts}). Known are {_KNOWN}.{examples}")
        return ImportedLog(name, calls, captures, self._book.reports(), counts, shown, tuple(_notes(calls["source"].unique())))


def _notes(sources: Iterable[str]) -> Iterator[str]:
    by_project: dict[str, list[str]] = {}
    for source in sorted(sources):
        by_project.setdefault(source.partition(" ")[0], []).append(source)
    for same in by_project.values():
        if len(same) > 1:
            yield f"{', '.join(same)} may count the same traffic in several places: look at one of them at a time (of_source)"


class _JsonBlock:
    """A JSON object that goes over several lines."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self.lines = self._chars = self._depth = 0
        self._is_text = False

    def add(self, line: str) -> None:
        self.lines += 1
        self._chars += len(line) + 1
        self._pieces.append(line)
        is_escaped = False
        for character in line:
            if self._is_text:
                self._is_text = character != '"' or is_escaped
                is_escaped = character == "\\" and not is_escaped
            elif character == '"':
                self._is_text = True
            else:
                self._depth += (character in "{[") - (character in "}]")

    @property
    def is_complete(self) -> bool:
        return self._depth <= 0 or self._chars > MAX_BLOCK_CHARS

    @property
    def text(self) -> str:
        return "\n".join(self._pieces)
