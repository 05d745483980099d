"""The search behind the planner: sets of capture sizes that nothing beats, by dynamic programming over labels.

A label is one set of sizes, chosen so far, in figures of which fewer are better (benefits are negative). A label may be dropped
as soon as another one in the same place is at least as good in every figure: whatever is added later adds the same to both.

Graphs of one pool share memory. So what a graph needs is split into what is its own (static buffers and output), which adds up,
and its intermediates, of which the pool holds the largest only; labels carry that maximum as a figure of its own, because the
larger of two maxima may or may not matter later. All figures are whole numbers (frames, nanoseconds, bytes, microseconds), so
that no order of additions changes a result.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from vgraph_lab.errors import InputError

__all__ = [
    "ADDED",
    "AUDIO",
    "BYTES",
    "CALLS",
    "CAPTURE",
    "CHOICE",
    "COMPUTED",
    "FINISHED",
    "REQUESTED",
    "SAVED",
    "Choices",
    "Ints",
    "chain",
    "extended",
    "finished",
    "merged",
    "pruned",
    "start",
]

Ints = npt.NDArray[np.int64]

CALLS, AUDIO, SAVED, OWN, CAPTURE, SHARED, COMPUTED, REQUESTED, CHOICE, ADDED = range(10)
"""Columns of labels: minus calls, minus audio frames, minus ns saved; own bytes, capture µs, shared bytes; rows × frames
that the graphs compute and that calls asked for; the set itself (an id of :class:`Choices`), and what was added to it last."""
BENEFITS = (CALLS, AUDIO, SAVED)
BYTES = OWN  # once shared bytes are added to it
PARTIAL = (*BENEFITS, OWN, CAPTURE, SHARED)
"""Figures in which a set that may grow must not be beaten."""
FINISHED = (*BENEFITS, BYTES, CAPTURE)
"""Figures in which a finished one must not be."""
LABEL_LIMIT = 200_000
"""More labels than these are refused; they would take minutes and gigabytes."""

_WIDTH, _BLOCK, _NOTHING = 10, 256, 0


class Choices:
    """Sets of items, each stored as two smaller ones, so that a million sets take little memory.

    Ids from 0 up are sets (0 is the empty one); an item k is the id ``-1 - k``.
    """

    def __init__(self) -> None:
        self._parts: list[Ints] = [np.zeros((1, 2), dtype=np.int64)]
        self._starts = [0]
        self._size = 1

    def add(self, labels: Ints) -> Ints:
        """Give each label's set and what was added to it one new id, in place; returns the labels."""
        self._parts.append(labels[:, [CHOICE, ADDED]].copy())
        self._starts.append(self._size)
        labels[:, CHOICE] = np.arange(self._size, self._size + len(labels))
        labels[:, ADDED] = _NOTHING
        self._size += len(labels)
        return labels

    def items(self, choice: int) -> list[int]:
        """The items of a set, ascending."""
        found: list[int] = []
        stack = [choice]
        while stack:
            part = stack.pop()
            if part < 0:
                found.append(-1 - part)
            elif part:
                block = bisect_right(self._starts, part) - 1
                stack += self._parts[block][part - self._starts[block]].tolist()
        return sorted(found)


def start() -> Ints:
    """The label of the empty set: int64 [1, columns]."""
    return np.zeros((1, _WIDTH), dtype=np.int64)


def pruned(labels: Ints, columns: Sequence[int] = PARTIAL) -> Ints:
    """Labels that no other one equals or beats in all these columns; of equal ones the first stays.

    Sorted, a label can only be beaten by one before it. Blocks are compared with what is kept, then within themselves.

    Raises:
        InputError: too many are left to go on.
    """
    columns = [c for c in columns if len(labels) and labels[:, c].min() != labels[:, c].max()] or [columns[0]]
    order = np.lexsort(tuple(labels[:, c] for c in reversed(columns)))
    labels = labels[order]
    keys = labels[:, columns]
    distinct = np.ones(len(keys), dtype=bool)
    distinct[1:] = (keys[1:] != keys[:-1]).any(axis=1)
    labels, keys = labels[distinct], keys[distinct, 1:]  # sorted by the first column: nothing before is larger there
    kept: list[int] = []
    front = np.empty((0, keys.shape[1]), dtype=np.int64)
    for begin in range(0, len(keys), _BLOCK):
        places = np.arange(begin, min(begin + _BLOCK, len(keys)))
        places = places[~_beaten(keys[places], front)]
        block = keys[places]
        inside = np.tril(_at_most(block, block), k=-1).any(axis=1)
        kept += places[~inside].tolist()
        front = np.concatenate([front, block[~inside]])
        if len(kept) > LABEL_LIMIT:
            raise InputError(
                f"more than {LABEL_LIMIT:,} sets of sizes beat each other in something. Give fewer candidates (batch_sizes, frame_sizes)."
            )
    return labels[kept]


