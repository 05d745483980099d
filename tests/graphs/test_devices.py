"""Which device a name means, and that asking costs nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vgraph_lab.errors import BackendError
from vgraph_lab.graphs import backends
from vgraph_lab.graphs.backends import checked_device, create_backend


def refuse(*_: Any) -> None:
    raise AssertionError("a backend was created only to look at a device")


@pytest.mark.parametrize("asked", ["auto", "cpu", torch.device("cpu")])
def test_checking_creates_no_backend(monkeypatch: pytest.MonkeyPatch, asked: Any) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(backends, "CpuGraphBackend", refuse)
    monkeypatch.setattr(backends, "CudaGraphBackend", refuse)
    assert checked_device(asked) == torch.device("cpu")


def test_a_cuda_device_is_checked_without_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "Stream", refuse)
    assert checked_device("cuda") == torch.device("cuda", 1)
    assert checked_device(torch.device("cuda", 0)) == torch.device("cuda", 0)
    with pytest.raises(BackendError, match=r"cuda:2 is not a CUDA device of this machine. Accepted: cuda:0 … cuda:1"):
        checked_device("cuda:2")


@pytest.mark.parametrize("ask", [checked_device, create_backend])
def test_unusable_devices_are_refused(monkeypatch: pytest.MonkeyPatch, ask: Any) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BackendError, match="Use backend 'cpu'"):
        ask("cuda:0")
    with pytest.raises(BackendError, match="no graph backend captures on 'mps'"):
        ask("mps")
