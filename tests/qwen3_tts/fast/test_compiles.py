"""The kernels compile for GPUs that are not here: a mistake that only the compiler sees costs no time on a device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SHARED_BYTES = {80: 163 << 10, 90: 227 << 10}  # that one program can have


@pytest.mark.parametrize("capability", [80, 90])
def test_every_launch_of_a_step_compiles(capability: int, tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path)
    script = Path(__file__).with_name("compile_child.py")
    child = subprocess.run([sys.executable, str(script), str(capability)], capture_output=True, text=True, env=env, check=False)
    assert child.returncode == 0, child.stderr[-2000:]
    found: list[dict[str, Any]] = json.loads(child.stdout.splitlines()[-1])
    kernels = {each["kernel"] for each in found}
    assert kernels == {"attend", "convolve", "depthwise_norm", "embed", "move_histories", "residual_unit", "sum_taps"}
    assert all(each["shared"] <= SHARED_BYTES[capability] for each in found)
    large = [each for each in found if each["kernel"] in ("convolve", "residual_unit") and each["rows"] >= 64 and each["warps"] >= 4]
    assert large
    assert all((each["wgmma"] > 0) == (capability == 90) for each in large), "matrix units of Hopper are used, and asked of nobody else"
