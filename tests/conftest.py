"""Shared by all tests: one thread per process (they run in parallel), and the tiny checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import vgraph_lab as vg
from vgraph_lab.qwen3_tts.decoder import Code2WavDecoder

torch.set_num_threads(1)

TINY = Path(__file__).parent / "data" / "tiny-12hz"


@pytest.fixture(scope="session")
def tiny_folder() -> Path:
    """A small random checkpoint in the published layout, with golden vectors beside it."""
    return TINY


@pytest.fixture(scope="session")
def tiny_decoder() -> Code2WavDecoder:
    return vg.load_decoder(TINY)
