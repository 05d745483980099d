"""A panel to choose what is captured, and to capture it. A notebook can do the same without a click."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import ipywidgets as widgets
import torch
from torch import Tensor

from vgraph_lab.config import VocoderGraphSettings
from vgraph_lab.errors import BackendError, VGraphLabError
from vgraph_lab.graphs.backends import choose_backend, create_backend
from vgraph_lab.graphs.manager import VocoderCUDAGraphManager
from vgraph_lab.graphs.report import CaptureReport
from vgraph_lab.graphs.target import Target
from vgraph_lab.qwen3_tts.checkpoint import load_decoder
from vgraph_lab.qwen3_tts.decoder import Code2WavDecoder
from vgraph_lab.qwen3_tts.stateless import stateless_target

from .capture_settings import BUNDLED, CaptureSettings
from .html import escape, styled
from .progress import ProgressWidget
from .weak import on_click

__all__ = ["CapturePanel"]


class CapturePanel:
    """Checkpoint, backend, sizes and a Capture button; :meth:`run` does what the button does.

    ::

        panel = CapturePanel(frames=(50, 56, 69))
        display(panel)
        report = panel.run()
        waveform = panel.target(codes)

    Entries that make no sense give a message in the panel and change nothing: the last capture stays usable. A new
    capture clears the one before it first, so that capturing again leaves no memory behind.

    Args:
        checkpoint: folder, or ``bundled``.
        backend: ``auto``, ``cpu``, or ``cuda`` where there is one.
        frames: codec frames per graph.
        batch_sizes: rows per graph.
        policy: further settings of the Manager.

    Attributes:
        decoder: the eager decoder of the last capture, or None before it.
        target: the Target ``qwen3_tts.stateless`` of the last capture.
        manager: its Manager.
        report: its CaptureReport.
        widget: what is displayed.

    Raises:
        BackendError: this machine has no such backend.
    """

    def __init__(
        self,
        *,
        checkpoint: str | Path = BUNDLED,
        backend: str = "auto",
        frames: Iterable[int] = (50, 56, 69),
        batch_sizes: Iterable[int] = (1,),
        policy: VocoderGraphSettings | None = None,
    ) -> None:
        backends = ["auto", "cpu", *(["cuda"] if torch.cuda.is_available() else [])]
        if backend not in backends:
            raise BackendError(f"this machine has no backend {backend!r}: {choose_backend().why}. Accepted: {', '.join(backends)}.")
        self._policy, self._message = policy, ""
        self.decoder: Code2WavDecoder | None = None
        self.target: Target[Tensor] | None = None
        self.manager: VocoderCUDAGraphManager | None = None
        self.report: CaptureReport | None = None
        self._loaded: tuple[tuple[Path, torch.device], Code2WavDecoder] | None = None

        wide, label = widgets.Layout(width="min(100%, 46em)"), {"description_width": "9em"}
        self.checkpoint = widgets.Text(
            str(checkpoint), description="Checkpoint", placeholder="bundled, or a folder", layout=wide, style=label
        )
        self.backend = widgets.Dropdown(options=backends, value=backend, description="Backend", style=label)
        self.frames = widgets.Text(
            ", ".join(map(str, frames)), description="Frames per graph", placeholder="50, 56, 69", layout=wide, style=label
        )
        self.batch_sizes = widgets.Text(
            ", ".join(map(str, batch_sizes)), description="Batch sizes", placeholder="1, 2", layout=wide, style=label
        )
        self.button = widgets.Button(
            description="Capture", button_style="primary", tooltip="Capture these graphs; the last ones are released"
        )
        self.progress = ProgressWidget()
        self._notice, self._outcome = widgets.HTML(), widgets.HTML()
        self._place = widgets.HBox([self.backend, widgets.Label(f"auto is {choose_backend().name}: {choose_backend().why}")])
        self._actions = widgets.HBox([self.button, self.progress.widget])
        self.widget = self._layout()
        on_click(self.button, self.run)

    def _layout(self) -> widgets.Widget:
        return widgets.VBox([self.checkpoint, self._place, self.frames, self.batch_sizes, self._actions, self._notice, self._outcome])

    @property
    def settings(self) -> CaptureSettings:
        """What the fields say now.

        Raises:
            ConfigError: a field makes no sense.
        """
        return CaptureSettings.parse(self.checkpoint.value, self.backend.value, self.frames.value, self.batch_sizes.value)

    @property
    def message(self) -> str:
        """What went wrong in the last attempt; empty if nothing did."""
        return self._message

    def run(self) -> CaptureReport:
        """Capture what the fields say, exactly as the button does.

        Raises:
            VGraphLabError: the fields make no sense, or the checkpoint cannot be read; the last capture is still there.
        """
        self.button.disabled = True
        self.progress.reset()
        self._say("")
        try:
            report = self._capture(self.settings)
        except BaseException as error:  # an interrupt, too, is told before it goes on
            self.progress.fail()
            self._say(str(error) if isinstance(error, VGraphLabError) else f"{type(error).__name__}: {error}")
            raise
        finally:
            self.button.disabled = False
        self._outcome.value = styled(report._repr_html_()).markup
        return report

    def _capture(self, settings: CaptureSettings) -> CaptureReport:
        """Everything that can be refused comes before the last Manager is cleared."""
        backend = create_backend(settings.backend)
        decoder = self._load(settings, backend.device)
        targets = self._targets(decoder, settings)
        manager = VocoderCUDAGraphManager(backend, targets, self._policy)
        self.close()
        self.decoder, self.target, self.manager, self.report = decoder, targets[0], manager, None
        self._outcome.value = ""
        self.report = manager.capture(progress=self.progress)
        return self.report

    def _load(self, settings: CaptureSettings, device: torch.device) -> Code2WavDecoder:
        """The decoder of a folder; the same folder is not read again."""
        wanted = (settings.checkpoint, device)
        if self._loaded is None or self._loaded[0] != wanted:
            self._loaded = wanted, load_decoder(*wanted)
        return self._loaded[1]

    def _targets(self, decoder: Code2WavDecoder, settings: CaptureSettings) -> Sequence[Target[Any]]:
        return [stateless_target(decoder, bucket_frames=settings.frames, batch_sizes=settings.batch_sizes)]

    def close(self) -> None:
        """Clear the Manager: graphs and their memory go, the Target answers eagerly. Safe to call twice."""
        if self.manager is not None:
            self.manager.clear()

    def _say(self, message: str) -> None:
        """Show what went wrong; an empty message takes the last one away."""
        kept = "" if self.manager is None or not self.manager.is_ready else "\nThe last capture is still in place."
        self._message = message
        shown = styled(f'<div class="vgl-message" role="alert">{escape(message + kept)}</div>').markup if message else ""
        self._notice.value = shown

    def _choices(self) -> dict[str, str]:
        """The fields by name, for static pages."""
        choice = choose_backend()
        backend = self.backend.value + (f" → {choice.name} ({choice.why})" if self.backend.value == "auto" else "")
        return {
            "Checkpoint": self.checkpoint.value,
            "Backend": backend,
            "Frames per graph": self.frames.value,
            "Batch sizes": self.batch_sizes.value,
        }

    def _static_html(self) -> str:
        rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in self._choices().items())
        return styled(f'<dl class="vgl-form">{rows}</dl>').markup

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, Any]:
        """The live widget where there is one, and the choices as plain HTML for static pages."""
        return {**self.widget._repr_mimebundle_(), "text/html": self._static_html(), "text/plain": repr(self)}

    def __repr__(self) -> str:
        return (
            f"CapturePanel({self.checkpoint.value}, {self.backend.value}, frames {self.frames.value}, batch sizes {self.batch_sizes.value})"
        )
