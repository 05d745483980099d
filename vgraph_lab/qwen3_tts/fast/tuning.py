"""Choosing tiles by trying them: before a capture, once for each problem, and kept for the next process."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
import triton
from pydantic import TypeAdapter

from .products import Run
from .tiles import Problem, Tile, candidates, fits, tile_by_rule

__all__ = ["TileTuner", "cache_folder"]

logger = logging.getLogger(__name__)

_LAUNCHES, _REPEATS = 6, 5
_FLUSHED_BYTES = 64 << 20
_KERNELS = 2  # counted up when kernels change so that other tiles may be faster, or that some do not fit any more
_SHIPPED = Path(__file__).parent / "tuned"


def cache_folder() -> Path | None:
    """Where tuned tiles are kept: ``$XDG_CACHE_HOME/vgraph_lab/tiles``, by default ``~/.cache/vgraph_lab/tiles``. None without a home."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vgraph_lab" / "tiles"
    except RuntimeError:
        return None


class TileTuner:
    """Gives a tile to each problem: from the tables for this card, else the fastest one that it found, else the one by rule.

    Args:
        device: whose tiles they are.
        autotune: try candidates for problems that no table has.
        folder: of the tables that are kept; by default :func:`cache_folder`.

    Attributes:
        chosen: by key of the problem; what was found here or in the user's table goes before what the package brings.
        times_us: of all candidates that were timed, by key.
        failures: candidates that could not be compiled or launched, with what happened, by key.
    """

    def __init__(self, device: torch.device, *, autotune: bool, folder: Path | None = None) -> None:
        self._device, self._autotune = device, autotune and device.type == "cuda"
        name = torch.cuda.get_device_name(device).replace(" ", "_") if device.type == "cuda" else "cpu"
        file, folder = f"{name}-triton-{triton.__version__}-kernels-{_KERNELS}.json", folder or cache_folder()
        self._file = folder / file if folder else None
        self._shipped = _read(_SHIPPED / file)
        self.chosen: dict[str, Tile] = _read(self._file) if self._file else {}
        self.times_us: dict[str, dict[Tile, float]] = {}
        self.failures: dict[str, dict[Tile, str]] = {}
        self._collected: dict[str, tuple[Problem, Run]] | None = None
        self._compile_s = self._tuning_s = 0.0

    def __call__(self, problem: Problem, run: Run) -> None:
        """Run a product."""
        if self._collected is None:
            run(self.tile(problem))
        else:
            self._collected.setdefault(problem.key, (problem, run))

    def tile(self, problem: Problem) -> Tile:
        """The tile of a problem."""
        return self._known(problem) or tile_by_rule(problem)

    def _known(self, problem: Problem) -> Tile | None:
        """From a table, if the kernels can run it."""
        for table in (self.chosen, self._shipped):
            tile = table.get(problem.key)
            if tile is not None:
                if fits(problem, tile):
                    return tile
                logger.warning("the tile %s of %s in a table cannot be run and is left out", tuple(table.pop(problem.key)), problem.key)
        return None

    def get_ready(self, step: Callable[[], object]) -> None:
        """Compile what a step needs, on all processors, and choose tiles for its products if none are known.

        ``step`` is run for the shapes of its products; they themselves are left out.
        """
        if self._device.type != "cuda":
            return
        self._collected = {}
        try:
            step()
            collected = self._collected
        finally:
            self._collected = None
        unknown = [key for key, (problem, _) in collected.items() if self._known(problem) is None] if self._autotune else []
        begin = perf_counter()
        with ThreadPoolExecutor(os.cpu_count()) as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
            for key, (problem, run) in collected.items():
                for tile in candidates(problem) if key in unknown else [self.tile(problem)]:
                    run(tile, compile_only=True)
        compiled = perf_counter()
        for key in unknown:
            found = self._fastest(*collected[key])
            if found is not None:
                self.chosen[key] = found
        if unknown:
            self._write()
        self._compile_s += compiled - begin
        self._tuning_s += perf_counter() - compiled

    def notes(self) -> list[str]:
        """What tuning did, for a report."""
        notes = [f"tiles: {len(self.times_us)} products tried out ({self._tuning_s:.1f} s), compiled in {self._compile_s:.1f} s"]
        for key, failed in self.failures.items():
            notes.append(f"tiles: {len(failed)} candidates for {key} failed, the first with {next(iter(failed.values()))}")
        return notes

    def _fastest(self, problem: Problem, run: Run) -> Tile | None:
        times: dict[Tile, float] = {}
        for tile in candidates(problem):
            try:
                run(tile)
                times[tile] = self._time_us(run, tile)
            except (torch.OutOfMemoryError, torch.AcceleratorError):
                raise  # not the tile's fault
            except (RuntimeError, triton.TritonError) as error:  # too many registers or bytes of shared memory: another one will do
                self.failures.setdefault(problem.key, {})[tile] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        self.times_us[problem.key] = times
        return min(times, key=times.__getitem__, default=None)

    def _time_us(self, run: Run, tile: Tile) -> float:
        """Time on the device with a cold cache: weights come from memory in a real step, too."""
        flushed = torch.empty(_FLUSHED_BYTES, dtype=torch.int8, device=self._device)
        graph, stream, times = torch.cuda.CUDAGraph(), torch.cuda.Stream(self._device), []
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                for _ in range(_LAUNCHES):
                    flushed.zero_()
                    run(tile)
            finally:
                graph.capture_end()
            for _ in range(_REPEATS):
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                graph.replay()
                end.record()
                end.synchronize()
                times.append(begin.elapsed_time(end) * 1000 / _LAUNCHES)
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph.reset()
        return float(median(times))

    def _write(self) -> None:
        """Keep the table. That a home cannot be written costs the next process the same time again, and nothing else."""
        if self._file is None:
            logger.warning("tuned tiles are not kept: there is no home folder. Set XDG_CACHE_HOME")
            return
        text = json.dumps({key: list(tile) for key, tile in sorted(self.chosen.items())}, indent=0)
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            unfinished = self._file.with_suffix(f".{os.getpid()}")
            unfinished.write_text(text)
            unfinished.replace(self._file)
        except OSError as error:
            logger.warning("tuned tiles are not kept: %s", error)


def _read(path: Path) -> dict[str, Tile]:
    """A table, or nothing; one that cannot be read is told and left out."""
    try:
        return dict(TypeAdapter(dict[str, Tile]).validate_json(path.read_bytes(), strict=True))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        logger.warning("%s is no table of tiles (%s) and is left out", path, str(error).splitlines()[0])
        return {}
