"""Whatever the connector: every captured Descriptor is reachable, and every key finds its graph."""

from __future__ import annotations

import pytest
import torch
from contracts.streaming import SMALL
from hypothesis import given, settings
from hypothesis import strategies as st

from vgraph_lab.config import ConnectorConfig
from vgraph_lab.errors import FallbackReason, InputError
from vgraph_lab.qwen3_tts.checkpoint import random_decoder
from vgraph_lab.qwen3_tts.decoder import Code2WavDecoder
from vgraph_lab.qwen3_tts.stream_path import StreamingPath
from vgraph_lab.qwen3_tts.stream_routines import SuffixDescriptor

pytestmark = pytest.mark.filterwarnings("ignore:connector")
WINDOW = SMALL.sliding_window


@pytest.fixture(scope="module")
def decoder() -> Code2WavDecoder:
    return random_decoder(SMALL)


connectors = st.builds(
    ConnectorConfig,
    codec_chunk_frames=st.integers(1, 9),
    initial_codec_chunk_frames=st.one_of(st.none(), st.integers(0, 9)),
    codec_chunk_ramp=st.one_of(st.none(), st.lists(st.integers(1, 7), max_size=4).map(tuple)),
)
batch_sizes = st.lists(st.integers(1, 8), min_size=1, max_size=3, unique=True)


def zeros(rows: int, frames: int) -> torch.Tensor:
    return torch.zeros(rows, 16, frames, dtype=torch.int64)


@settings(max_examples=60)
@given(connector=connectors, sizes=batch_sizes)
def test_keys_round_trip(decoder: Code2WavDecoder, connector: ConnectorConfig, sizes: list[int]) -> None:
    path = StreamingPath(decoder, connector, batch_sizes=sizes, largest_batch=max(sizes), max_requests=2)
    icl, xvec, suffix = path.targets
    expected_starts = {(rows, frames) for rows in sizes for frames in connector.first_chunk_choices}
    for target in (icl, xvec):
        assert {(d.batch_size, d.frames) for d in target.descriptors} == expected_starts
        for d in target.descriptors:
            reference = (zeros(d.batch_size, WINDOW), torch.zeros(d.batch_size)) if target is icl else ()
            found = target.routine.resolve(zeros(d.batch_size, d.frames), *reference)
            assert (found.key, found.candidates[0]) == (d, d)
            assert hash(found.key) == hash(d)
    for d in suffix.descriptors:
        assert isinstance(d, SuffixDescriptor)
        found = suffix.routine.resolve(zeros(d.batch_size, d.frames - d.source), torch.zeros(d.batch_size), d.state, d.source)
        assert (found.key, found.candidates[0]) == (d, d)
    # Every state that a request can be in, in either mode, has its graph at every captured batch size.
    for first in connector.first_chunk_choices:
        state, ramp = first, connector.ramp[1:]
        for step in range(20):
            kept = min(state, WINDOW)
            new = connector.codec_chunk_frames if step >= len(ramp) or state >= WINDOW else ramp[step]
            for mode in ("icl", "xvec"):
                assert SuffixDescriptor(max(sizes), kept + new, mode, kept) in suffix.descriptors
            state = kept + new
    assert len(set(suffix.descriptors)) == 2 * len(sizes) * len(path.transitions.steps)


@pytest.fixture(scope="module")
def path(decoder: Code2WavDecoder) -> StreamingPath:
    connector = ConnectorConfig(codec_chunk_frames=3, initial_codec_chunk_frames=2)
    return StreamingPath(decoder, connector, batch_sizes=(4, 1), largest_batch=4, max_requests=2)


def test_only_a_last_chunk_may_be_padded(path: StreamingPath) -> None:
    """Padded frames spoil the next state, so a row that goes on needs its exact width."""
    _, xvec, suffix = path.targets
    slot = torch.zeros(1)
    for frames in (1, 2):
        assert suffix.routine.resolve(zeros(1, frames), slot, "xvec", 2, True).candidates[0] == SuffixDescriptor(1, 5, "xvec", 2)
        short = suffix.routine.resolve(zeros(1, frames), slot, "xvec", 2, False)
        assert (short.candidates, short.miss_reason) == ((), FallbackReason.SHAPE_NOT_COVERED)
    assert xvec.routine.resolve(zeros(1, 1), True).candidates
    assert not xvec.routine.resolve(zeros(1, 1), False).candidates
    unknown = suffix.routine.resolve(zeros(1, 3), slot, "xvec", 3, False)
    assert (unknown.candidates, unknown.miss_reason) == ((), FallbackReason.STATE_NOT_COVERED)


def test_the_smallest_batch_that_fits_comes_first(path: StreamingPath) -> None:
    suffix = path.targets[2]
    assert [d.batch_size for d in suffix.routine.resolve(zeros(1, 3), torch.zeros(1), "icl", 2).candidates] == [1, 4]
    assert [d.batch_size for d in suffix.routine.resolve(zeros(3, 3), torch.zeros(3), "icl", 2).candidates] == [4]
    assert suffix.routine.resolve(zeros(5, 3), torch.zeros(5), "icl", 2).miss_reason is FallbackReason.SHAPE_NOT_COVERED


def test_how_descriptors_read() -> None:
    assert str(SuffixDescriptor(4, 97, "icl", 72)) == "B4·icl 72→97"


def test_calls_that_are_no_steps(path: StreamingPath) -> None:
    icl, xvec, suffix = path.targets
    with pytest.raises(InputError, match=r"slots must be \[B\] for codes \[B, Q, n\], got \[2\] and \[1, 16, 3\]"):
        suffix(zeros(1, 3), torch.zeros(2, dtype=torch.int64), "xvec", 2)
    for kept in (0, WINDOW + 1):
        with pytest.raises(InputError, match=f"kept_frames must be in 1 … {WINDOW} .* got {kept}"):
            suffix(zeros(1, 3), torch.zeros(1, dtype=torch.int64), "xvec", kept)
    with pytest.raises(InputError, match="reference: codes must be in"):
        icl(zeros(1, 2), zeros(1, WINDOW) + 99, torch.zeros(1, dtype=torch.int64))
    with pytest.raises(InputError, match=r"reference must be \[B, Q, P ≥ 2\] and pad_frames \[B\]"):
        icl(zeros(2, 2), zeros(1, WINDOW), torch.zeros(1, dtype=torch.int64))
    with pytest.raises(InputError, match="codes: codes have no frames"):
        xvec(zeros(1, 0))
