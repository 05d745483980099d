"""The panel, on the tiny checkpoint: what the button does, what bad entries do, and what is left behind."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from vgraph_lab import bundled
from vgraph_lab.config import VocoderGraphSettings
from vgraph_lab.errors import BackendError, CheckpointError, ConfigError, OutOfBudgetError
from vgraph_lab.graphs import ManagerState
from vgraph_lab.views.capture_panel import CapturePanel


@pytest.fixture
def panel(tiny_folder: Path) -> Iterator[CapturePanel]:
    made = CapturePanel(checkpoint=tiny_folder, backend="cpu", frames=(2, 3), batch_sizes=(1,))
    yield made
    made.close()


@pytest.fixture(scope="module")
def captured_panel(tiny_folder: Path) -> Iterator[CapturePanel]:
    """A panel with one capture, for tests that must not change it."""
    made = CapturePanel(checkpoint=tiny_folder, backend="cpu", frames=(2,))
    made.run()
    yield made
    made.close()


def codes(panel: CapturePanel, frames: int) -> torch.Tensor:
    return torch.zeros(1, panel.decoder.geometry.num_quantizers, frames, dtype=torch.int64)


def test_run_captures_what_the_fields_say(panel):
    report = panel.run()
    assert [str(o.descriptor) for o in report.outcomes] == ["B1×T3", "B1×T2"]
    assert report.captured == 2
    assert (panel.report, panel.message, panel.target.is_bound) == (report, "", True)
    assert panel.progress.text == "2 of 2 done"
    x = codes(panel, 2)
    torch.testing.assert_close(panel.target(x), panel.decoder(x), rtol=0, atol=1e-6)
    assert panel.manager.stats().hits() == 1


def test_settings_can_be_read(panel, tiny_folder):
    found = panel.settings
    assert (found.checkpoint, found.backend, found.frames, found.batch_sizes) == (tiny_folder, "cpu", (2, 3), (1,))
    panel.checkpoint.value = "bundled"
    assert panel.settings.checkpoint == bundled.checkpoint_folder()


def test_the_button_does_what_run_does(panel):
    panel.button.click()
    assert panel.report.captured == 2
    assert panel.button.disabled is False


@pytest.mark.parametrize(
    ("field", "text", "message", "error"),
    [
        ("frames", "4, x", "Frames per graph: 'x' is not a whole number", ConfigError),
        ("frames", "4.5", "'4.5' is not a whole number", ConfigError),
        ("frames", "0", "'0' is not a whole number from 1", ConfigError),
        ("frames", "-3", "'-3' is not", ConfigError),
        ("frames", "٣", "is not a whole number", ConfigError),
        ("frames", "9" * 5000, "is not a whole number", ConfigError),
        ("frames", "", "Frames per graph is empty", ConfigError),
        ("frames", "4 4", "4 is given more than once", ConfigError),
        ("frames", "999999", "max_position_embeddings", ConfigError),
        ("batch_sizes", "one", "Batch sizes: 'one'", ConfigError),
        ("checkpoint", " ", "Checkpoint is empty", ConfigError),
        ("checkpoint", "/nowhere/at/all", "is not a folder", CheckpointError),
    ],
)
def test_bad_entries_give_a_message_and_lose_nothing(captured_panel, field, text, message, error):
    panel = captured_panel
    manager, target, report = panel.manager, panel.target, panel.report
    hits, good = manager.stats().hits(), getattr(panel, field).value
    getattr(panel, field).value = text
    with pytest.raises(error, match=message):
        panel.run()
    panel.button.click()  # the button shows the same and raises nothing
    getattr(panel, field).value = good
    assert re.search(message, panel.message)
    assert "The last capture is still in place" in panel._notice.value
    assert panel.button.disabled is False
    assert (panel.manager, panel.target, panel.report) == (manager, target, report)
    assert manager.state is ManagerState.READY
    target(codes(panel, 2))
    assert manager.stats().hits() == hits + 1


def test_a_message_is_escaped_and_goes_with_the_next_success(panel):
    panel.checkpoint.value, good = "<img src=x>", panel.checkpoint.value
    panel.button.click()
    assert "<img" not in panel._notice.value
    assert "still in place" not in panel._notice.value  # nothing was captured before
    panel.checkpoint.value = good
    panel.run()
    assert panel.message == ""
    assert 'role="alert"' not in panel._notice.value


def test_running_again_replaces_the_last_capture_and_leaves_no_memory(panel):
    panel.run()
    first, decoder = panel.manager, panel.decoder
    pool_bytes = first.pool.reserved_bytes
    assert pool_bytes > 0
    for _ in range(2):
        panel.run()
        assert panel.manager.pool.reserved_bytes == pool_bytes
    assert panel.decoder is decoder  # the same folder is not read again
    assert first.state is ManagerState.CLEARED
    assert first.pool.reserved_bytes == 0


def test_another_folder_is_read(panel, tiny_folder, tmp_path):
    panel.run()
    decoder = panel.decoder
    copied = tmp_path / "copy"
    copied.mkdir()
    for name in ("config.json", "model.safetensors"):
        (copied / name).write_bytes((tiny_folder / name).read_bytes())
    panel.checkpoint.value = str(copied)
    panel.run()
    assert panel.decoder is not decoder


def test_close_releases_everything_twice(panel):
    panel.run()
    panel.close()
    panel.close()
    assert panel.manager.pool.reserved_bytes == 0
    assert not panel.target.is_bound
    assert panel.target(codes(panel, 2)).shape[-1] == 2 * panel.decoder.samples_per_frame


def test_a_failed_capture_is_told_and_leaves_nothing(tiny_folder):
    policy = VocoderGraphSettings(strict=True, max_memory_bytes=1)
    panel = CapturePanel(checkpoint=tiny_folder, backend="cpu", frames=(2,), policy=policy)
    with pytest.raises(OutOfBudgetError):
        panel.run()
    assert "max_memory_bytes" in panel.message
    assert panel.progress.text == "stopped at 0 of 1"
    assert (panel.report, panel.manager.pool.reserved_bytes, panel.target.is_bound) == (None, 0, False)


def test_a_dropped_panel_lets_go_of_its_graphs(tiny_folder):
    """Widgets live as long as the kernel; a cell that is run again must not keep the last panel's graphs."""
    panel = CapturePanel(checkpoint=tiny_folder, backend="cpu", frames=(2,))
    panel.run()
    pool, button = weakref.ref(panel.manager.pool), panel.button
    del panel
    gc.collect()
    assert pool() is None
    button.click()
    assert (button.disabled, button.description) == (True, "Run the cell again")


def test_an_absent_backend_fails():
    with pytest.raises(BackendError, match="Accepted: auto, cpu"):
        CapturePanel(backend="tpu")


def test_shows_itself_live_and_static(panel):
    bundle: dict[str, Any] = panel._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in bundle
    for words in ("Checkpoint", "Backend", "2, 3", "1"):
        assert words in bundle["text/html"]
