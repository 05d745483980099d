"""vLLM's own CUDA graph logs.

The metrics table (``--cudagraph-metrics``), one row per kind of step, counted since the table before: it is reset whenever it is
printed. Each of its lines has a prefix of its own, and lines of other processes may stand between them::

    **CUDAGraph Config Settings:**
    - Mode: FULL_AND_PIECEWISE
    - Capture sizes: [1, 2, 4]
    **CUDAGraph Stats:**
    | Unpadded Tokens | Padded Tokens | Num Paddings | Runtime Mode | Count |
    |-----------------|---------------|--------------|--------------|-------|
    | 3               | 4             | 1            | FULL         | 120   |

Per-size capture lines, in pairs, and the total of a capture::

    Graph capturing for 464 input tokens
                            finished in 0.057 secs, took 26.00 MiB
    Graph capturing finished in 14 secs, took 0.21 GiB

vLLM lays all tokens of a step side by side, so a call counts as one row of so many tokens. Runtime mode NONE is eager; why is not
told.

Sources: https://github.com/vllm-project/vllm/blob/main/vllm/compilation/cuda_graph.py (``CUDAGraphLogging``),
https://github.com/vllm-project/vllm/pull/29825 (with prefixes), https://github.com/vllm-project/vllm/pull/22897 (per size),
https://github.com/vllm-project/vllm/pull/11349 (the total).
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict, deque
from typing import NamedTuple

from .records import CallShape, CaptureRecord, MalformedError, Report, Sink

__all__ = ["CAPTURES", "METRICS", "VllmFormat"]

METRICS, CAPTURES = "vllm cudagraph metrics", "vllm captures"
MODEL_TARGET = "vllm.model"

_ROW = re.compile(r"\|\s*(\d+)\s*\|\s*(\d+)\s*\|\s*(\d+)\s*\|\s*(?:CUDAGraphMode\.)?([A-Z_]+)\s*\|\s*(\d+)\s*\|$")
_HEADER = re.compile(r"\|\s*Unpadded Tokens\s*\|")
_ROW_START = re.compile(r"\|\s*\d+\s*(?:\||$)")
_RULE = re.compile(r"\|[-|]+\|$")
_SETTINGS = re.compile(r"\*\*CUDAGraph (?:Config Settings|Stats):\*\*$|- (?:Mode: [\w.]+|Capture sizes: \[[\d, ]*\])$")
_BEGIN = re.compile(r"Graph capturing for (\d+) input tokens(?P<rest>.*)$")
_TOOK = r"finished in ([\d.]+) secs?, took (-?[\d.]+) (MiB|GiB)$"
_END, _TOTAL = re.compile(_TOOK), re.compile("Graph capturing " + _TOOK)
_MODES = ("NONE", "PIECEWISE", "FULL")


class _Begun(NamedTuple):
    line: int
    text: str
    tokens: int


class VllmFormat:
    """Tables and captures; remembers per process the table that is open and the captures that have begun."""

    def __init__(self) -> None:
        self._tables: dict[str, Counter[CallShape]] = {}
        self._begun: defaultdict[str, deque[_Begun]] = defaultdict(deque)

    @property
    def has_open_table(self) -> bool:
        """Whether the next line may be a row."""
        return bool(self._tables)

    def read(self, line: int, process: str, message: str, sink: Sink) -> bool:
        """Take a line if it belongs to a table or a capture."""
        if message.startswith("|"):
            return self._read_table(process, message, sink)
        if process:  # lines of others stand between the rows of an unnamed process
            self._close(process, sink)
        if message.startswith(("**CUDAGraph", "- Mode: ", "- Capture sizes: ")):
            return _SETTINGS.match(message) is not None
        if message.startswith(("Graph capturing ", "finished in ")):
            return self._read_capture(line, process, message, sink)
        return False

    def _close(self, process: str, sink: Sink) -> None:
        table = self._tables.pop(process, None)
        if table:
            sink.report(process, Report(METRICS, "interval", table))

    def _read_table(self, process: str, message: str, sink: Sink) -> bool:
        if _HEADER.match(message):
            self._close(process, sink)
            self._tables[process] = Counter()
            return True
        is_open = process in self._tables
        row = _ROW.match(message)
        if row is None:
            if is_open and _ROW_START.match(message):
                raise MalformedError("the row of a table is cut or mixed with another line")
            return is_open and _RULE.match(message) is not None
        unpadded, padded, paddings, count = (int(row[i]) for i in (1, 2, 3, 5))
        is_row = unpadded + paddings == padded and row[4] in _MODES and unpadded > 0
        if not is_row and is_open:
            raise MalformedError(f"{unpadded} tokens and {paddings} paddings are not {padded}, or {row[4]} is none of {', '.join(_MODES)}")
        if is_row:  # also without a header: the log may begin in the middle of a table
            self._tables.setdefault(process, Counter())[_shape(unpadded, padded, row[4])] += count
        return is_row

    def _read_capture(self, line: int, process: str, message: str, sink: Sink) -> bool:
        if total := _TOTAL.match(message):
            sink.capture(CaptureRecord(process, CAPTURES, MODEL_TARGET, "total", unit="tokens", seconds=float(total[1]), mib=_mib(total)))
            return True
        begun = self._begun[process]
        if begin := _BEGIN.match(message):
            if process and begun:  # one process captures one graph at a time
                self._give_up(begun.popleft(), sink)
            begun.append(_Begun(line, message, int(begin[1])))
            rest = begin["rest"].strip()
            return not rest or self._read_capture(line, process, rest, sink)
        end = _END.match(message)
        if end is None:
            raise MalformedError("the line of a capture is cut")
        if not begun:
            raise MalformedError("the end of a capture whose beginning is missing")
        seconds, mib = float(end[1]), _mib(end)
        sink.capture(CaptureRecord(process, CAPTURES, MODEL_TARGET, "graph", 1, begun.popleft().tokens, "tokens", seconds, mib))
        return True

    def finish(self, sink: Sink) -> None:
        """Open tables count; captures that have no end are of no use."""
        for process in list(self._tables):
            self._close(process, sink)
        for begun in self._begun.values():
            for capture in begun:
                self._give_up(capture, sink)

    def _give_up(self, capture: _Begun, sink: Sink) -> None:
        sink.recant(capture.line, capture.text, "the beginning of a capture whose end is missing")


def _shape(unpadded: int, padded: int, mode: str) -> CallShape:
    if mode == "NONE":
        return CallShape(MODEL_TARGET, "fallback", 1, unpadded, mode, "tokens")
    outcome = "exact hit" if unpadded == padded else "padded hit"
    return CallShape(MODEL_TARGET, outcome, 1, unpadded, mode, "tokens", captured_batch_size=1, captured_frames=padded)


def _mib(took: re.Match[str]) -> float:
    return float(took[2]) * (1024 if took[3] == "GiB" else 1)
