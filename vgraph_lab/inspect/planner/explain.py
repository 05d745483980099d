"""A choice of capture sizes in words: what each size serves, what it costs, what would be lost without it."""

from __future__ import annotations

from collections.abc import Iterator

from vgraph_lab.graphs.table import MIB

from .demand import Demand
from .grids import StatelessGrid, StreamingGrid
from .shapes import Shape, descriptor_of
from .spaces import Choice, Space

__all__ = ["explain_choice"]


def explain_choice(demand: Demand, space: Space, choice: Choice) -> list[str]:
    """One sentence or two for each size that could be left out, largest first.

    What a size costs is what the others would not need: of memory that graphs share, only what no other one holds as well.
    """
    return [*(_told(demand, choice, name, rest, always) for name, rest, always in _parts(space, choice)), *_too_many_rows(demand, choice)]


def _too_many_rows(demand: Demand, choice: Choice) -> list[str]:
    largest = max(choice.batch_sizes, default=0)
    calls = int(demand.calls[demand.rows > largest].sum())
    if not largest or not calls:
        return []
    return [
        f"{_calls(calls)} with more rows than the largest batch size, {largest}: counted as eager. The model splits such groups "
        "into calls that fit, so in truth they come as more calls, which hit."
    ]


_Part = tuple[str, tuple[Shape, ...], str]  # its name, the graphs that would be left, why it cannot be left out ("" if it can)


def _parts(space: Space, choice: Choice) -> Iterator[_Part]:
    if isinstance(space, StreamingGrid):
        for target in choice.targets if len(choice.targets) > 1 else ():
            yield f"Target {target}", space.graphs([t for t in choice.targets if t != target], choice.batch_sizes), ""
        for size in reversed(choice.batch_sizes):
            yield f"batch size {size}", space.graphs(choice.targets, [s for s in choice.batch_sizes if s != size]), ""
    elif isinstance(space, StatelessGrid):
        for size in reversed(choice.batch_sizes):
            yield f"batch size {size}", space.graphs([s for s in choice.batch_sizes if s != size], choice.frame_sizes), ""
        for size in reversed(choice.frame_sizes):
            always = "It is always captured." if size in space.forced else ""
            yield f"bucket of {size} frames", space.graphs(choice.batch_sizes, [s for s in choice.frame_sizes if s != size]), always
    else:
        for graph in choice.graphs:
            yield f"{graph.target} {descriptor_of(graph)}", tuple(g for g in choice.graphs if g != graph), ""


def _told(demand: Demand, choice: Choice, name: str, rest: tuple[Shape, ...], always: str) -> str:
    whole, without, left = demand.serve(choice.graphs), demand.serve(rest), set(rest)
    mine = [place for place, graph in enumerate(choice.graphs) if graph not in left]
    by_it = demand.figures[[place in set(mine) for place in whole.graph.tolist()]].sum(axis=0)
    calls, lost = int(by_it[0]), whole.calls - without.calls
    total = int(demand.calls.sum())
    cost_bytes, cost_s = whole.charge_bytes - without.charge_bytes, (whole.capture_us - without.capture_us) / 1e6
    saved_s = (whole.saved_ns - without.saved_ns) / 1e9
    moved = calls - lost
    fates = [
        f"{_calls(lost)} ({lost / total:.1%}) would run eager" if lost else "",
        f"{moved:,} would use larger graphs" if moved else "",
    ]
    fate = " and ".join(part for part in fates if part) or "nothing would change"
    change = f", {abs(saved_s):.3g} s {'more' if saved_s > 0 else 'less'} in all" if saved_s else ""
    graphs = f"{len(mine)} graph{'' if len(mine) == 1 else 's'}"
    return (
        f"{name} ({graphs}): serves {_calls(calls)} ({calls / total:.1%}); takes {cost_bytes / MIB:,.2f} MiB and {cost_s:.2f} s of "
        f"capture. {always or 'Without it'}{'' if not always else ' Otherwise'} {fate}{change}."
    )


def _calls(count: int) -> str:
    return f"{count:,} call{'' if count == 1 else 's'}"
