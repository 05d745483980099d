"""The measuring of micro-batches on one rank: making each variant, timing all of them in turn, tracing a step."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from vgraph_lab.errors import ConfigError, VGraphLabError
from vgraph_lab.vllm_v1 import (
    GPUModelRunner,
    ParallelConfig,
    RunnerConfig,
    ScheduledRequest,
    SMControlContextManager,
    UBatchTrace,
    WorkloadConfig,
    WorkloadModel,
    overlap_s,
    torch_compute_sms,
)

from .ranks import Ranks
from .runners import Progress
from .timing import summarise_times, time_once

__all__ = ["SPAN_COLUMNS", "Measured", "UBatchBench", "UBatchSizes", "Variant", "is_host_bound"]

SPAN_COLUMNS = ("start_us", "end_us", "ubatch", "stream", "name")
"""Of a trace in a record."""

Made = TypeVar("Made")

_WARMUPS = 3
_OVERLAP = ("comm_ms", "overlap_ms", "hidden_percent")


@dataclass(frozen=True)
class UBatchSizes:
    """What each rank runs.

    Attributes:
        model: of both cases; ``max_model_len`` is theirs to say.
        prompts: requests of a prefill.
        prompt_tokens: of each of them.
        decode_requests: requests that are decoded together.
        decode_prompt_tokens: of each of them, before.
    """

    model: WorkloadConfig
    prompts: int
    prompt_tokens: int
    decode_requests: int
    decode_prompt_tokens: int

    @classmethod
    def gpu(cls) -> UBatchSizes:
        """A step of some 50 ms on a large GPU, of which a tenth is exchange: each local expert computes all tokens, so few and small
        ones leave the exchange a part in it."""
        model = WorkloadConfig(
            vocab_size=4096,
            hidden_size=4096,
            num_layers=6,
            num_heads=16,
            num_kv_heads=4,
            head_dim=128,
            intermediate_size=512,
            num_experts=8,
        )
        return cls(model, prompts=8, prompt_tokens=2048, decode_requests=128, decode_prompt_tokens=16)

    @classmethod
    def cpu(cls) -> UBatchSizes:
        """To see it work."""
        return cls(WorkloadConfig(hidden_size=64, num_experts=4), prompts=4, prompt_tokens=16, decode_requests=4, decode_prompt_tokens=4)


@dataclass(frozen=True)
class Variant:
    """One way to run a case."""

    name: str
    mode: str
    num_ubatches: int = 1
    has_share: bool = False  # of the SMs, for communication
    baseline: str = "eager"  # the same without micro-batches


def is_host_bound(times: Mapping[str, Any]) -> bool:
    """Whether the host launched a step for longer than the device needs for it: the device waited, and spans of a trace include that.

    Args:
        times: a row of a record, or its times. On a CPU there is no device that waits.
    """
    return "device_ms" in times and bool(times["host_ms"] > times["device_ms"])


class _Step:
    """One step that can be repeated, of one variant of one case."""

    def __init__(self, runner: GPUModelRunner, trace: UBatchTrace | None, prompts: Mapping[str, list[int]], *, is_decode: bool) -> None:
        self.runner, self.trace, self._prompts, self._is_decode = runner, trace, prompts, is_decode
        if is_decode:
            self._run(prompts)

    def __call__(self) -> Tensor:
        """Logits of each request: of a whole prefill, or of one token more."""
        return self._run({name: [1] for name in self._prompts} if self._is_decode else self._prompts)

    def again(self) -> None:
        """Make ready for the next run; not timed."""
        if not self._is_decode:
            self.runner.finish_requests(list(self._prompts))

    def _run(self, tokens: Mapping[str, list[int]]) -> Tensor:
        output = self.runner.execute_model([ScheduledRequest(*request) for request in tokens.items()])
        self.execution = output.execution
        return output.logits


@dataclass(frozen=True)
class Measured:
    """A case as it was measured.

    Attributes:
        rows: one per variant.
        traces: one per rank, of the eager variant in micro-batches.
        absent: variants that could not be made, and why.
    """

    rows: list[dict[str, Any]]
    traces: list[dict[str, Any]]
    absent: dict[str, str]


class UBatchBench:
    """What one rank does; all do the same.

    Args:
        ranks: this one and the others.
        sizes: of the model and its batches.
        dtype: of weights and activations.
        comm_sms: SMs for communication, in variants that have a share.
        repeats: timed steps of each variant.
        progress: told each stage.
    """

    def __init__(self, ranks: Ranks, sizes: UBatchSizes, dtype: torch.dtype, *, comm_sms: int, repeats: int, progress: Progress) -> None:
        self.ranks, self.sizes, self.dtype, self.comm_sms, self.repeats = ranks, sizes, dtype, comm_sms, repeats
        self._progress, self._is_cuda = progress, ranks.device.type == "cuda"

    def _stage(self, name: str) -> None:
        self.ranks.watchdog.stage(name)
        self._progress(name)

    def exchange_alone_ms(self) -> float:
        """All exchanges of one prefill step, one after the other, with nothing beside them; the slowest rank's median."""
        sizes, ranks = self.sizes, self.ranks
        if not sizes.model.num_experts:
            return 0.0
        self._stage("exchange alone")
        rows = sizes.prompts * sizes.prompt_tokens * ranks.size
        sent = torch.zeros(rows, sizes.model.hidden_size, dtype=self.dtype, device=ranks.device)
        received = torch.empty_like(sent)

        def exchange() -> None:
            for _ in range(2 * sizes.model.num_layers):
                dist.all_to_all_single(received, sent, group=ranks.experts)

        walls = []
        for _ in range(_WARMUPS + self.repeats):
            ranks.barrier()
            walls.append(time_once(exchange, ranks.device)[0])
        return max(ranks.gather(summarise_times(walls[_WARMUPS:], walls[_WARMUPS:]).wall_ms))

    def measured(self, case: str, variants: Sequence[Variant]) -> Measured:
        """Make the variants of a case, time them in turn, and trace a step of those in eager micro-batches.

        Args:
            case: ``prefill`` or ``decode``.
            variants: ``eager`` first.

        Raises:
            ConfigError: not even ``eager`` can be made.
            RankLostError: a rank does not answer.
        """
        with ExitStack() as stack:
            steps: dict[str, _Step] = {}
            absent: dict[str, str] = {}
            for variant in variants:
                step, trouble = self._made(case, variant, stack)
                if step is not None:
                    steps[variant.name] = step
                elif variant.name == "eager":
                    raise ConfigError(f"the {case} of these sizes cannot run: {trouble}")
                else:
                    absent[f"{case} {variant.name}"] = trouble
            self._stage(f"{case}: first steps")
            logits = {name: self._once(step) for name, step in steps.items()}
            times = self._times(case, steps)
            traces = {name: self._trace(case, name, step) for name, step in steps.items() if step.trace is not None}
            for name in (name for name in traces if is_host_bound(times[name])):
                traces[name] = [trace | dict.fromkeys(_OVERLAP) for trace in traces[name]]
            rows = [self._row(case, variant, steps, logits, times, traces) for variant in variants if variant.name in steps]
            memory = torch.cuda.max_memory_allocated(self.ranks.device) if self._is_cuda else None
            steps.clear()
        gc.collect()
        if self._is_cuda:
            torch.cuda.empty_cache()
        return Measured([row | {"peak_memory_bytes": memory} for row in rows], traces.get("eager_ubatch", []), absent)

    def _made(self, case: str, variant: Variant, stack: ExitStack) -> tuple[_Step | None, str]:
        """A variant's step; or None and why, if any rank could not make it. What all do together begins where all have come to."""
        self._stage(f"{case}: making {variant.name}")
        self.ranks.watchdog.stop()  # random weights may take their time, and wait for nobody
        made, trouble = self._tried(case, variant, lambda: self._make(case, variant, stack))
        if made is None:
            return None, trouble
        runner, trace, model = made

        def capture() -> bool:
            runner.load_model(model)
            runner.capture_model()
            return True

        self._stage(f"{case}: capturing {variant.name}")
        is_captured, trouble = self._tried(case, variant, capture)
        if is_captured is None:
            return None, trouble
        return _Step(runner, trace, self._prompts(case), is_decode=case == "decode"), ""

    def _tried(self, case: str, variant: Variant, work: Callable[[], Made]) -> tuple[Made | None, str]:
        """What the work makes, if it does so on every rank; otherwise None and why not."""
        made, trouble = None, ""
        try:
            made = work()
        except (VGraphLabError, RuntimeError) as error:  # a variant that this machine cannot run is told of in the record
            trouble = f"{type(error).__name__}: {error}"
            told = f"rank {self.ranks.rank} has no {case} {variant.name}: {trouble}"
            print(told, file=sys.stderr, flush=True)  # now: the others may wait for it in vain
        self.ranks.watchdog.stage(f"{case}: waiting for the others to make {variant.name}")
        troubles = {each: rank for rank, each in reversed(list(enumerate(self.ranks.gather(trouble)))) if each}
        return (None if troubles else made), "; ".join(f"rank {rank}: {each}" for each, rank in troubles.items())

    def _counts(self, case: str) -> tuple[int, int]:
        """Requests, and tokens of their prompts."""
        sizes = self.sizes
        return (sizes.decode_requests, sizes.decode_prompt_tokens) if case == "decode" else (sizes.prompts, sizes.prompt_tokens)

    def _prompts(self, case: str) -> dict[str, list[int]]:
        """Of this rank."""
        (reqs, tokens), vocab = self._counts(case), self.sizes.model.vocab_size
        return {f"r{row}": [(7 * self.ranks.rank + 3 * row + place) % vocab for place in range(tokens)] for row in range(reqs)}

    def _make(self, case: str, variant: Variant, stack: ExitStack) -> tuple[GPUModelRunner, UBatchTrace | None, WorkloadModel]:
        ranks, sizes, is_decode = self.ranks, self.sizes, case == "decode"
        reqs, tokens = self._counts(case)
        graph_tokens = reqs if is_decode else reqs * tokens
        config = RunnerConfig(
            cudagraph_mode=variant.mode,  # type: ignore[arg-type]  # it takes the name, too
            cudagraph_capture_sizes=(graph_tokens,),
            max_num_seqs=reqs,
            max_num_batched_tokens=reqs * tokens,
        )
        is_split = variant.num_ubatches > 1
        parallel = ParallelConfig(
            ranks.size,
            ranks.rank,
            ubatch_size=variant.num_ubatches,
            dbo_decode_token_threshold=variant.num_ubatches,
            dbo_prefill_token_threshold=variant.num_ubatches,
        )
        trace = UBatchTrace(ranks.device) if is_split and variant.mode == "NONE" else None
        if trace is not None:
            trace.is_on = False
        control = None
        if variant.has_share:
            total = torch.cuda.get_device_properties(ranks.device).multi_processor_count
            control = SMControlContextManager(self.comm_sms, None, torch_compute_sms(total), device=ranks.device)
        runner = GPUModelRunner(config, ranks.device, parallel_config=parallel, ubatch_trace=trace, sm_control=control, timeout_s=30.0)
        stack.callback(runner.shutdown)
        length = tokens + (2 * (self.repeats + _WARMUPS) + 4 if is_decode else 0)
        group = ranks.experts_with_share if variant.has_share else ranks.experts
        model = sizes.model.model_copy(update={"max_model_len": length})
        return runner, trace, WorkloadModel(model, device=ranks.device, dtype=self.dtype, expert_group=group)

    def _once(self, step: _Step) -> Tensor:
        self.ranks.barrier()
        logits = step().float().cpu()
        step.again()
        return logits

    def _times(self, case: str, steps: Mapping[str, _Step]) -> dict[str, dict[str, float]]:
        """Milliseconds of each variant, per step the slowest rank's: from an idle device, and on the device alone."""
        device = self.ranks.device
        walls: dict[str, list[float]] = {name: [] for name in steps}
        hosts: dict[str, list[float]] = {name: [] for name in steps}
        alone: dict[str, list[float]] = {name: [] for name in steps}
        head_starts_ms = dict.fromkeys(steps, 50.0)
        for number in range(-_WARMUPS, self.repeats):
            self._stage(f"{case}: {'warm-up' if number < 0 else f'round {number + 1} of {self.repeats}'}")
            for name, step in steps.items():
                self.ranks.barrier()
                wall, host = time_once(step, device)
                step.again()
                self.ranks.barrier()
                busy = _device_ms(step, device, head_start_ms=head_starts_ms[name]) if self._is_cuda else wall
                step.again()
                if number < 0:
                    head_starts_ms[name] = 2 * max(self.ranks.gather(host)) + 5  # the same on all: one would wait for the other
                else:
                    walls[name].append(wall)
                    hosts[name].append(host)
                    alone[name].append(busy)
        found = {}
        for name in steps:
            figures = asdict(summarise_times(self._slowest(walls[name]), self._slowest(hosts[name])))
            if self._is_cuda:
                on_device = self._slowest(alone[name])
                of_device = asdict(summarise_times(on_device, on_device))
                figures |= {key.replace("wall", "device"): value for key, value in of_device.items() if "wall" in key}
            found[name] = {key: value for key, value in figures.items() if key != "repeats"}
        return found

    def _slowest(self, times: list[float]) -> list[float]:
        """Of each step, the slowest rank's."""
        return [max(each) for each in zip(*self.ranks.gather(times), strict=True)]

    def _trace(self, case: str, name: str, step: _Step) -> list[dict[str, Any]]:
        """One step's spans on each rank, and what they say of overlap. The step before it makes the events."""
        self._stage(f"{case}: tracing {name}")
        assert step.trace is not None
        step.trace.is_on = True
        for _ in range(1 if case == "decode" else 2):
            step.trace.clear()
            self._once(step)
        spans = step.trace.spans()
        step.trace.is_on = False
        comm_ms = 1e3 * sum(span.end_s - span.start_s for span in spans if span.stream == "comm")
        overlap_ms = 1e3 * overlap_s(spans)
        columns: dict[str, list[Any]] = {key: [] for key in SPAN_COLUMNS}
        for span in spans:
            values = (round(1e6 * span.start_s, 1), round(1e6 * span.end_s, 1), span.ubatch, span.stream, span.name)
            for key, value in zip(SPAN_COLUMNS, values, strict=True):
                columns[key].append(value)
        hidden = 100 * overlap_ms / comm_ms if comm_ms else 0.0
        figures = dict(zip(_OVERLAP, (comm_ms, overlap_ms, hidden), strict=True))
        return self.ranks.gather({"case": case, "variant": name, "rank": self.ranks.rank, **figures, "spans": columns})

    def _row(
        self,
        case: str,
        variant: Variant,
        steps: Mapping[str, _Step],
        logits: Mapping[str, Tensor],
        times: Mapping[str, dict[str, float]],
        traces: Mapping[str, list[dict[str, Any]]],
    ) -> dict[str, Any]:
        name, step = variant.name, steps[variant.name]
        row: dict[str, Any] = {"case": case, "variant": name, "tokens_per_rank": step.execution.cudagraph_stats.num_unpadded_tokens}
        row |= {
            "mode": step.execution.cudagraph_stats.runtime_mode,
            "num_ubatches": variant.num_ubatches,
            "is_split": step.execution.should_ubatch,
        }
        row |= times[name]
        for kind in ("wall", "device") if self._is_cuda else ("wall",):
            row[f"{kind}_eager_over_this"] = times["eager"][f"{kind}_ms"] / times[name][f"{kind}_ms"]
            if variant.num_ubatches > 1:
                baseline = times.get(variant.baseline)
                row[f"{kind}_whole_over_this"] = baseline[f"{kind}_ms"] / times[name][f"{kind}_ms"] if baseline else None
        if name in traces:
            row |= {key: traces[name][0][key] for key in _OVERLAP}
        row["graphs"] = len(step.runner.graphs.entries())
        row["graph_hits"] = step.runner.graphs.stats().hits()
        row["largest_difference"] = float((logits[name] - logits["eager"]).abs().max())
        return row


def _device_ms(step: Callable[[], object], device: torch.device, *, head_start_ms: float) -> float:
    """Milliseconds on the device alone: it sleeps until the host has queued the step, or most of it."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    torch.cuda._sleep(int(min(head_start_ms, 300.0) * 2e6))  # about 2 GHz
    begin.record()
    step()
    end.record()
    torch.cuda.synchronize(device)
    return float(begin.elapsed_time(end))