def _at_most(one: Ints, other: Ints) -> npt.NDArray[np.bool_]:
    """[i, j]: whether ``other[j]`` is at most ``one[i]`` in every column."""
    result = np.ones((len(one), len(other)), dtype=bool)
    for column in range(one.shape[1]):
        result &= other[:, column][None, :] <= one[:, column][:, None]
    return result


def _beaten(block: Ints, front: Ints) -> npt.NDArray[np.bool_]:
    return np.asarray(_at_most(block, front).any(axis=1))


def chain(gains: Ints, costs: Ints, choices: Choices, *, forced: Sequence[int] = ()) -> Ints:
    """All sets of sizes along one axis that nothing beats; a call is served by the smallest size that it fits.

    So what a size serves depends on the next smaller one only::

        sizes     1   2       4           8
        chosen        ●                   ●
        served    ╰──▶╯ ╰────────────────▶╯     by 2: calls of 1 and 2; by 8: calls of 3 … 8

    Args:
        gains: int64 [n + 1, n, 5]: minus calls, audio and time, then computed and requested frames, that size j serves if i is
            the next smaller one (0: none, i: size i - 1).
        costs: int64 [n, 3]: own bytes, capture µs and shared bytes of each size.
        choices: where sets are kept.
        forced: places of sizes that every set holds. Without any, the empty set is one of the results.

    Returns:
        Labels; their sets hold places of sizes.
    """
    count, must = len(costs), set(forced)
    ending = [start()]  # the sets whose largest size is none, size 0, size 1, …
    for j in range(count):
        first = max((i + 1 for i in must if i < j), default=0)
        incoming = [extended(ending[i], gains[i, j], costs[j], j) for i in range(first, j + 1)]
        ending.append(choices.add(pruned(np.concatenate(incoming))))
    last = max((i + 1 for i in must), default=0)
    return np.concatenate(ending[last:])


def extended(labels: Ints, gain: Ints, cost: Ints | None = None, item: int = -1) -> Ints:
    """Labels that serve more, and hold one more item if it has a cost.

    Args:
        labels: int64 [labels, columns].
        gain: int64 [5]; see :func:`chain`.
        cost: int64 [3]; see there. None: nothing is added, the present graphs serve more.
        item: what is added.
    """
    result = labels.copy()
    result[:, list(BENEFITS)] += gain[:3]
    result[:, [COMPUTED, REQUESTED]] += gain[3:]
    if cost is not None:
        result[:, OWN] += cost[0]
        result[:, CAPTURE] += cost[1]
        result[:, SHARED] = np.maximum(result[:, SHARED], cost[2])
        result[:, ADDED] = -1 - item
    return result


def merged(one: Ints, other: Ints, choices: Choices) -> Ints:
    """All unions of a set of one and a set of another family that nothing beats; they serve different calls.

    Raises:
        InputError: there are too many to compare.
    """
    if len(one) * len(other) > 100 * LABEL_LIMIT:
        raise InputError(
            f"{len(one):,} × {len(other):,} sets of graphs are too many to compare. Give fewer candidates (batch_sizes, frame_sizes)."
        )
    return choices.add(pruned(np.concatenate(list(_pairs(one, other)))))


def _pairs(one: Ints, other: Ints) -> Iterator[Ints]:
    """Sums with every label of the smaller family, pruned one by one to keep memory small."""
    few, many = sorted((one, other), key=len)
    for label in few:
        result = many + label
        result[:, SHARED] = np.maximum(many[:, SHARED], label[SHARED])
        result[:, CHOICE], result[:, ADDED] = many[:, CHOICE], label[CHOICE]
        yield result


def finished(labels: Ints) -> Ints:
    """Labels with their bytes in one figure; those that nothing beats any more."""
    labels = labels.copy()
    labels[:, BYTES] += labels[:, SHARED]
    labels[:, SHARED] = 0
    return pruned(labels, FINISHED)
