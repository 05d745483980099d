"""What is asked for: calls by Target, state and exact shape. The planner's first input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from vgraph_lab.errors import ConfigError, FallbackReason, InputError, did_you_mean
from vgraph_lab.graphs.stats import StatsSnapshot
from vgraph_lab.qwen3_tts.settings import TARGET_IDS
from vgraph_lab.qwen3_tts.stream_path import ICL_PREFIX_TARGET_ID, XVEC_PREFIX_TARGET_ID
from vgraph_lab.qwen3_tts.transitions import TransitionTable

from .shapes import STATELESS_TARGET_ID, SUFFIX_TARGET_ID, kept_frames, shape_of, suffix_state

__all__ = [
    "TRAFFIC_COLUMNS",
    "check_traffic",
    "new_frames",
    "read_traffic_csv",
    "traffic_of",
    "traffic_of_calls",
    "traffic_table",
    "with_schedule",
]

TRAFFIC_COLUMNS = {
    "target": "id of the Target",
    "state": "what a graph cannot bridge: graphs serve calls of their own state only. Empty where there is one; 'icl 72' is a suffix "
    "step of the mode icl with 72 frames kept",
    "batch_size": "rows; a graph has at least as many",
    "frames": "frames per row as Descriptors count them (of a suffix step: kept and new ones together)",
    "may_pad_frames": "whether a graph with more frames may serve the call: stateless ones and last chunks; others need exactly these",
    "calls": "number of such calls",
}
"""The columns of a traffic table, in order, with their meaning. Each combination of the first five stands in one row."""

_KEYS = ["target", "state", "batch_size", "frames", "may_pad_frames"]
_CALL_COLUMNS = ("target", "batch_size", "frames", "state", "source_frames", "reason", "captured_frames", "calls")
_TRUE, _FALSE = ("true", "yes", "1"), ("false", "no", "0")


def traffic_of(snapshot: StatsSnapshot, transitions: TransitionTable | None = None) -> pd.DataFrame:
    """The traffic behind a runner's statistics, whatever became of the calls.

    Nothing in the key of a streamed call says that it was the last of its request, whose frames may be padded. It is told from
    what became of it (a larger graph served it), or from the schedule: only a last chunk is shorter than its transition, unless
    it was ``shape_not_covered``. Without either, a call counts as one that needs exactly its frames.

    Args:
        snapshot: counted calls, of a live runner or a recording.
        transitions: the schedule of a streaming model (``model.streaming.transitions``).

    Returns:
        The columns of :data:`TRAFFIC_COLUMNS`; ``calls`` adds up to ``snapshot.calls()``.
    """
    columns: dict[str, list[Any]] = {name: [] for name in TRAFFIC_COLUMNS}
    for kind, calls in snapshot.counts.items():
        key, captured = kind.key, kind.descriptor
        is_padded = captured is not None and captured.frames > key.frames
        kept = int(getattr(key, "source", 0))
        may_pad = _may_pad(kind.target_id, key.frames, kept, is_padded, str(kind.reason or ""), transitions)
        row = (*shape_of(kind.target_id, key), may_pad, calls)
        for values, value in zip(columns.values(), row, strict=True):
            values.append(value)
    return traffic_table(columns)


def traffic_of_calls(calls: pd.DataFrame, transitions: TransitionTable | None = None) -> pd.DataFrame:
    """The traffic behind a table of calls: an imported log's, or a coverage table. See :func:`traffic_of` for last chunks.

    Args:
        calls: the columns ``target``, ``batch_size``, ``frames``, ``state``, ``source_frames``, ``reason``, ``captured_frames`` and
            ``calls``, as in :data:`~vgraph_lab.workload.importers.counts.CALLS_COLUMNS`. Rows without a shape are refused.
        transitions: the schedule of a streaming model.

    Raises:
        InputError: a column is missing, or a call has no shape.
    """
    missing = [name for name in _CALL_COLUMNS if name not in calls]
    if missing:
        raise InputError(f"the table of calls lacks {', '.join(missing)}. It needs {', '.join(_CALL_COLUMNS)}.")
    unknown = int(calls.loc[calls[["batch_size", "frames"]].isna().any(axis=1), "calls"].sum())
    if unknown:
        raise InputError(f"{unknown:,} calls have no shape, and nothing can be planned for them. Leave them out, knowing that they are.")
    columns: dict[str, list[Any]] = {name: [] for name in TRAFFIC_COLUMNS}
    for target, rows, frames, state, source, reason, captured, n in calls[list(_CALL_COLUMNS)].itertuples(index=False, name=None):
        kept = None if pd.isna(source) else int(source)
        is_padded = not pd.isna(captured) and captured > frames
        may_pad = _may_pad(target, int(frames), kept or 0, is_padded, str(reason), transitions)
        whole_state = str(state) if kept is None else suffix_state(str(state), kept)
        for values, value in zip(columns.values(), (target, whole_state, int(rows), int(frames), may_pad, int(n)), strict=True):
            values.append(value)
    return traffic_table(columns)


def with_schedule(calls: pd.DataFrame, transitions: TransitionTable, mode: str = "") -> pd.DataFrame:
    """Calls of a log with what the schedule of the service tells and the log does not.

    vllm-omni's streaming statistics name a suffix step by its frames only, and a first chunk not even by these.

    Args:
        calls: as for :func:`traffic_of_calls`.
        transitions: the schedule of the service that wrote them.
        mode: of suffix steps that name none: ``icl`` or ``xvec``; by default the one whose first chunks the log counts.

    Returns:
        The table with frames of first chunks, kept frames and mode of suffix steps filled in where one answer is possible.

    Raises:
        InputError: two first chunks, steps or modes are possible, or the schedule has no such step.
    """
    table = calls.copy()
    is_prefix = table["target"].isin([ICL_PREFIX_TARGET_ID, XVEC_PREFIX_TARGET_ID]) & table["frames"].isna()
    if is_prefix.any():
        starts = sorted({start.new_frames for start in transitions.starts})
        if len(starts) != 1:
            raise InputError(
                f"the log does not tell the frames of first chunks, and the schedule has several: {starts}. Fix them in --config."
            )
        table.loc[is_prefix, "frames"] = starts[0]
    is_step = (table["target"] == SUFFIX_TARGET_ID) & table["source_frames"].isna() & table["frames"].notna()
    if is_step.any():
        sources: dict[int, set[int]] = {}
        for step in transitions.steps:
            sources.setdefault(step.target, set()).add(step.source)
        for frames in table.loc[is_step, "frames"].unique():
            found = sorted(sources.get(int(frames), ()))
            if len(found) != 1:
                steps = ", ".join(map(str, sorted(sources)))
                raise InputError(
                    f"the log counts suffix steps of {frames} frames; by the schedule they keep {found or 'nothing that is known'} before. "
                    f"Its steps have {steps} frames. Give the connector of the service that wrote the log with --config."
                )
            table.loc[is_step & (table["frames"] == frames), "source_frames"] = found[0]
        table.loc[is_step & (table["state"] == ""), "state"] = mode or _only_mode(table)
    return table


def _only_mode(table: pd.DataFrame) -> str:
    began = [mode for mode, target in (("icl", ICL_PREFIX_TARGET_ID), ("xvec", XVEC_PREFIX_TARGET_ID)) if (table["target"] == target).any()]
    if len(began) != 1:
        raise InputError(
            "the log does not tell the mode of suffix steps, and its first chunks do not either. Say it with --kind icl or xvec."
        )
    return began[0]


def _may_pad(target_id: str, frames: int, kept: int, is_padded: bool, reason: str, transitions: TransitionTable | None) -> bool:
    if target_id == STATELESS_TARGET_ID or is_padded:
        return True
    if transitions is None or reason == FallbackReason.SHAPE_NOT_COVERED:
        return False
    step = transitions.after(kept, frames - kept)
    return step is not None and frames - kept < step.new_frames


def traffic_table(data: pd.DataFrame | Mapping[str, Sequence[Any]]) -> pd.DataFrame:
    """A traffic table from columns: checked, equal rows added up, sorted.

    ``state`` may be left out (then it is empty), ``calls`` too (then each row is one call), and so may ``may_pad_frames`` (then
    stateless calls may be padded and all others not).

    Raises:
        InputError: a column is missing, unknown or of another length, or a value is not what :data:`TRAFFIC_COLUMNS` says.
    """
    try:
        table = pd.DataFrame(data)
    except ValueError as error:
        raise InputError(f"the traffic is no table: {error}. Give columns of equal length: {', '.join(TRAFFIC_COLUMNS)}.") from error
    for name in table.columns:
        if name not in TRAFFIC_COLUMNS:
            hint = did_you_mean(str(name), TRAFFIC_COLUMNS)
            raise InputError(f"traffic has no column {name!r}.{hint} Accepted: {', '.join(TRAFFIC_COLUMNS)}.")
    missing = [name for name in ("target", "batch_size", "frames") if name not in table]
    if missing:
        raise InputError(f"the traffic table lacks {', '.join(missing)}. It needs target, batch_size and frames.")
    target = table["target"].astype("category")
    clean = pd.DataFrame(
        {
            "target": target,
            "state": table["state"].fillna("").astype("category") if "state" in table else "",
            "batch_size": _whole(table["batch_size"], least=1),
            "frames": _whole(table["frames"], least=1),
            "may_pad_frames": _truth(table["may_pad_frames"]) if "may_pad_frames" in table else target == STATELESS_TARGET_ID,
            "calls": _whole(table["calls"], least=0) if "calls" in table else 1,
        }
    )
    summed = clean.groupby(_KEYS, observed=True, sort=True, as_index=False)["calls"].sum()
    summed = summed[summed["calls"] > 0].astype({"target": "str", "state": "str", "may_pad_frames": "bool", "calls": "int64"})
    ordered: pd.DataFrame = summed.sort_values(_KEYS, ignore_index=True)[list(TRAFFIC_COLUMNS)]
    return ordered


def read_traffic_csv(path: str | Path) -> pd.DataFrame:
    """The traffic in a CSV file with a header; see :func:`traffic_table` for what may be left out.

    Raises:
        InputError: the file cannot be read, or its content is no traffic.
    """
    try:
        data = pd.read_csv(path, dtype={"target": "str", "state": "str"})
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}.") from error
    except (ValueError, pd.errors.ParserError) as error:  # no columns, no text, rows of unequal length
        raise InputError(f"{path}: is no CSV with a header: {error}") from error
    try:
        return traffic_table(data)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def check_traffic(traffic: pd.DataFrame, target_ids: Sequence[str]) -> pd.DataFrame:
    """The traffic as a checked table, if there is any and some of these Targets can serve it.

    Args:
        traffic: see :func:`traffic_table`.
        target_ids: the Targets that can be planned for.

    Raises:
        ConfigError: a Target that does not exist, or one that is not among those.
        InputError: the table is malformed, or holds no calls.
    """
    table = traffic_table(traffic)
    if table.empty:
        raise InputError("the traffic holds no calls, so there is nothing to plan for. Record or simulate some first.")
    for target_id in table["target"].unique():
        if target_id not in TARGET_IDS:
            hint = did_you_mean(target_id, TARGET_IDS)
            raise ConfigError(f"traffic: no such Target: {target_id!r}.{hint} Declared: {', '.join(sorted(TARGET_IDS))}.")
        if target_id not in target_ids:
            raise ConfigError(
                f"traffic: {target_id} is not among the Targets that are planned here ({', '.join(target_ids)}). A stage either streams "
                "or decodes whole utterances: plan for one kind of traffic at a time."
            )
    new_frames(table)
    return table


def new_frames(traffic: pd.DataFrame) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Frames per row that each kind of call decodes: int64 [rows of the table]; what a suffix step keeps is not among them.

    Raises:
        InputError: a suffix step without a state, or one that keeps all its frames.
    """
    kept = {(target, state): kept_frames(target, state) for target, state in traffic[["target", "state"]].drop_duplicates().values}
    found = traffic["frames"].to_numpy() - np.array(
        [kept[key] for key in zip(traffic["target"], traffic["state"], strict=True)], dtype=np.int64
    )
    if len(found) and found.min() < 1:
        row = traffic.iloc[int(found.argmin())]
        raise InputError(
            f"a call of {SUFFIX_TARGET_ID} in state {row['state']!r} with {row['frames']} frames brings no new ones. frames counts "
            "kept and new frames together."
        )
    return np.asarray(found, dtype=np.int64)


def _whole(values: pd.Series[Any], *, least: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    numbers = pd.to_numeric(values, errors="coerce").to_numpy(dtype="float64", na_value=np.nan)
    bad = ~(np.isfinite(numbers) & (numbers == np.floor(numbers)) & (numbers >= least) & (numbers < 2**53))
    if bad.any():
        place = int(bad.argmax())
        raise InputError(f"{values.name} must be a whole number, {least} or more, got {values.iloc[place]!r} in row {place + 1}.")
    return numbers.astype(np.int64)


def _truth(values: pd.Series[Any]) -> pd.Series[bool]:
    if values.dtype == bool:
        return values
    words = values.astype("str").str.strip().str.lower()
    bad = ~words.isin([*_TRUE, *_FALSE])
    if bad.any():
        place = int(bad.to_numpy().argmax())
        raise InputError(f"may_pad_frames must be true or false, got {values.iloc[place]!r} in row {place + 1}.")
    return words.isin(_TRUE)
