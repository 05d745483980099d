"""One captured CUDA graph and the listing of its nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.cuda import _POOL_HANDLE

from vgraph_lab.errors import BackendError, MissingExtraError, ReplayError
from vgraph_lab.graphs.backends.base import GraphNode, NodeKind

from .pool import CudaPool

__all__ = ["CudaCapturedGraph"]

_KINDS: dict[str, NodeKind] = {
    "CU_GRAPH_NODE_TYPE_KERNEL": "kernel",
    "CU_GRAPH_NODE_TYPE_MEMCPY": "memcpy",
    "CU_GRAPH_NODE_TYPE_MEMSET": "memset",
    "CU_GRAPH_NODE_TYPE_HOST": "host",
    "CU_GRAPH_NODE_TYPE_GRAPH": "child",
    "CU_GRAPH_NODE_TYPE_EMPTY": "empty",
    "CU_GRAPH_NODE_TYPE_WAIT_EVENT": "event",
    "CU_GRAPH_NODE_TYPE_EVENT_RECORD": "event",
}


class CudaCapturedGraph:
    """A ``torch.cuda.CUDAGraph`` that keeps its raw graph, so that nodes can be listed."""

    def __init__(self, graph: torch.cuda.CUDAGraph, pool: CudaPool, handle: _POOL_HANDLE) -> None:
        self._graph: torch.cuda.CUDAGraph | None = graph
        self._pool, self._handle = pool, handle

    def replay(self) -> None:
        """Launch the graph on the current stream of its device."""
        if self._graph is None:
            raise ReplayError("this graph was reset; capture again to get another one.")
        self._graph.replay()

    def reset(self) -> None:
        """Wait for the device, then destroy the graph. Safe to call twice."""
        if self._graph is not None:
            torch.cuda.synchronize(self._pool.device)  # a replay may still be running
            self._graph.reset()
            self._graph = None
            self._pool.release(self._handle)

    def nodes(self) -> Sequence[GraphNode]:
        """The raw graph's nodes in an order that respects their edges.

        Raises:
            MissingExtraError: ``cuda-bindings`` is not installed.
        """
        return [] if self._graph is None else _list_nodes(self._graph.raw_cuda_graph())


def _list_nodes(raw_graph: int) -> list[GraphNode]:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise MissingExtraError("cuda-bindings", "gpu", "listing the nodes of a CUDA graph") from error
    graph = driver.CUgraph(raw_graph)
    _, count = _checked(driver.cuGraphGetNodes(graph))
    nodes, _ = _checked(driver.cuGraphGetNodes(graph, count)) if count else ([], 0)
    *_, edge_count = _checked(driver.cuGraphGetEdges(graph))
    sources, targets, *_ = _checked(driver.cuGraphGetEdges(graph, edge_count)) if edge_count else ([], [])
    successors: dict[int, list[int]] = {int(node): [] for node in nodes}
    predecessors: dict[int, list[int]] = {int(node): [] for node in nodes}
    for source, target in zip(sources, targets, strict=True):
        successors[int(source)].append(int(target))
        predecessors[int(target)].append(int(source))
    order = _topological(successors, predecessors)
    position = {node: index for index, node in enumerate(order)}
    by_address = {int(node): node for node in nodes}
    listing: list[GraphNode] = []
    for address in order:
        kind = _KINDS.get(_checked(driver.cuGraphNodeGetType(by_address[address])).name, "other")
        name = _kernel_name(driver, by_address[address]) if kind == "kernel" else ""
        listing.append(GraphNode(position[address], kind, name, tuple(sorted(position[p] for p in predecessors[address]))))
    return listing


def _topological(successors: dict[int, list[int]], predecessors: dict[int, list[int]]) -> list[int]:
    waiting = {node: len(before) for node, before in predecessors.items()}
    order = [node for node, count in waiting.items() if count == 0]
    for node in order:  # grows while it is walked
        for after in successors[node]:
            waiting[after] -= 1
            if waiting[after] == 0:
                order.append(after)
    return order


def _kernel_name(driver: Any, node: Any) -> str:
    params = _checked(driver.cuGraphKernelNodeGetParams(node))
    name = _checked(driver.cuFuncGetName(params.func) if int(params.func) else driver.cuKernelGetName(params.kern))
    return str(name.decode() if isinstance(name, bytes) else name)


def _checked(result: tuple[Any, ...]) -> Any:
    """Unwrap what a driver call returns, or raise with the driver's name for the error."""
    status, *values = result
    if int(status) != 0:
        raise BackendError(f"the CUDA driver answered {status.name} while listing graph nodes.")
    return values[0] if len(values) == 1 else values
