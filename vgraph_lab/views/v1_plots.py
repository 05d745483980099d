"""Charts of the vLLM v1 path: dispatch by size, segments and breaks of a graph, micro-batches over requests, and who ran when."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import FancyArrowPatch, Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from .style import COLOURS, INK

__all__ = ["dispatch_map", "graph_steps", "ubatch_slices", "ubatch_timeline"]

_INCHES_PER_LETTER = 0.072  # at the size of the labels
_MODES = {"FULL": COLOURS["graph"], "PIECEWISE": COLOURS["padded hit"], "NONE": COLOURS["eager"]}
_MODE_NAMES = {"FULL": "FULL: one graph", "PIECEWISE": "PIECEWISE: graph with breaks", "NONE": "NONE: eager"}
_ALPHAS = {"NONE": 0.5}  # what has no graph stands back
_UBATCHES = (COLOURS["eager"], COLOURS["graph"], COLOURS["padded hit"], COLOURS["difference"], "#7a66d9", "#8c7b6b")
_BREAKS = (COLOURS["difference"], "#7a66d9", COLOURS["eager"], "#8c7b6b")
_BREAK: dict[str, Any] = {"marker": "v", "markersize": 6, "markeredgewidth": 0, "linewidth": 2}
_PADDING: dict[str, Any] = {"fill": False, "edgecolor": INK, "linestyle": (0, (2, 2)), "linewidth": 0.9}
_MOST_NAMED_ROWS = 24


def dispatch_map(dispatch: pd.DataFrame, *, ax: Axes) -> Axes:
    """Modes by number of tokens, a lane for decode and one for mixed batches; each block is one graph, and what it serves.

    In a block, a column is filled as far as the batch fills the graph; the pale rest is padding. The number above it is the captured
    size, where there is room for it.

    Args:
        dispatch: of :func:`~vgraph_lab.inspect.v1_tables.dispatch_table`.
        ax: where to draw; 2.2 inches of height are enough.
    """
    kinds = [kind for kind in ("mixed", "decode") if (dispatch["kind"] == kind).any()]
    most = int(dispatch["num_tokens"].max()) if len(dispatch) else 1
    room = _width_in(ax) * 0.82 / most  # inches of one token
    for lane, kind in enumerate(kinds):
        of_kind = dispatch[dispatch["kind"] == kind]
        step = int(of_kind["num_tokens"].diff().min()) if len(of_kind) > 1 else 1  # decode batches may come in steps of several tokens
        for mode, padded, block in _blocks(of_kind):
            left, right = block[0][0] - step + 0.5, block[-1][0] + 0.5
            _draw_block(mode, block, lane, step, ax)
            name = str(padded) if mode != "NONE" else "no graph"
            if len(name) * _INCHES_PER_LETTER + 0.03 <= (right - left) * room:
                ax.text((left + right) / 2, lane + 0.34, name, ha="center", va="bottom", fontsize=8, color=INK)
    ax.set_yticks(range(len(kinds)), kinds)
    ax.tick_params(axis="y", length=0)
    ax.set_xlim(0.5, most + 0.5)
    ax.set_ylim(-0.5, max(len(kinds), 1) - 0.35)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    ax.set_xlabel("tokens of the batch; above each block the tokens of its graph")
    ax.set_title("Which graph serves which batch")
    modes = [mode for mode in _MODES if (dispatch["mode"] == mode).any()]
    handles = [Patch(facecolor=_MODES[mode], alpha=_ALPHAS.get(mode), edgecolor="none", label=_MODE_NAMES[mode]) for mode in modes]
    if (dispatch["padding_tokens"] > 0).any():
        handles.append(Patch(facecolor=INK, alpha=0.28, edgecolor="none", label="padding, computed for nothing"))
    if handles:
        ax.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.47, -0.3), ncols=4, columnspacing=1.4, handlelength=1.3)
    return ax


_Column = tuple[int, int]  # tokens, and tokens with padding


def _blocks(of_kind: pd.DataFrame) -> Iterator[tuple[str, int, list[_Column]]]:
    """Runs of sizes that one graph serves, or that have none."""
    block: list[_Column] = []
    last: tuple[str, int] | None = None
    for tokens, mode, padded in of_kind[["num_tokens", "mode", "padded_tokens"]].itertuples(index=False):
        key = (str(mode), 0 if mode == "NONE" else int(padded))
        if last is not None and key != last:
            yield *last, block
            block = []
        block.append((int(tokens), int(padded)))
        last = key
    if last is not None:
        yield *last, block


def _draw_block(mode: str, block: list[_Column], lane: int, step: int, ax: Axes) -> None:
    bottom, height, left = lane - 0.3, 0.6, block[0][0] - step + 0.5
    edges = [left, *(tokens + 0.5 for tokens, _ in block)]
    shares = [tokens / padded for tokens, padded in block]
    tops = [bottom + height * share for share in shares]
    colour: dict[str, Any] = {"color": _MODES[mode], "linewidth": 0}
    ax.stairs(tops, edges, baseline=bottom, fill=True, alpha=_ALPHAS.get(mode, 1.0), gid=mode, **colour)
    if min(shares) < 1:
        ax.stairs([bottom + height] * len(tops), edges, baseline=tops, fill=True, alpha=0.28, gid="padding", **colour)
    if mode != "NONE":
        ax.add_patch(Rectangle((left, bottom), edges[-1] - left, height, fill=False, edgecolor=INK, linewidth=0.8, gid="graph"))


def graph_steps(steps: pd.DataFrame, *, ax: Axes) -> Axes:
    """What a replay runs along one pass, a line per graph: segments with their nodes, and gaps where operations run eagerly.

    A gap has no length of its own: what runs there is not in the graph.

    Args:
        steps: of :func:`~vgraph_lab.inspect.v1_tables.graph_steps_table`.
        ax: where to draw; each graph wants about 0.6 inches of height.
    """
    lines = {str(name): line for name, line in steps.groupby("graph", sort=False)}
    breaks = steps[steps["kind"] == "break"]
    times = {str(name): int(per_graph.max()) for name, per_graph in breaks.groupby(["name", "graph"]).size().groupby("name")}
    colours = {name: _BREAKS[number % len(_BREAKS)] for number, name in enumerate(dict.fromkeys(breaks["name"]))}
    gaps = [int((line["kind"] == "break").sum()) for line in lines.values()]
    nodes = [float(line["nodes"].sum()) for line in lines.values()]
    gap = max(nodes, default=1.0) * min(0.04, 0.5 / max([1, *gaps]))
    ax.set_xlim(0, 1.01 * max((own + gap * count for own, count in zip(nodes, gaps, strict=True)), default=1.0))
    for place, line in enumerate(lines.values()):
        _draw_steps(line, place, gap, colours, ax)
    ax.set_yticks(range(len(lines)), [name.replace(" ", "\n", 1) for name in lines])
    ax.tick_params(axis="y", length=0)
    ax.set_ylim(max(len(lines), 1) - 0.4, -0.6)
    ax.set_xticks([])
    ax.spines["bottom"].set_visible(False)
    ax.set_xlabel("one pass, from its first operation to its last; a segment is as long as it has nodes")
    ax.set_title("What a graph holds, and what it leaves out")
    if colours:
        handles = [Line2D([], [], color=colour, label=f"break, {times[name]} ×: {name}", **_BREAK) for name, colour in colours.items()]
        ax.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.45, -0.22), ncols=2, columnspacing=1.6)
    return ax


def _draw_steps(line: pd.DataFrame, place: int, gap: float, colours: dict[str, str], ax: Axes) -> None:
    room, left = _width_in(ax) * 0.75 / ax.get_xlim()[1], 0.0
    colour = _MODES["PIECEWISE" if (line["kind"] == "break").any() else "FULL"]
    for kind, name, nodes in line[["kind", "name", "nodes"]].itertuples(index=False):
        if kind == "break":
            at, ends = [left + gap / 2] * 2, [place - 0.36, place + 0.36]
            ax.plot(at, ends, color=colours[name], markevery=[0], solid_capstyle="butt", gid="break", **_BREAK)
            left += gap
            continue
        ax.add_patch(Rectangle((left, place - 0.25), nodes, 0.5, facecolor=colour, edgecolor="none", gid="segment"))
        words = next((each for each in (f"{nodes} nodes", f"{nodes}") if len(each) * _INCHES_PER_LETTER < nodes * room), "")
        ax.text(left + nodes / 2, place, words, ha="center", va="center", fontsize=8.5, color="#ffffff", weight="bold")
        left += float(nodes)


def ubatch_slices(slices: pd.DataFrame, *, ax: Axes) -> Axes:
    """A batch cut into micro-batches: a line per request, its tokens where they lie in the batch, and the cuts through all of them.

    Args:
        slices: of :func:`~vgraph_lab.inspect.v1_tables.ubatch_slices_table`.
        ax: where to draw; each request wants about 0.25 inches of height.
    """
    requests = sorted(int(number) for number in slices["request"].dropna().unique())
    rows = {number: place for place, number in enumerate(requests)}
    names = [f"request {number}" for number in requests]
    is_padded = (slices["kind"] == "padding").any()
    names += ["padding"] * bool(is_padded)
    end = int(slices["end_token"].max()) if len(slices) else 1
    room = _width_in(ax) * 0.85 / end
    for ubatch, request, first, tokens in slices[["ubatch", "request", "start_token", "tokens"]].itertuples(index=False):
        place = len(requests) if pd.isna(request) else rows[int(request)]
        look = _PADDING if pd.isna(request) else {"facecolor": _ubatch_colour(ubatch), "edgecolor": "none"}
        ax.add_patch(Rectangle((first, place - 0.33), tokens, 0.66, gid="padding" if pd.isna(request) else "request", **look))
        if len(str(tokens)) * _INCHES_PER_LETTER + 0.04 <= tokens * room:
            colour = INK if pd.isna(request) else "#ffffff"
            ax.text(first + tokens / 2, place, str(tokens), ha="center", va="center", fontsize=8.5, color=colour, weight="bold")
    height = max(len(names), 1)
    for ubatch, piece in slices.groupby("ubatch"):
        start, stop = int(piece["start_token"].min()), int(piece["end_token"].max())
        if start:
            ax.plot([start, start], [-1.15, height - 0.5], color=INK, linewidth=1.4, linestyle=(0, (4, 2)), gid="cut")
        words = (f"micro-batch {ubatch!s}: {stop - start} tokens", f"{ubatch!s}: {stop - start} tokens", str(ubatch))
        told = next((each for each in words if len(each) * _INCHES_PER_LETTER * 1.1 <= (stop - start) * room), "")
        ax.text((start + stop) / 2, -0.72, told, ha="center", va="center", fontsize=8.5, color=INK, weight="bold")
    every = -(-len(names) // _MOST_NAMED_ROWS) or 1
    ax.set_yticks(range(0, len(names), every), names[::every])
    ax.tick_params(axis="y", length=0)
    ax.set_ylim(height - 0.5, -1.15)
    ax.set_xlim(0, 1.004 * end)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_xlabel("tokens of the batch, padding included" if is_padded else "tokens of the batch")
    cut = slices.loc[slices["is_cut"], "request"].nunique()
    parts, word = slices["ubatch"].nunique(), "request lies" if cut == 1 else "requests lie"
    idle = [f"micro-batch {number!s} has padding only" for number, piece in slices.groupby("ubatch") if (piece["kind"] == "padding").all()]
    ax.set_title("; ".join([f"{parts} micro-batches", *[f"{cut} {word} on a cut"] * bool(cut), *idle]))
    return ax


def ubatch_timeline(trace: pd.DataFrame, *, ax: Axes) -> Axes:
    """Who ran when: a line per thread with its turns and their hand-overs, and one per stream with the work of all micro-batches.

    What overlaps on the lines of compute and communication ran at the same time. Work that has a name is in full colour, and the name
    is written where there is room.

    Args:
        trace: of :func:`~vgraph_lab.inspect.v1_tables.ubatch_trace_table`.
        ax: where to draw; each line wants about 0.4 inches of height.
    """
    ubatches = sorted(int(number) for number in trace["ubatch"].unique())
    has_turns = (trace["stream"] == "host").any()
    lines: dict[tuple[str, int | None], int] = {("host", number): place for place, number in enumerate(ubatches)} if has_turns else {}
    names = [f"thread {number}" for number in ubatches] if has_turns else []
    for stream, name in (("compute", "compute"), ("comm", "communication")):
        if (trace["stream"] == stream).any():
            lines[stream, None] = len(names)
            names.append(name)
    end = float(trace["end_s"].max()) if len(trace) else 1.0
    begin = float(trace["start_s"].min()) if len(trace) else 0.0
    scale, unit = (1e6, "µs") if end - begin < 2e-3 else (1e3, "ms")
    room = _width_in(ax) * 0.85 / ((end - begin) * scale or 1)
    for start_s, end_s, ubatch, stream, name in trace[["start_s", "end_s", "ubatch", "stream", "name"]].itertuples(index=False):
        place = lines[stream, int(ubatch) if stream == "host" else None]
        left, width = (start_s - begin) * scale, (end_s - start_s) * scale
        is_named = stream != "host" and name not in ("compute", "comm")
        bar: dict[str, Any] = {"color": _ubatch_colour(ubatch), "alpha": 1.0 if is_named else 0.5, "gid": stream}
        ax.add_patch(Rectangle((left, place - 0.3), width, 0.6, linewidth=0.8 if stream == "comm" else 0, **bar))  # seen if short
        if is_named and len(name) * _INCHES_PER_LETTER <= width * room:
            ax.text(left + width / 2, place, name, ha="center", va="center", fontsize=8, color="#ffffff", weight="bold")
    hand_overs = _hand_overs(trace)
    for at_s, until_s, giver, taker in hand_overs:
        ends = ((at_s - begin) * scale, lines["host", giver]), ((until_s - begin) * scale, lines["host", taker])
        arrow = FancyArrowPatch(*ends, arrowstyle="-|>", mutation_scale=7, shrinkA=0, shrinkB=0, color=INK, linewidth=1, gid="hand-over")
        ax.add_patch(arrow)
    ax.set_yticks(range(len(names)), names)
    ax.tick_params(axis="y", length=0)
    ax.set_ylim(max(len(names), 1) - 0.5, -0.5)
    ax.set_xlim(0, (end - begin) * scale or 1)
    ax.grid(axis="x")
    ax.set_xlabel(f"{unit} since the first turn")
    ax.set_title("Who ran when" + (f": {len(hand_overs)} hand-overs" if has_turns else ""))
    handles: list[Any] = [Patch(facecolor=_ubatch_colour(n), edgecolor="none", label=f"micro-batch {n}") for n in ubatches]
    if hand_overs:
        handles.append(Line2D([], [], color=INK, linewidth=1, marker=">", markersize=5, label="hand-over from thread to thread"))
    if handles:
        ax.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.46, -0.3), ncols=5, columnspacing=1.4, handlelength=1.3)
    return ax


def _hand_overs(trace: pd.DataFrame) -> list[tuple[float, float, int, int]]:
    """When each turn ended that another micro-batch got, when that began, who gave and who took."""
    turns = trace.loc[trace["stream"] == "host", ["start_s", "end_s", "ubatch", "hands_to"]].to_dict("records")
    return [
        (float(turn["end_s"]), float(following["start_s"]), int(turn["ubatch"]), int(turn["hands_to"]))
        for turn, following in pairwise(turns)
        if not pd.isna(turn["hands_to"])
    ]


def _ubatch_colour(number: int) -> str:
    return _UBATCHES[int(number) % len(_UBATCHES)]


def _width_in(ax: Axes) -> float:
    """Width of the figure in inches."""
    figure = ax.get_figure(root=True)
    return float(figure.get_figwidth()) if figure is not None else 8.0
