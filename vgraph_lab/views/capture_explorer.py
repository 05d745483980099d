"""From traffic to graphs, live: edit capture sizes, see at once what they would do, capture them, compare."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import ipywidgets as widgets
import pandas as pd

from vgraph_lab.config import StageConfig, VocoderGraphSettings
from vgraph_lab.errors import ConfigError, InputError, VGraphLabError
from vgraph_lab.graphs.backends import create_backend
from vgraph_lab.graphs.manager import VocoderCUDAGraphManager
from vgraph_lab.graphs.report import CaptureReport
from vgraph_lab.graphs.target import Target
from vgraph_lab.inspect.planner.costs import measure_costs
from vgraph_lab.inspect.planner.export import stage_of
from vgraph_lab.inspect.planner.forecast import Forecast, Forecaster, Traffic, traffic_from
from vgraph_lab.inspect.planner.grids import StatelessGrid, StreamingGrid
from vgraph_lab.inspect.planner.outcome import compare_outcome
from vgraph_lab.inspect.planner.shapes import STATELESS_TARGET_ID, Shape
from vgraph_lab.inspect.planner.spaces import Choice
from vgraph_lab.inspect.planner.traffic import check_traffic
from vgraph_lab.qwen3_tts.code2wav import Qwen3TTSCode2Wav
from vgraph_lab.qwen3_tts.decoder import Code2WavDecoder

from .capture_panel import CapturePanel
from .capture_settings import BUNDLED, CaptureSettings
from .coverage_picker import CoverageMap
from .explorer_html import outcome_html, prediction_html
from .html import styled
from .weak import on_change, on_click

__all__ = ["CaptureExplorer"]


class CaptureExplorer(CapturePanel):
    """A :class:`CapturePanel` that knows the traffic: it predicts what the sizes in its fields would do, while they are typed.

    ::

        explorer = CaptureExplorer(traffic, costs, space=StreamingGrid(cfg.connector, window), checkpoint=folder)
        explorer                                     # edit, look, choose cells, press Capture
        explorer.set_sizes(batch_sizes=(1, 2, 4))    # Python can do all of it, too
        explorer.prediction.figures["coverage"]
        explorer.run()
        explorer.comparison()                        # predicted beside outcome

    Which graph serves which call is the Routines' rule and exact. Bytes and seconds come from ``costs``: measured for the shapes
    that it has, modelled for others, not known without it until :meth:`measure`. Each figure says which.

    Bad entries give a message and change nothing: the last prediction and the last capture stay.

    Args:
        traffic: a coverage or a traffic table, statistics, a runner, a Manager, or a recording.
        costs: see :func:`~vgraph_lab.inspect.planner.measure_costs`.
        space: what a configuration can say, a StreamingGrid or a StatelessGrid; by default the stateless Target alone, with exactly
            the frames in the field. A streaming stage takes its frames from its chunks, so it has no such field.
        checkpoint: folder, or ``bundled``.
        backend: ``auto``, ``cpu``, or ``cuda`` where there is one.
        frames: codec frames per graph to begin with; by default the most that are asked for.
        batch_sizes: rows per graph to begin with; by default the most that are asked for.
        policy: further settings of the Manager.

    Attributes:
        prediction: of the last sizes that made sense.
        map: the calls by shape as predicted; its chosen cells are what :meth:`add_selected` adds.
        traffic: what the predictions are for.

    Raises:
        BackendError: this machine has no such backend.
        ConfigError: a Target of the traffic is none of this space, or the first sizes make no sense.
        InputError: the traffic holds no calls, or a table is malformed.
    """

    def __init__(
        self,
        traffic: Traffic,
        costs: pd.DataFrame | None = None,
        *,
        space: StreamingGrid | StatelessGrid | None = None,
        checkpoint: str | Path = BUNDLED,
        backend: str = "auto",
        frames: Iterable[int] | None = None,
        batch_sizes: Iterable[int] | None = None,
        policy: VocoderGraphSettings | None = None,
    ) -> None:
        self._space = space
        accepted = (STATELESS_TARGET_ID,) if space is None else space.target_ids
        self.traffic = check_traffic(traffic_from(traffic, getattr(space, "transitions", None)), accepted)
        self._forecaster = Forecaster(self.traffic, costs)
        self._figures, self._comparison = widgets.HTML(), pd.DataFrame()
        self._add = widgets.Button(description="Add chosen shapes", tooltip="Add rows and frames of the chosen cells to the sizes")
        self._measure = widgets.Button(
            description="Measure costs", tooltip="Capture the smallest and the largest shape alone, and time them"
        )
        super().__init__(
            checkpoint=checkpoint,
            backend=backend,
            frames=[int(self.traffic["frames"].max())] if frames is None else frames,
            batch_sizes=[int(self.traffic["batch_size"].max())] if batch_sizes is None else batch_sizes,
            policy=policy,
        )
        self.prediction: Forecast = self._predict(self.settings)
        self.map = CoverageMap(self.prediction.coverage, self._graphs())
        self.widget = self._explorer_layout()
        self._show()
        for field in (self.frames, self.batch_sizes, self.checkpoint):
            on_change(field, "value", self._edited)
        on_click(self._add, self.add_selected)
        on_click(self._measure, self.measure)

    # ------------------------------------------------------------------------------------------------ reading

    @property
    def settings(self) -> CaptureSettings:
        """What the fields say now.

        Raises:
            ConfigError: a field makes no sense.
        """
        frames = None if self._is_streaming else self.frames.value
        return CaptureSettings.parse(self.checkpoint.value, self.backend.value, frames, self.batch_sizes.value)

    @property
    def costs(self) -> pd.DataFrame | None:
        """Where bytes and seconds come from: as given, or measured by :meth:`measure`; None for neither."""
        return self._forecaster.costs

    def comparison(self) -> pd.DataFrame:
        """What was predicted beside what the last capture brought; no rows before it.

        Returns:
            The columns of :data:`~vgraph_lab.inspect.planner.outcome.OUTCOME_COLUMNS`.
        """
        return self._comparison.copy()

    def stage(self) -> dict[str, Any]:
        """The predicted sizes as a configuration that ``StageConfig.from_dict`` reads.

        Raises:
            ConfigError: there is no ``space``: a configuration cannot say exactly these frames.
        """
        if self._space is None:
            raise ConfigError(
                "sizes without a space are no configuration. Make the explorer with space=StatelessGrid() or a StreamingGrid."
            )
        return stage_of(self._space, self.prediction.choice)

    # ------------------------------------------------------------------------------------------------ doing

    def set_sizes(self, *, frames: Iterable[int] | None = None, batch_sizes: Iterable[int] | None = None) -> Forecast:
        """Write sizes into the fields, as typing does, and predict.

        Raises:
            ConfigError: sizes that make no sense, or frames for a streaming stage. Nothing has changed then.
        """
        if frames is not None and self._is_streaming:
            raise ConfigError("a streaming stage takes its frames from its chunks (the connector). Set batch_sizes only.")
        texts = [
            field.value if sizes is None else ", ".join(map(str, sizes))
            for field, sizes in ((self.frames, frames), (self.batch_sizes, batch_sizes))
        ]
        found = CaptureSettings.parse(self.checkpoint.value, self.backend.value, None if self._is_streaming else texts[0], texts[1])
        self._predict(found)  # refuses what can be read and not be captured
        self.frames.value, self.batch_sizes.value = texts
        return self.prediction

    def add_selected(self) -> Forecast:
        """Add rows and frames of the cells that are chosen on the map to the sizes, as the button does.

        Sizes are combined each with each, so more shapes than the chosen ones may be captured.

        Raises:
            InputError: no cell is chosen.
            ConfigError: the fields make no sense.
        """
        try:
            cells, found = self.map.selection, self.settings
            if not cells:
                raise InputError("no cell is chosen. Click cells of the map first, or set map.selection.")
            frames = None if self._is_streaming else sorted({*found.frames, *(frames for _, frames in cells)})
            added = self.set_sizes(frames=frames, batch_sizes=sorted({*found.batch_sizes, *(rows for rows, _ in cells)}))
        except VGraphLabError as error:
            self._say(str(error))
            raise
        self._say("")
        return added

    def measure(self, *, repeats: int = 3) -> pd.DataFrame:
        """Capture the largest and the smallest shape of each Target alone, time them, and predict with these costs.

        Returns:
            The cost table, as :func:`~vgraph_lab.inspect.planner.measure_costs` gives it.

        Raises:
            VGraphLabError: the fields make no sense, or a shape cannot be captured; the earlier costs are still used.
        """
        self._measure.disabled, self._measure.description = True, "Measuring …"
        self._say("")
        try:
            found = self.settings
            backend = create_backend(found.backend)
            targets = self._targets(self._load(found, backend.device), self._widest(found))
            ends = {t.target_id: _ends(t) for t in targets}
            self._forecaster.costs = measure_costs(backend, targets, ends, repeats=repeats)
            self._edited()
        except VGraphLabError as error:
            self._say(str(error))
            raise
        finally:
            self._measure.disabled, self._measure.description = False, "Measure costs"
        return self._forecaster.costs

    def run(self) -> CaptureReport:
        """Capture what the fields say, exactly as the button does, and compare with what was predicted.

        Raises:
            VGraphLabError: the fields make no sense, or the checkpoint cannot be read; the last capture is still there.
        """
        report = super().run()
        if self.manager is not None:
            self._compare(self.manager, report)
        return report

    def _compare(self, manager: VocoderCUDAGraphManager, report: CaptureReport) -> None:
        self._comparison = compare_outcome(self.prediction, self.traffic, manager)
        self._outcome.value = styled(outcome_html(self.prediction, self._comparison, report)).markup

    # ------------------------------------------------------------------------------------------------ inside

    @property
    def _is_streaming(self) -> bool:
        return isinstance(self._space, StreamingGrid)

    def _choice(self, found: CaptureSettings) -> Choice:
        """What the fields say, less what the policy switches off."""
        chosen, policy = self._chosen(found), self._policy
        if policy is None:
            return chosen
        graphs = tuple(g for g in chosen.graphs if not policy.enforce_eager and policy.for_target(g.target).enabled)
        return chosen._replace(targets=tuple(dict.fromkeys(g.target for g in graphs)), graphs=graphs) if graphs else Choice()

    def _chosen(self, found: CaptureSettings) -> Choice:
        if isinstance(self._space, StreamingGrid):
            return self._space.choice(found.batch_sizes)
        if isinstance(self._space, StatelessGrid):
            return self._space.choice(found.batch_sizes, found.frames)
        graphs = tuple(Shape(STATELESS_TARGET_ID, "", rows, frames) for rows in found.batch_sizes for frames in found.frames)
        return Choice((STATELESS_TARGET_ID,), found.batch_sizes, found.frames, graphs)

    def _predict(self, found: CaptureSettings) -> Forecast:
        return self._forecaster.of(self._choice(found))

    def _graphs(self) -> pd.DataFrame:
        return self.prediction.graphs.assign(reason="")

    def _edited(self) -> None:
        """Predict anew; or say what is wrong and keep the last prediction."""
        try:
            self.prediction = self._predict(self.settings)
        except VGraphLabError as error:
            self._say(str(error))
            return
        self._say("")
        self.map.update(self.prediction.coverage, self._graphs())
        self._show()

    def _show(self) -> None:
        self._figures.value = styled(prediction_html(self.prediction, self._schedule())).markup

    def _schedule(self) -> str:
        """Which frames a streaming stage captures, in words."""
        if not isinstance(self._space, StreamingGrid):
            return ""
        sizes = sorted({graph.frames for graph in self.prediction.choice.graphs})
        return f"frames {', '.join(map(str, sizes))} from the chunk schedule"

    def _targets(self, decoder: Code2WavDecoder, settings: CaptureSettings) -> Sequence[Target[Any]]:
        if self._space is None:
            return super()._targets(decoder, settings)
        window = decoder.geometry.sliding_window
        if isinstance(self._space, StreamingGrid) and self._space.window != window:
            raise ConfigError(
                f"the space was made for a window of {self._space.window} frames, and the decoder in {settings.checkpoint} has {window}. "
                f"Choose its checkpoint, or make the explorer with StreamingGrid(connector, {window})."
            )
        stage = stage_of(self._space, self._choice(settings)) | {"max_num_seqs": max(settings.batch_sizes)}
        return Qwen3TTSCode2Wav(decoder, StageConfig.from_dict(stage)).get_vocoder_cudagraph_targets()

    def _widest(self, found: CaptureSettings) -> CaptureSettings:
        """The sizes between which costs are modelled: the fields and the traffic together."""
        frames, rows = (
            {*own, *(int(value) for value in (self.traffic[name].min(), self.traffic[name].max()))}
            for own, name in ((found.frames, "frames"), (found.batch_sizes, "batch_size"))
        )
        sizes = () if self._is_streaming else tuple(sorted(frames))
        return CaptureSettings(found.checkpoint, found.backend, sizes, tuple(sorted(rows)))

    def _explorer_layout(self) -> widgets.Widget:
        calls, shapes = int(self.traffic["calls"].sum()), len(self.traffic)
        what = widgets.HTML(
            styled(f'<p class="vgl-what"><strong>Capture explorer</strong> &ensp;{calls:,} calls of {shapes:,} shapes</p>').markup
        )
        fields = [self.checkpoint, self._place, *(() if self._is_streaming else (self.frames,)), self.batch_sizes]
        actions = widgets.HBox([self.button, self._measure, self._add, self.progress.widget])
        return widgets.VBox([what, *fields, self._notice, self._figures, self.map, actions, self._outcome])

    def _choices(self) -> dict[str, str]:
        found = super()._choices()
        return {name: value for name, value in found.items() if name != "Frames per graph"} if self._is_streaming else found

    def _static_html(self) -> str:
        parts = [super()._static_html(), self._figures.value, self.map._static_html(), self._outcome.value]
        return "".join(parts)

    def __repr__(self) -> str:
        f = self.prediction.figures
        return f"CaptureExplorer({f['graphs']} graphs, {f['coverage']:.1%} of {int(self.traffic['calls'].sum()):,} calls predicted)"


def _ends(target: Target[Any]) -> tuple[Any, ...]:
    """The largest and the smallest Descriptor of a Target."""
    by_work = sorted(target.descriptors, key=lambda descriptor: descriptor.work)
    return tuple(dict.fromkeys((by_work[-1], by_work[0])))
