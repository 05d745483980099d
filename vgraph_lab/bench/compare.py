"""``vgraph-lab bench compare``: every form of streamed decoding, and peers, on the same weights and codes in one process.

B streams without a reference are decoded in step: a chunk of one frame, then full ones. Two chunks are timed, contenders taking
turns, each from an idle device:

    first     one frame of streams that have just begun: the first sound
    steady    a full chunk once the window is full: where a long utterance spends its time
    handle    the same through the Target alone, without the runner (incremental contenders with graphs)

Truth is the whole utterance, decoded at once in fp32, eager, with the weights as they are. A contender is as far from it as its
arithmetic makes it; the published design and peers that cut their context also leave out what the window would have seen.

Beside the times stand floors (:mod:`~.floors`), and what the time goes into: nodes and device time by kind of work, and for eager
contenders by part of the decoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import asdict
from typing import Any

import torch

from vgraph_lab.config import ConnectorConfig
from vgraph_lab.errors import InputError
from vgraph_lab.qwen3_tts.decoder import Code2WavDecoder

from .compare_measure import Comparison
from .contender import Contender, NotRunError
from .contenders import build, choose
from .floors import measure_ceilings
from .own_contenders import OWN, RunnerContender
from .record import MeasurementRecord, describe_machine
from .runners import Progress

__all__ = ["bench_compare"]


def bench_compare(
    decoder: Code2WavDecoder,
    *,
    batch_sizes: Sequence[int] = (1, 4, 16),
    contenders: Sequence[str] | None = None,
    chunk_frames: int = 25,
    repeats: int = 50,
    seconds: float = 5.0,
    codes_on_host: bool = True,
    settings: dict[str, Any] | None = None,
    progress: Progress = lambda _: None,
) -> MeasurementRecord:
    """Measure every contender at every batch size on the decoder's device.

    Args:
        decoder: the weights; its device and dtype are everybody's.
        batch_sizes: streams that are decoded together; graphs are captured for all of them.
        contenders: names, or ``all``. None: every one that does not have to be asked for.
        chunk_frames: frames of a full chunk.
        repeats: timed calls of each kind, at most.
        seconds: once the contenders together have been timed this long at one batch size, no further round is begun (but three
            are always run); for first and for steady chunks each.
        codes_on_host: hand codes over from the host, as a connector does; False has them on the device already.
        settings: what else describes the decoder (checkpoint or geometry), for the record.
        progress: told what is being measured.

    Returns:
        One row per contender and batch size. Contenders that could not be measured are in ``settings["not_run"]`` with the reason.

    Raises:
        InputError: a contender that does not exist, no batch sizes, or no contender that can run here.
    """
    if not batch_sizes or min(batch_sizes) < 1 or len(set(batch_sizes)) < len(batch_sizes) or min(chunk_frames, repeats) < 1:
        raise InputError(
            f"batch_sizes must be different whole numbers from 1, chunk_frames and repeats at least 1; got {list(batch_sizes)}, "
            f"{chunk_frames} and {repeats}."
        )
    chosen, not_run = choose(contenders)
    connector = ConnectorConfig(codec_chunk_frames=chunk_frames, initial_codec_chunk_frames=1)
    progress("measuring what the device can do")
    ceilings = measure_ceilings(decoder.device, decoder.dtype)
    reference = _in_fp32(decoder)
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack, torch.no_grad():
        truth = RunnerContender("fp32 eager", OWN["incremental-eager"], reference, connector, batch_sizes)
        stack.callback(truth.close)
        ready: dict[str, Contender] = {}
        for name, kind in chosen.items():
            try:
                ready[name] = build(name, kind, decoder, connector, batch_sizes, progress)
            except NotRunError as error:
                not_run[name] = str(error)
                continue
            stack.callback(ready[name].close)
        if not ready:
            named = [name for name in dict.fromkeys([*chosen, *(contenders or ())]) if name in not_run]
            raise InputError(f"no contender can run here. {'; '.join(f'{name}: {not_run[name]}' for name in named)}")
        described = {name: {"what": contender.what, **contender.facts} for name, contender in ready.items()}
        bench = Comparison(decoder, reference, truth, connector, repeats, seconds, codes_on_host, ceilings, progress)
        for batch_size in sorted(batch_sizes):
            found, failed = bench.measure(ready, batch_size)
            rows += found
            not_run |= {name: f"failed with {batch_size} streams: {why}" for name, why in failed.items()}
            ready = {name: contender for name, contender in ready.items() if name not in failed}
    described_bench = {
        **(settings or {}),
        "dtype": str(decoder.dtype).removeprefix("torch."),
        "chunk_frames": chunk_frames,
        "frames_compared": bench.frames,
        "window_frames": decoder.geometry.sliding_window,
        "samples_per_frame": decoder.samples_per_frame,
        "sample_rate": decoder.sample_rate,
        "repeats": repeats,
        "codes_on_host": codes_on_host,
        "batch_sizes": sorted(batch_sizes),
        "ceilings": asdict(ceilings),
        "floors": {str(size): bench.floors(size, chunk_frames) for size in sorted(batch_sizes)},
        "contenders": described,
        "not_run": not_run,
        "nodes_unknown": bench.nodes_unknown,
    }
    return MeasurementRecord("compare", described_bench, rows, describe_machine(decoder.device))


def _in_fp32(decoder: Code2WavDecoder) -> Code2WavDecoder:
    """The same weights and codebooks in fp32, and angles that were never rounded."""
    if decoder.dtype is torch.float32:
        return decoder
    wide = deepcopy(decoder).float()
    wide.pre_transformer.refresh_rotary_table()
    return wide
