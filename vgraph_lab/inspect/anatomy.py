"""What one graph is made of: its nodes by kind and name, their dependencies as DOT text, and the module behind each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import pandas as pd
import torch

from vgraph_lab.errors import InputError
from vgraph_lab.graphs.backends.base import GraphNode, count_nodes
from vgraph_lab.graphs.entry import GraphEntry

from .modules import launching_modules
from .pool_layout import Graphs
from .records import GraphRecord

__all__ = ["KERNEL_COLUMNS", "MODULE_COLUMNS", "Anatomy", "anatomy", "readable_name"]

KERNEL_COLUMNS = {
    "kind": "what such nodes do: kernel, memcpy, memset, host, event, child, empty or other",
    "name": "kernel function (CUDA) or aten overload (CPU); empty for kinds that have none",
    "nodes": "how many there are",
    "nodes_share": "of all nodes of the graph, 0 to 1",
}
"""The columns of :attr:`Anatomy.kernels`, in order, with their meaning."""

MODULE_COLUMNS = {
    "module": "innermost module that was running, as Class.path.inside; empty for what ran outside of all",
    "nodes": "nodes that it launched, without those of modules inside it",
    "nodes_share": "of all nodes of the graph, 0 to 1",
}
"""The columns of :attr:`Anatomy.by_module`, in order, with their meaning."""

_LOOKS = {
    "kernel": 'shape=box, style="rounded"',
    "memcpy": "shape=cds",
    "memset": "shape=box",
    "host": "shape=house",
    "event": "shape=diamond",
    "child": "shape=folder",
    "empty": "shape=point",
    "other": "shape=ellipse",
}
_MOST_LETTERS = 60


@dataclass(frozen=True)
class Anatomy:
    """The nodes of one graph.

    Attributes:
        title: Target and Descriptor.
        nodes: in an order that respects their dependencies.
        modules: what launched each of them; None if nobody asked.
    """

    title: str
    nodes: tuple[GraphNode, ...]
    modules: tuple[str, ...] | None = None

    @property
    def counts(self) -> dict[str, int]:
        """Nodes by kind, most frequent first."""
        return count_nodes(self.nodes)

    @property
    def kernels(self) -> pd.DataFrame:
        """Nodes by kind and name, most frequent first, with the columns of :data:`KERNEL_COLUMNS`."""
        counted = Counter((node.kind, readable_name(node.name)) for node in self.nodes)
        rows = [(kind, name, count, count / len(self.nodes)) for (kind, name), count in counted.items()]
        table = pd.DataFrame(rows, columns=list(KERNEL_COLUMNS)).astype({"nodes": "int64", "nodes_share": "float64"})
        return table.sort_values(["nodes", "kind", "name"], ascending=[False, True, True], ignore_index=True)

    @property
    def by_module(self) -> pd.DataFrame:
        """Nodes by module, in the order in which modules first launch one, with the columns of :data:`MODULE_COLUMNS`.

        Raises:
            InputError: the modules are not known.
        """
        if self.modules is None:
            raise InputError(
                f"{self.title}: the modules are not known. Ask for them: anatomy(entry, manager) or record(..., modules=True)."
            )
        rows = [(module, count, count / len(self.nodes)) for module, count in Counter(self.modules).items()]
        return pd.DataFrame(rows, columns=list(MODULE_COLUMNS)).astype({"nodes": "int64", "nodes_share": "float64"})

    def dot(self, *, collapse: bool = False) -> str:
        """The graph in Graphviz's language, the same text for the same nodes.

        Args:
            collapse: draw a run as one box. Where modules are known, a run is what one module launches in a row; otherwise it
                is nodes of one kind and name of which each has the one before as its only dependency and nothing else waits
                for that one.
        """
        runs = list(self._runs()) if collapse else [[node] for node in self.nodes]
        box = {node.index: number for number, run in enumerate(runs) for node in run}
        lines = [f"digraph {_quoted(self.title)} {{", f"  label={_quoted(self.title)};", '  node [fontname="Helvetica", fontsize=10];']
        for number, run in enumerate(runs):
            lines.append(f"  n{number} [label={_quoted(self._label(run))}, {_LOOKS[run[0].kind]}];")
        for number, run in enumerate(runs):
            before = {box[index] for node in run for index in node.dependencies} - {number}
            lines += [f"  n{source} -> n{number};" for source in sorted(before)]
        return "\n".join([*lines, "}", ""])

    def _label(self, run: list[GraphNode]) -> str:
        name = _shortened(readable_name(run[0].name)) or run[0].kind
        module = self.modules[run[0].index] if self.modules else ""
        if len(run) == 1:
            return f"{module}\n{name}" if module else name
        return f"{module or name}\n{len(run)} nodes"

    def _runs(self) -> Iterator[list[GraphNode]]:
        """Nodes that follow each other in the listing and are drawn as one. No cycle can come of it: edges lead onwards."""
        waiting = Counter(before for node in self.nodes for before in node.dependencies)
        run: list[GraphNode] = []
        for node in self.nodes:
            if run and not self._continues(run[-1], node, waiting):
                yield run
                run = []
            run.append(node)
        if run:
            yield run

    def _continues(self, last: GraphNode, node: GraphNode, waiting: Counter[int]) -> bool:
        if self.modules is not None:
            return self.modules[last.index] == self.modules[node.index] != ""
        is_next = node.dependencies == (last.index,) and waiting[last.index] == 1
        return is_next and (node.kind, node.name) == (last.kind, last.name)

    def __str__(self) -> str:
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.counts.items())
        return f"{self.title}: {len(self.nodes)} nodes ({kinds})"


def anatomy(graph: GraphEntry | GraphRecord, manager: Graphs | None = None) -> Anatomy:
    """Take a captured graph apart.

    A live entry is listed by its backend: on CUDA the raw graph that capture kept, on the CPU the tape.

    Args:
        graph: of ``manager.entries()``, or of ``recording.graphs``.
        manager: find out which module launched each node of this Manager's entry
            (:func:`~vgraph_lab.inspect.modules.launching_modules`; CPU only). A recording has what was recorded.

    Raises:
        InputError: the Descriptor has no graph, the graph was reset, or the recording was made with ``nodes=False``; or the
            modules cannot be found out.
        MissingExtraError: on CUDA, ``cuda-bindings`` is not installed.
    """
    title = f"{graph.target_id} {graph.descriptor}"
    if isinstance(graph, GraphRecord):
        if graph.rejection is not None:
            why = f"{graph.rejection.reason}: {graph.rejection.detail}"
            raise InputError(f"{title} has no graph ({why}), so there is nothing to take apart.")
        if not graph.nodes:
            raise InputError(f"{title}: the recording lists no nodes. Record with nodes=True.")
        return Anatomy(title, graph.nodes, graph.modules or None)
    nodes = tuple(graph.graph.nodes())
    if not nodes:
        raise InputError(f"{title}: the graph was reset and has no nodes any more. Look at it before clear().")
    return Anatomy(title, nodes, None if manager is None else launching_modules(manager, graph))


@cache
def readable_name(name: str) -> str:
    """A kernel's name as a person writes it: C++ names demangled, others as they are."""
    demangle: Callable[[str], str] = torch._C._demangle
    return demangle(name) if name.startswith("_Z") else name


def _shortened(name: str) -> str:
    """A C++ signature without its result, template and call arguments, unless that leaves nothing."""
    short = name.removeprefix("void ").split("<")[0].split("(")[0].strip() or name
    return short if len(short) <= _MOST_LETTERS else f"{short[: _MOST_LETTERS - 1]}…"


def _quoted(text: str) -> str:
    r"""A DOT string: quotes and backslashes are escaped, and a new line is ``\n``."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
