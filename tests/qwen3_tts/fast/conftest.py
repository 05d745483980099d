"""Triton's kernels on a CPU, through its interpreter: the same functions, run by NumPy (TRITON_INTERPRET=1, set in tests/conftest.py)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vgraph_lab.qwen3_tts import incremental_forms

pytest.importorskip("triton", reason="Triton has no package for this platform")


@pytest.fixture
def kernels(_kernels: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The kernels as functions of CPU tensors; forms believe that they can run."""
    monkeypatch.setattr(incremental_forms, "_NEEDS_CUDA", False)
    return _kernels


@pytest.fixture(scope="session")
def _kernels() -> Any:
    if torch.cuda.is_available():
        pytest.skip("with a GPU these kernels are tested there (tests/gpu/test_cuda_fast.py)")
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        """From NumPy 2.4 on, arrays of one element are no numbers any more, and Triton 3.6 counts loops with them."""
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched
    from vgraph_lab.qwen3_tts.fast import kernels

    return kernels
