"""Requests to play: utterances drawn at random, with or without a reference."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor

from vgraph_lab import bundled
from vgraph_lab.errors import InputError
from vgraph_lab.qwen3_tts.codes import read_codes

__all__ = ["RequestKind", "ServiceRequest", "draw_requests"]

RequestKind = Literal["icl", "xvec", "mixed"]
"""With a reference (in-context learning), without (x-vector), or both in turn."""


@dataclass(frozen=True, slots=True, eq=False)
class ServiceRequest:
    """One utterance that somebody asks for.

    Attributes:
        id: unique among the requests that are played together.
        codes: integers [num_quantizers, T], T ≥ 1.
        reference: integers [num_quantizers, P] for an ICL request, None for an x-vector request.
        utterance: name of what is said, if it has one.
    """

    id: str
    codes: Tensor
    reference: Tensor | None = None
    utterance: str = ""

    @property
    def frames(self) -> int:
        """Frames of the utterance, without the reference."""
        return int(self.codes.shape[-1])


def draw_requests(
    count: int,
    *,
    kind: RequestKind = "mixed",
    codes: Mapping[str, Tensor] | None = None,
    speakers: Mapping[str, str] | None = None,
    seed: int = 0,
) -> tuple[ServiceRequest, ...]:
    """Draw requests from a pool of utterances; every utterance comes once before any comes again.

    The reference of an ICL request is another utterance, of the same speaker if there is one.

    Args:
        count: how many.
        kind: ``icl``, ``xvec``, or ``mixed``: one of each in turn.
        codes: utterance → integers [num_quantizers, T]; the bundled clips by default.
        speakers: utterance → who speaks it; those of the bundled clips by default.
        seed: of the order and the references. The same arguments give the same requests.

    Raises:
        InputError: no request or no utterance, or a kind that does not exist.
    """
    if kind not in get_args(RequestKind):
        raise InputError(f"kind is {kind!r}; accepted are {', '.join(map(repr, get_args(RequestKind)))}.")
    if codes is None:
        clips = bundled.utterances()
        codes = {clip.id: read_codes(clip.codes_file)[clip.id] for clip in clips}
        speakers = {clip.id: clip.speaker for clip in clips} if speakers is None else speakers
    if count < 1 or not codes:
        raise InputError(f"{count} requests of {len(codes)} utterances cannot be drawn. Ask for one or more of one or more.")
    draw = random.Random(seed)
    order: list[str] = []
    while len(order) < count:
        order += draw.sample(sorted(codes), len(codes))
    requests = []
    for index, name in enumerate(order[:count]):
        reference = (
            None if kind == "xvec" or (kind == "mixed" and index % 2) else codes[_reference(name, sorted(codes), speakers or {}, draw)]
        )
        requests.append(ServiceRequest(f"request-{index:03d}", codes[name], reference, name))
    return tuple(requests)


def _reference(name: str, pool: list[str], speakers: Mapping[str, str], draw: random.Random) -> str:
    others = [other for other in pool if other != name]
    same_voice = [other for other in others if name in speakers and speakers.get(other) == speakers[name]]
    return draw.choice(same_voice or others or [name])
