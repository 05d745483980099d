"""Bench of vLLM's own path: decode steps of one transformer, eager, with breakable graphs and with whole ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from vgraph_lab.errors import InputError
from vgraph_lab.vllm_v1 import GPUModelRunner, RunnerConfig, ScheduledRequest, WorkloadConfig, WorkloadModel

from .record import MeasurementRecord, describe_machine
from .runners import Progress
from .timing import host_time_in_bursts_us, time_interleaved

__all__ = ["bench_v1"]

_MODES = {"eager": "NONE", "piecewise": "PIECEWISE", "full": "FULL"}
_WARMUPS, _BURSTS, _CALLS = 3, 8, 8


class _Decode:
    """Requests that are decoded together, step by step; each step is one token more of each."""

    def __init__(self, runner: GPUModelRunner, rows: int, prompt_tokens: int) -> None:
        self._runner, self._names = runner, [f"r{row}" for row in range(rows)]
        for row, name in enumerate(self._names):
            runner.execute_model([ScheduledRequest(name, [(row + place) % 7 for place in range(prompt_tokens)])])

    def step(self) -> Tensor:
        """Logits of the next token: [rows, vocab_size]."""
        return self._runner.execute_model([ScheduledRequest(name, [1]) for name in self._names]).logits

    def finish(self) -> None:
        """End all requests."""
        self._runner.finish_requests(self._names)


def bench_v1(
    model: WorkloadConfig,
    device: torch.device,
    *,
    dtype: torch.dtype = torch.float32,
    batch_sizes: Sequence[int] = (1, 8, 64),
    prompt_tokens: int = 32,
    repeats: int = 50,
    progress: Progress = lambda _: None,
) -> MeasurementRecord:
    """Time decode steps through ``execute_model``, the modes in turn.

    Args:
        model: sizes of the transformer; every mode has one with the same weights.
        device: where.
        dtype: of weights and activations.
        batch_sizes: requests decoded together; each is captured.
        prompt_tokens: of each request, before the steps that are timed.
        repeats: timed steps of each mode, at most.
        progress: told each stage.

    Raises:
        InputError: sizes or repeats that are none, or more steps than a request of this model may have.
    """
    if not batch_sizes or min(batch_sizes) < 1 or repeats < 2 or prompt_tokens < 1:
        raise InputError(
            f"batch_sizes, prompt_tokens and repeats: got {list(batch_sizes)}, {prompt_tokens} and {repeats}; at least 1, 1 and 2."
        )
    steps = prompt_tokens + _WARMUPS + repeats + (_BURSTS * _CALLS if device.type == "cuda" else 0) + 1
    if steps > model.max_model_len:
        raise InputError(f"{steps} tokens are needed, max_model_len is {model.max_model_len}. Take fewer repeats or a shorter prompt.")
    runners: dict[str, GPUModelRunner] = {}
    try:
        captures = {}
        for name, mode in _MODES.items():
            progress(f"capturing: {mode}")
            runners[name] = runner = GPUModelRunner(_config(mode, batch_sizes, prompt_tokens), device)
            runner.load_model(WorkloadModel(model, device=device, dtype=dtype))
            report = runner.capture_model()
            captures[name] = {"graphs": report.captured, "seconds": report.seconds, "pool_reserved_bytes": report.pool_reserved_bytes}
        rows = []
        for size in sorted(batch_sizes):
            progress(f"decoding, batch size {size}")
            rows.append(_measured(runners, size, prompt_tokens, repeats, device))
        parameters = sum(parameter.numel() for parameter in runners["eager"].get_model().parameters())
    finally:
        for runner in runners.values():
            runner.shutdown()
    settings = {
        "model": model.model_dump(),
        "parameters": parameters,
        "weights": f"random weights, {parameters / 1e6:,.1f} M parameters",
        "dtype": str(dtype).removeprefix("torch."),
        "prompt_tokens": prompt_tokens,
        "repeats": repeats,
        "captures": captures,
    }
    return MeasurementRecord("v1", settings, rows, describe_machine(device))


def _config(mode: str, batch_sizes: Sequence[int], prompt_tokens: int) -> RunnerConfig:
    most = max(batch_sizes)
    return RunnerConfig(
        cudagraph_mode=mode,  # type: ignore[arg-type]  # it takes the name, too
        cudagraph_capture_sizes=tuple(sorted(batch_sizes)),
        max_num_seqs=most,
        max_num_batched_tokens=max(most, prompt_tokens),
    )


def _measured(runners: Mapping[str, GPUModelRunner], rows: int, prompt_tokens: int, repeats: int, device: torch.device) -> dict[str, Any]:
    decodes = {name: _Decode(runner, rows, prompt_tokens) for name, runner in runners.items()}
    first = {name: decode.step() for name, decode in decodes.items()}
    timings = time_interleaved({name: decode.step for name, decode in decodes.items()}, device, repeats=repeats, warmups=_WARMUPS)
    row: dict[str, Any] = {"batch_size": rows}
    for name, decode in decodes.items():
        row |= {f"{name}_{key}": value for key, value in asdict(timings[name]).items() if key != "repeats"}
        if device.type == "cuda":
            row[f"{name}_burst_host_us"] = host_time_in_bursts_us(decode.step, device, calls=_CALLS, bursts=_BURSTS)
        if name != "eager":
            row[f"speedup_{name}"] = timings["eager"].wall_ms / timings[name].wall_ms
            row[f"largest_difference_{name}"] = float((first[name] - first["eager"]).abs().max())
            row[f"{name}_nodes"] = _nodes(runners[name], rows)
        decode.finish()
    return row


def _nodes(runner: GPUModelRunner, rows: int) -> dict[str, int]:
    """Node counts of the graph that served a decode step of so many requests."""
    entries = [entry for entry in runner.graphs.entries() if entry.descriptor.frames == rows]  # on this path, frames count tokens
    return dict(entries[0].cost.node_counts) if entries else {}
