"""Requests drawn from a pool."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vgraph_lab import bundled
from vgraph_lab.errors import InputError
from vgraph_lab.workload import ServiceRequest, draw_requests

POOL = {name: torch.full((2, 3 + n), n) for n, name in enumerate("abcde")}


def same(one: ServiceRequest, other: ServiceRequest) -> bool:
    references = [r.reference for r in (one, other)]
    return (
        (one.id, one.utterance) == (other.id, other.utterance)
        and torch.equal(one.codes, other.codes)
        and (references[0] is references[1] or (None not in references and torch.equal(references[0], references[1])))  # type: ignore[arg-type]
    )


@given(count=st.integers(1, 23), seed=st.integers(0, 5), kind=st.sampled_from(["icl", "xvec", "mixed"]))
def test_drawn_by_seed_and_evenly(count: int, seed: int, kind: Any) -> None:
    drawn = draw_requests(count, kind=kind, codes=POOL, seed=seed)
    assert all(same(a, b) for a, b in zip(drawn, draw_requests(count, kind=kind, codes=POOL, seed=seed), strict=True))
    assert len({request.id for request in drawn}) == count
    names = [request.utterance for request in drawn]
    for start in range(0, count, len(POOL)):
        assert len(set(names[start : start + len(POOL)])) == len(names[start : start + len(POOL)])
    for index, request in enumerate(drawn):
        assert request.codes is POOL[request.utterance]
        assert request.frames == request.codes.shape[1]
        expects_reference = kind == "icl" or (kind == "mixed" and index % 2 == 0)
        assert (request.reference is not None) == expects_reference
        if request.reference is not None:
            assert any(request.reference is codes for name, codes in POOL.items() if name != request.utterance)


def test_another_seed_is_another_order() -> None:
    assert len({tuple(r.utterance for r in draw_requests(5, codes=POOL, seed=seed)) for seed in range(5)}) > 1


def test_references_are_of_the_same_speaker_where_there_is_one() -> None:
    speakers = {"a": "x", "b": "y", "c": "x", "d": "z"}
    for seed in range(5):
        by_name = {r.utterance: r.reference for r in draw_requests(5, kind="icl", codes=POOL, speakers=speakers, seed=seed)}
        assert by_name["a"] is POOL["c"]
        assert by_name["c"] is POOL["a"]
        assert by_name["b"] is not POOL["b"], "another speaker is better than the same words"
    (alone,) = draw_requests(1, kind="icl", codes={"a": POOL["a"]})
    assert alone.reference is POOL["a"], "a pool of one has no choice"


def test_the_bundled_clips() -> None:
    clips = {clip.id: clip for clip in bundled.utterances()}
    drawn = draw_requests(len(clips), kind="icl")
    assert {request.utterance for request in drawn} == set(clips)
    assert all(request.codes.shape[0] == 16 for request in drawn)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"count": 0, "codes": POOL}, "0 requests of 5 utterances cannot be drawn"),
        ({"count": 2, "codes": {}}, "2 requests of 0 utterances"),
        ({"count": 2, "kind": "vec"}, "kind is 'vec'; accepted are 'icl', 'xvec', 'mixed'"),
    ],
)
def test_what_cannot_be_drawn(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        draw_requests(**arguments)
