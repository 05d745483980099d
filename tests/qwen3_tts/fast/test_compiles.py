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
    is_hopper = capability == 90
    kernels = {each["kernel"] for each in found}
    everywhere = {"attend", "convolve", "depthwise_norm", "embed", "move_histories", "residual_unit", "sum_taps"}
    assert kernels == everywhere | ({"resident_unit"} if is_hopper else set())
    assert all(each["shared"] <= SHARED_BYTES[capability] for each in found)

    turns = {(each["early"], each["waits"], each["lets_start"]) for each in found}
    assert turns == {(True, 1, 1) if is_hopper else (False, 0, 0)}, "each kernel waits once for the one before, or there is no need to"

    for each in found:  # the resident kernel copies its weights, and has other warps' code in front
        if is_hopper and each["kernel"] != "resident_unit":
            assert each["touches_before_its_turn"] == [], f"{each['kernel']} looks at memory that the kernel before may be writing"

    products = [each for each in found if each["kernel"] in ("convolve", "residual_unit")]
    large = [each for each in products if each["rows"] >= 64 and each["warps"] >= 4]
    assert {each["more"] for each in large} == {0, 32, 64, 128}
    resident = [each for each in found if each["kernel"] == "resident_unit"]
    assert len(resident) == (2 if is_hopper else 0), "with the stream, and without"
    assert all((each["wgmma"] > 0) == is_hopper for each in large + resident), "matrix units of Hopper are used, and asked of nobody else"
    with_norms = [each for each in products if each["norm"]]
    assert len(with_norms) >= 6
    assert not any(each["wgmma"] for each in with_norms), "sums of squares beside asynchronous matrix instructions come out wrong"
