"""The vLLM v1 path as tables: how every batch is dispatched, what a graph leaves out, how a batch is cut, and who ran when."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd

from vgraph_lab.errors import InputError
from vgraph_lab.graphs import Descriptor, GraphEntry
from vgraph_lab.graphs.backends.base import CapturedGraph
from vgraph_lab.vllm_v1 import (
    BreakableCUDAGraphCapture,
    CudagraphDispatcher,
    DispatchExplanation,
    ExecutionExplanation,
    GPUModelRunner,
    UBatchSlice,
    UBatchSpan,
    UBatchTrace,
)

__all__ = [
    "BATCH_COLUMNS",
    "CANDIDATE_COLUMNS",
    "DISPATCH_COLUMNS",
    "SLICE_COLUMNS",
    "STEP_COLUMNS",
    "TRACE_COLUMNS",
    "batches_table",
    "candidates_table",
    "dispatch_table",
    "graph_steps_table",
    "ubatch_slices_table",
    "ubatch_trace_table",
]

DISPATCH_COLUMNS = {
    "kind": "decode (every request has the tokens of a decode step) or mixed (any other batch)",
    "num_tokens": "tokens of the batch, without padding",
    "mode": "what it runs as: FULL, PIECEWISE or NONE (eager)",
    "padded_tokens": "tokens that are computed: those of the graph, or the batch's own without one",
    "padding_tokens": "of these, tokens computed for nothing",
    "wasted_share": "the same as a share of the padded tokens, 0 to 1",
    "padded_reqs": "requests that the graph holds; missing if it takes any number, and without a graph",
    "descriptor": "the padded batch, which names the graph",
    "reason": "why there is no graph, in the closed set; empty if there is one",
}
"""The columns of :func:`dispatch_table`, in order, with their meaning. Units are in the names."""

BATCH_COLUMNS = {
    "batch": "tokens of each request",
    "num_reqs": "requests of the batch",
    "num_tokens": "tokens of the batch, without padding",
    "kind": "decode (every request has the tokens of a decode step) or mixed",
    "mode": "what it runs as: FULL, PIECEWISE or NONE (eager)",
    "descriptor": "the padded batch, which names the graph if there is one",
    "padding_tokens": "tokens computed for nothing",
    "segments": "pieces of the graph; missing without one, and before the capture",
    "breaks": "operations between them that run eagerly; missing likewise",
    "reason": "why there is no graph, in the closed set; empty if there is one",
}
"""The columns of :func:`batches_table`, in order, with their meaning. Units are in the names."""

CANDIDATE_COLUMNS = {
    "mode": "a runtime mode, in the order in which they were considered",
    "descriptor": "the graph that was looked for; empty if it did not come to that",
    "is_chosen": "whether the batch runs as this",
    "reason": "why not, in the closed set; empty for the chosen one",
    "why_not": "the same in words",
}
"""The columns of :func:`candidates_table`, in order, with their meaning."""

STEP_COLUMNS = {
    "graph": "wrapper and shape",
    "step": "position in the pass, from 0",
    "kind": "segment (replayed as a graph) or break (runs eagerly at each replay)",
    "name": "segment N, or the marked operation's name",
    "nodes": "nodes of the segment; missing for a break",
    "first_node": "nodes of the same graph before this step",
}
"""The columns of :func:`graph_steps_table`, in order, with their meaning."""

SLICE_COLUMNS = {
    "ubatch": "number of the micro-batch",
    "kind": "request, or padding",
    "request": "number of the request in the batch; missing for padding",
    "start_token": "first token of the piece, counted over the whole batch",
    "end_token": "the token after its last one",
    "tokens": "tokens of the piece",
    "is_cut": "whether other tokens of the same request lie in another micro-batch",
}
"""The columns of :func:`ubatch_slices_table`, in order, with their meaning. Units are in the names."""

TRACE_COLUMNS = {
    "start_s": "since the trace began",
    "end_s": "since the trace began",
    "ubatch": "number of the micro-batch",
    "stream": "compute, comm (communication), or host for the turns of threads",
    "name": "what was done; turn on the host",
    "hands_to": "host only: the micro-batch that has the next turn; missing after the last one, and where a micro-batch goes on itself",
}
"""The columns of :func:`ubatch_trace_table`, in order, with their meaning. Units are in the names."""


def dispatch_table(dispatcher: CudagraphDispatcher, max_num_batched_tokens: int) -> pd.DataFrame:
    """How every batch that there can be runs: one row per kind and number of tokens.

    Decode batches have whole requests, ``max_num_seqs`` at most. A single token of a single request is always a decode step, unless
    steps have more; so there is no mixed batch of it.

    Args:
        dispatcher: of a runner (``runner.cudagraph_dispatcher``) or one's own.
        max_num_batched_tokens: tokens of the largest batch.

    Returns:
        The columns of :data:`DISPATCH_COLUMNS`, decode first, each kind by its tokens.

    Raises:
        InputError: no batch has a token.
    """
    if max_num_batched_tokens < 1:
        raise InputError(f"max_num_batched_tokens: the largest batch has one token at least, got {max_num_batched_tokens}.")
    query_len = dispatcher.uniform_decode_query_len
    largest_decode = min(query_len * dispatcher.max_num_seqs, max_num_batched_tokens)
    decode = [_dispatch_row("decode", dispatcher.explain(n, uniform_decode=True)) for n in range(query_len, largest_decode + 1, query_len)]
    mixed = [_dispatch_row("mixed", dispatcher.explain(n)) for n in range(1 + (query_len == 1), max_num_batched_tokens + 1)]
    table = pd.DataFrame([*decode, *mixed], columns=list(DISPATCH_COLUMNS))
    counts = dict.fromkeys(("num_tokens", "padded_tokens", "padding_tokens"), "int64")
    words = dict.fromkeys(("kind", "mode", "descriptor", "reason"), "str")
    return table.astype({**counts, **words, "wasted_share": "float64", "padded_reqs": "Int64"})


def batches_table(runner: GPUModelRunner, batches: Iterable[Sequence[int]]) -> pd.DataFrame:
    """How batches would run, one row each; nothing runs. Other data-parallel ranks must ask for as many at the same time.

    Args:
        runner: captured or not.
        batches: tokens of each request, for each batch.

    Returns:
        The columns of :data:`BATCH_COLUMNS`, in the order of the batches.

    Raises:
        InputError: a batch has no request, or a request no token.
    """
    graphs = {entry.descriptor: entry.graph for entry in runner.graphs.entries()}
    rows = [_batch_row(tokens, runner.explain(tokens), graphs) for tokens in batches]
    counts = {**dict.fromkeys(("num_reqs", "num_tokens", "padding_tokens"), "int64"), "segments": "Int64", "breaks": "Int64"}
    words = dict.fromkeys(("batch", "kind", "mode", "descriptor", "reason"), "str")
    return pd.DataFrame(rows, columns=list(BATCH_COLUMNS)).astype({**counts, **words})


def candidates_table(explanation: DispatchExplanation | ExecutionExplanation) -> pd.DataFrame:
    """What one batch could have run as, one row per candidate, the chosen one last.

    Args:
        explanation: of a dispatcher, or of a runner (then of the dispatch of this rank alone).

    Returns:
        The columns of :data:`CANDIDATE_COLUMNS`.
    """
    dispatch = explanation.dispatch if isinstance(explanation, ExecutionExplanation) else explanation
    rows = [
        {
            "mode": str(each.mode),
            "descriptor": str(each.descriptor or ""),
            "is_chosen": each.reason is None,
            "reason": str(each.reason or ""),
            "why_not": each.why_not,
        }
        for each in dispatch.candidates
    ]
    return pd.DataFrame(rows, columns=list(CANDIDATE_COLUMNS))


def graph_steps_table(*entries: GraphEntry) -> pd.DataFrame:
    """What one replay of each graph runs, in order: segments, and the breaks between them. A FULL graph is one segment.

    Args:
        entries: of wrappers, such as ``runner.graphs.entries()`` lists them.

    Returns:
        The columns of :data:`STEP_COLUMNS`, graph after graph.

    Raises:
        InputError: a graph was reset and holds nothing.
        MissingExtraError: nodes of a CUDA graph cannot be listed, ``cuda-bindings`` is missing.
    """
    rows = [row for entry in entries for row in _step_rows(f"{entry.target_id} {entry.descriptor}", entry.graph)]
    table = pd.DataFrame(rows, columns=list(STEP_COLUMNS))
    return table.astype({**dict.fromkeys(("graph", "kind", "name"), "str"), "step": "int64", "nodes": "Int64", "first_node": "Int64"})


def ubatch_slices_table(num_scheduled_tokens: Sequence[int], slices: Sequence[UBatchSlice]) -> pd.DataFrame:
    """What each micro-batch gets of each request, piece by piece in the order of tokens; tokens after the last request are padding.

    Args:
        num_scheduled_tokens: tokens of each request.
        slices: of :func:`~vgraph_lab.vllm_v1.maybe_create_ubatch_slices`, padded or not.

    Returns:
        The columns of :data:`SLICE_COLUMNS`. A micro-batch without any token has no row.

    Raises:
        InputError: the slices do not hold all tokens of the requests, each once.
    """
    ends = np.concatenate([[0], np.cumsum(np.asarray(num_scheduled_tokens, np.int64))]).tolist()
    spans = [(each.token_slice.start, max(each.token_slice.start, each.token_slice.stop)) for each in slices]
    if not spans or any(stop != start for (_, stop), (start, _) in pairwise(spans)) or spans[0][0] != 0 or spans[-1][1] < ends[-1]:
        told = "; ".join(map(str, slices)) or "none"
        raise InputError(f"slices must follow each other from token 0 to {ends[-1]}, the last one of the requests, or beyond; got {told}.")
    owners: list[tuple[int | None, int, int]] = [(number, *span) for number, span in enumerate(pairwise(ends))]
    rows = []
    for ubatch, (start, stop) in enumerate(spans):
        for request, begin, end in [*owners, (None, ends[-1], max(stop, ends[-1]))]:
            first, last = max(begin, start), min(end, stop)
            if first < last:
                row = {"ubatch": ubatch, "kind": "padding" if request is None else "request", "request": request}
                row |= {"start_token": first, "end_token": last, "tokens": last - first}
                rows.append(row | {"is_cut": request is not None and (first, last) != (begin, end)})
    table = pd.DataFrame(rows, columns=list(SLICE_COLUMNS))
    counts = dict.fromkeys(("ubatch", "start_token", "end_token", "tokens"), "int64")
    return table.astype({**counts, "kind": "str", "request": "Int64", "is_cut": "bool"})


def ubatch_trace_table(trace: UBatchTrace | Iterable[UBatchSpan]) -> pd.DataFrame:
    """The spans of micro-batches by their beginning, and to whom each turn of a thread was handed over.

    Args:
        trace: a trace between steps, or spans.

    Returns:
        The columns of :data:`TRACE_COLUMNS`.

    Raises:
        LifecycleError: a step of the trace is under way.
    """
    spans = sorted(trace.spans() if isinstance(trace, UBatchTrace) else trace, key=lambda span: (span.start_s, span.end_s))
    turns = [(number, span.ubatch) for number, span in enumerate(spans) if span.stream == "host"]
    takers = {number: taker for (number, giver), (_, taker) in pairwise(turns) if giver != taker}
    rows = [(each.start_s, each.end_s, each.ubatch, each.stream, each.name, takers.get(n)) for n, each in enumerate(spans)]
    types = {"start_s": "float64", "end_s": "float64", "ubatch": "int64", "stream": "str", "name": "str", "hands_to": "Int64"}
    return pd.DataFrame(rows, columns=list(TRACE_COLUMNS)).astype(types)


def _dispatch_row(kind: str, found: DispatchExplanation) -> dict[str, Any]:
    padded = found.descriptor.num_tokens
    return {
        "kind": kind,
        "num_tokens": found.num_tokens,
        "mode": str(found.mode),
        "padded_tokens": padded,
        "padding_tokens": found.num_paddings,
        "wasted_share": found.num_paddings / padded,
        "padded_reqs": found.descriptor.num_reqs,
        "descriptor": str(found.descriptor),
        "reason": str(found.fallback_reason or ""),
    }


def _batch_row(tokens: Sequence[int], found: ExecutionExplanation, graphs: Mapping[Descriptor, CapturedGraph]) -> dict[str, Any]:
    done = found.execution
    graph = graphs.get(done.batch_descriptor) if found.runs_as else None
    pieces: tuple[int | None, int | None] = (None, None) if graph is None else (1, 0)
    if isinstance(graph, BreakableCUDAGraphCapture):
        pieces = graph.num_graphs, graph.num_eager_breaks
    return {
        "batch": " + ".join(map(str, tokens)),
        "num_reqs": len(tokens),
        "num_tokens": sum(tokens),
        "kind": "decode" if found.uniform_decode else "mixed",
        "mode": str(found.runs_as),
        "descriptor": str(done.batch_descriptor),
        "padding_tokens": done.cudagraph_stats.num_paddings,
        "segments": pieces[0],
        "breaks": pieces[1],
        "reason": str(found.fallback_reason or ""),
    }


def _step_rows(name: str, graph: CapturedGraph) -> list[dict[str, Any]]:
    steps = graph.segments if isinstance(graph, BreakableCUDAGraphCapture) else [("whole pass", graph)]
    if not steps or (len(steps) == 1 and not isinstance(graph, BreakableCUDAGraphCapture) and not graph.nodes()):
        raise InputError(f"{name} holds nothing: its graph was reset. Make the table before the graphs are cleared.")
    rows: list[dict[str, Any]] = []
    first_node = 0
    for number, (step_name, step) in enumerate(steps):
        nodes = len(step.nodes()) if isinstance(step, CapturedGraph) else None
        kind = "break" if nodes is None else "segment"
        rows.append({"graph": name, "step": number, "kind": kind, "name": step_name, "nodes": nodes, "first_node": first_node})
        first_node += nodes or 0
    return rows
