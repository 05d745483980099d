"""A captured CPU graph."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from vgraph_lab.errors import ForkedProcessError, ReplayError
from vgraph_lab.graphs.backends.base import GraphNode

from .arena import ArenaPool, Lease
from .nodes import graph_nodes
from .record import Record
from .session import is_capturing

__all__ = ["CpuGraph"]


class CpuGraph:
    """Recorded aten calls that run again on the recorded memory (a :class:`~vgraph_lab.graphs.backends.base.CapturedGraph`).

    The recording keeps tensors from outside (static inputs, weights) alive: a weight that is updated in place is seen
    by the next replay, one whose ``.data`` is rebound is not.
    """

    def __init__(self, records: Sequence[Record], pool: ArenaPool, lease: Lease) -> None:
        self._records: Sequence[Record] = tuple(records)
        self._steps = [record.run for record in records]
        self._pool, self._lease = pool, lease
        self._process = os.getpid()
        self._nodes: tuple[GraphNode, ...] | None = None
        self._valid = True

    @property
    def records(self) -> Sequence[Record]:
        """The recorded operations, in order. Empty after :meth:`reset`."""
        return self._records

    def replay(self) -> None:
        """Run the recorded work on the recorded memory, whatever modes the caller has active.

        Raises:
            ReplayError: the graph was reset, the caller is inside a capture, which would not record the replay, or an
                operation gave another shape than when it was captured.
            ForkedProcessError: this process is a fork of the one that captured.
        """
        if os.getpid() != self._process:
            raise ForkedProcessError("this graph was captured in the parent process; capture again in this one")
        if is_capturing():
            raise ReplayError("a replay inside a capture would not be part of the new graph; call the eager function there")
        with self._pool.exclusive():
            if not self._valid:
                raise ReplayError("this graph was reset and holds nothing to replay; capture it again")
            # no_grad is not for autograd, which has nothing to record here: some kernels choose their algorithm by it.
            with (
                torch._C.DisableTorchFunction(),
                torch._C._DisableTorchDispatch(),
                torch.no_grad(),
                torch._C._DisableAutocast(),
            ):
                for run in self._steps:
                    run()

    def reset(self) -> None:
        """Release the recording and its claim on the pool's segments. Live outputs keep their bytes. Safe to call twice."""
        with self._pool.exclusive():
            self._valid = False
            self._records, self._nodes = (), ()
            self._steps.clear()
            self._lease.release()

    def nodes(self) -> Sequence[GraphNode]:
        """The recorded operations with their dependencies. Empty after :meth:`reset`."""
        if self._nodes is None:
            self._nodes = graph_nodes(self._records)
        return self._nodes
