"""How statistics read."""

from __future__ import annotations

from vgraph_lab.errors import FallbackReason
from vgraph_lab.graphs import CallKind, Descriptor, StatsSnapshot

D = Descriptor(1, 4)
HIT, MISS, BROKEN = CallKind("t", D, D), CallKind("t", D, reason=FallbackReason.CAPACITY), CallKind("t", D, D, error="ValueError")


def test_numbers_agree_with_their_nouns() -> None:
    assert str(StatsSnapshot({})) == "0 calls: 0 hits, 0 fallbacks, 0 replay errors"
    assert str(StatsSnapshot({HIT: 1})) == "1 call: 1 hit (100.0%), 0 fallbacks, 0 replay errors"
    one_each = {HIT: 2, MISS: 1, BROKEN: 1}
    assert str(StatsSnapshot(one_each)) == "4 calls: 2 hits (50.0%), 1 fallback (capacity 1), 1 replay error"


def test_retirements_are_told_if_there_were_any() -> None:
    assert str(StatsSnapshot({HIT: 2}, retirements=1, retirement_s=0.256)).endswith("0 replay errors; 1 generation retired in 0.26 s")
    assert str(StatsSnapshot({}, retirements=3, retirement_s=2)).endswith("; 3 generations retired in 2.00 s")
