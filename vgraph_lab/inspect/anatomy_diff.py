"""Two graphs side by side: which kinds of work they consist of, which kernels, and how many of each.

::

    print(inspect.anatomy_diff(published, incremental))
    views.show_table(inspect.anatomy_diff(published, incremental).kinds)

Counts say how a graph is built, not where its time goes; :mod:`~.kernel_times` measures that.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import pandas as pd

from vgraph_lab.errors import InputError
from vgraph_lab.graphs.entry import GraphEntry

from .anatomy import Anatomy, anatomy, readable_name
from .recording import Recording
from .records import GraphRecord
from .work_kinds import WORK_KINDS, kind_of_work

__all__ = ["KERNEL_DIFF_COLUMNS", "KIND_DIFF_COLUMNS", "AnatomyDiff", "GraphSource", "anatomy_diff", "nodes_by_kind"]

GraphSource: TypeAlias = "Anatomy | GraphEntry | GraphRecord | str | Path"
"""A graph: live, recorded or taken apart already; or a recording's file that holds one graph."""

_COUNTS = {
    "nodes_a": "nodes of the first graph",
    "nodes_b": "nodes of the second graph",
    "difference": "nodes of the second minus nodes of the first",
}
KIND_DIFF_COLUMNS = {
    "work": "kind of work, told by the kernels' names: " + "; ".join(f"{name}: {meaning}" for name, meaning in WORK_KINDS.items()),
    **_COUNTS,
    "share_a": "of all nodes of the first graph, 0 to 1",
    "share_b": "of all nodes of the second graph, 0 to 1",
}
"""The columns of :attr:`AnatomyDiff.kinds`, in order, with their meaning."""

KERNEL_DIFF_COLUMNS = {
    "work": "kind of work",
    "name": "kernel function (CUDA) or aten overload (CPU); the node's kind where it has no name",
    **_COUNTS,
}
"""The columns of :attr:`AnatomyDiff.kernels`, in order, with their meaning."""

_Key = tuple[str, str]  # kind of work, name


@dataclass(frozen=True)
class AnatomyDiff:
    """What two graphs consist of.

    Attributes:
        a: the first graph.
        b: the second one.
    """

    a: Anatomy
    b: Anatomy

    @property
    def kinds(self) -> pd.DataFrame:
        """Nodes by kind of work, with the columns of :data:`KIND_DIFF_COLUMNS`; kinds that neither graph has are left out."""
        a, b = nodes_by_kind(self.a), nodes_by_kind(self.b)
        rows = [(kind, a.get(kind, 0), b.get(kind, 0), b.get(kind, 0) - a.get(kind, 0)) for kind in WORK_KINDS if kind in a or kind in b]
        table = pd.DataFrame(rows, columns=["work", *_COUNTS])
        for side, nodes in (("a", self.a.nodes), ("b", self.b.nodes)):
            table[f"share_{side}"] = table[f"nodes_{side}"] / len(nodes)
        return table[list(KIND_DIFF_COLUMNS)]

    @property
    def kernels(self) -> pd.DataFrame:
        """Nodes by kernel, the largest difference first, with the columns of :data:`KERNEL_DIFF_COLUMNS`."""
        a, b = _by_name(self.a), _by_name(self.b)
        rows = [(*key, a[key], b[key], b[key] - a[key]) for key in sorted({*a, *b})]
        table = pd.DataFrame(rows, columns=list(KERNEL_DIFF_COLUMNS))
        by_size = table["difference"].abs().sort_values(ascending=False, kind="stable").index
        return table.loc[by_size].reset_index(drop=True)

    def __str__(self) -> str:
        """Both titles, and a line for each kind of work that either graph has."""
        lines = [f"a: {self.a}", f"b: {self.b}", f"{'':18} {'a':>5} {'b':>5} {'b − a':>6}"]
        for work, nodes_a, nodes_b, more in self.kinds[["work", *_COUNTS]].itertuples(index=False, name=None):
            change = f"{more:+d}".replace("-", "−") if more else "="
            lines.append(f"{work!s:18} {nodes_a:5d} {nodes_b:5d} {change:>6}")
        return "\n".join(lines)


def anatomy_diff(a: GraphSource, b: GraphSource) -> AnatomyDiff:
    """Compare what two graphs consist of. They may be of any shapes, Targets, backends and machines.

    Raises:
        InputError: a graph cannot be taken apart (:func:`~.anatomy.anatomy` says why), or a file holds several.
        MissingExtraError: on CUDA, ``cuda-bindings`` is not installed.
    """
    return AnatomyDiff(_taken_apart(a), _taken_apart(b))


def nodes_by_kind(found: Anatomy) -> dict[str, int]:
    """Nodes by kind of work, in the order of :data:`~.work_kinds.WORK_KINDS`, without kinds that do not occur."""
    counts = Counter(kind_of_work(node.name, node.kind) for node in found.nodes)
    return {kind: counts[kind] for kind in WORK_KINDS if counts[kind]}


def _taken_apart(source: GraphSource) -> Anatomy:
    if isinstance(source, Anatomy):
        return source
    if isinstance(source, str | Path):
        return anatomy(_only_graph(Path(source)))
    return anatomy(source)


def _only_graph(path: Path) -> GraphRecord:
    captured = [graph for graph in Recording.load(path).graphs if graph.rejection is None]
    if len(captured) != 1:
        names = ", ".join(f"{graph.target_id} {graph.descriptor}" for graph in captured) or "none"
        raise InputError(
            f"{path} holds {len(captured)} graphs ({names}); one is compared with one. "
            "Load it with Recording.load(path) and choose among its graphs."
        )
    return captured[0]


def _by_name(found: Anatomy) -> Counter[_Key]:
    return Counter((kind_of_work(node.name, node.kind), readable_name(node.name) or node.kind) for node in found.nodes)
