"""Tiles: what may be asked of the kernels, and how choices are kept."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vgraph_lab.qwen3_tts.fast import tiles
from vgraph_lab.qwen3_tts.fast.tiles import MOST_TILES, Problem, Tile, candidates, fits, tile_by_rule

problems = st.builds(
    Problem,
    rows=st.integers(1, 10**6),
    columns=st.integers(1, 4096).map(lambda n: n * 16 if n > 1 else 7),
    channels=st.integers(1, 128).map(lambda n: n * 16),
    taps=st.integers(1, 11),
    kind=st.sampled_from(["", "s", "e", "n", "ng"]),
    may_split=st.booleans(),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
)


@given(problems)
def test_every_tile_fits_its_problem(problem: Problem) -> None:
    found = candidates(problem)
    assert found
    assert len(set(found)) == len(found)
    for tile in found:
        assert problem.channels % (tile.depth * tile.parts) == 0, "a step ends where a tap ends"
        assert {n & (n - 1) for n in (tile.rows, tile.columns, tile.depth)} == {0}
        assert min(tile.rows, tile.columns, tile.depth) >= 16
        assert tile.columns <= 256, "weights are filled up for no wider tiles"
        assert tile.split == 1 or problem.may_split
        assert tile.split * 384 <= max(384, problem.taps * problem.channels)
        programs = -(-problem.rows // tile.rows) * -(-problem.columns // tile.columns)
        assert tile.split == 1 or programs <= MOST_TILES
        assert fits(problem, tile)


@given(st.integers(1, 8).map(lambda n: n * 16), st.integers(1, 10**6))
def test_a_residual_unit_is_held_by_one_program(channels: int, rows: int) -> None:
    for tile in candidates(Problem(rows, channels, channels, 7, "u", False, torch.bfloat16)):
        assert tile.columns >= channels


def test_the_rule_is_the_first_candidate_and_fills_the_gpu() -> None:
    """The wide convolution of one row: few rows, a long sum."""
    tile = tile_by_rule(Problem(100, 1536, 1024, 7, "s", True, torch.bfloat16))
    assert (100 // tile.rows + 1) * (1536 // tile.columns) * tile.split >= 132


@pytest.fixture
def tuner_class(kernels: Any) -> Any:
    from vgraph_lab.qwen3_tts.fast.tuning import TileTuner

    return TileTuner


PROBLEM = Problem(100, 256, 64, 3, "", True, torch.bfloat16)


def test_tables_are_kept_and_damaged_ones_told(tuner_class: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tuner = tuner_class(torch.device("cpu"), autotune=True, folder=tmp_path / "new")
    assert tuner.tile(PROBLEM) == tile_by_rule(PROBLEM)
    tuner.chosen[PROBLEM.key] = Tile(16, 16, 16)
    tuner._write()
    assert tuner_class(torch.device("cpu"), autotune=True, folder=tmp_path / "new").tile(PROBLEM) == Tile(16, 16, 16)
    (file,) = (tmp_path / "new").iterdir()
    for damage in ("{", '["x"]', '{"a": [1, "y"]}', '{"a": 3}', json.dumps({"a": [1] * 9})):
        file.write_text(damage)
        caplog.clear()
        assert tuner_class(torch.device("cpu"), autotune=True, folder=tmp_path / "new").chosen == {}
        assert "is no table of tiles" in caplog.text


@pytest.mark.parametrize(
    ("problem", "tile"),
    [
        (Problem(100, 48, 48, 3, "", True, torch.bfloat16), Tile(16, 16, 32)),
        (Problem(100, 48, 48, 3, "", True, torch.bfloat16), Tile(16, 16, 16, parts=4)),
        (Problem(100, 64, 64, 1, "n", False, torch.bfloat16), Tile(16, 16, 16, split=2)),
        (Problem(10**6, 4096, 64, 7, "", True, torch.bfloat16), Tile(16, 16, 64, split=2)),
        (Problem(100, 48, 48, 7, "u", False, torch.bfloat16), Tile(16, 32, 16)),
        (Problem(100, 1024, 64, 1, "", True, torch.bfloat16), Tile(16, 512, 64)),
        (PROBLEM, Tile(0, 16, 16)),
        (PROBLEM, Tile(24, 16, 16)),
        (PROBLEM, Tile(16, 16, 16, warps=3)),
    ],
    ids=["depth", "step", "norm", "counters", "unit", "width", "zero", "power", "warps"],
)
def test_a_tile_that_does_not_fit_is_left_out_and_told(
    tuner_class: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, problem: Problem, tile: Tile
) -> None:
    tuner = tuner_class(torch.device("cpu"), autotune=True, folder=tmp_path)
    tuner.chosen[problem.key] = tile
    assert tuner.tile(problem) == tile_by_rule(problem)
    assert "cannot be run and is left out" in caplog.text
    assert tuner.chosen == {}


def test_what_the_package_brings_fits() -> None:
    tables = list((Path(tiles.__file__).parent / "tuned").glob("*.json"))
    assert tables
    for table in tables:
        for key, tile in json.loads(table.read_text()).items():
            dtype, rows, columns, taps, channels, kind = re.fullmatch(r"(\w+):(\d+)x(\d+)x(\d+)x(\d+)(\w*)", key).groups()  # type: ignore[union-attr]
            may_split = not set(kind) & set("ngu")
            problem = Problem(int(rows), int(columns), int(channels), int(taps), kind, may_split, getattr(torch, dtype))
            assert problem.key == key
            assert fits(problem, Tile(*tile)), key


def test_without_a_home_nothing_is_kept(tuner_class: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    tuner = tuner_class(torch.device("cpu"), autotune=True)
    tuner._write()
    assert "there is no home folder" in caplog.text


def test_a_table_that_cannot_be_kept_is_told(tuner_class: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    tuner = tuner_class(torch.device("cpu"), autotune=True, folder=tmp_path / "file" / "folder")
    tuner._write()
    assert "tuned tiles are not kept" in caplog.text


def test_candidates_that_fail_are_left_out_and_told(tuner_class: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuner, (first, *rest) = tuner_class(torch.device("cpu"), autotune=True, folder=tmp_path), candidates(PROBLEM)
    monkeypatch.setattr(tuner, "_time_us", lambda run, tile: float(tile.rows + tile.columns))

    def run(tile: Tile, *, compile_only: bool = False) -> None:
        if tile == first:
            raise RuntimeError("out of resource: shared memory\nmore")

    assert tuner._fastest(PROBLEM, run) == min(rest, key=lambda tile: tile.rows + tile.columns)
    assert tuner.failures == {PROBLEM.key: {first: "RuntimeError: out of resource: shared memory"}}
    assert any("1 candidates for bfloat16:100x256x3x64 failed" in note for note in tuner.notes())


def test_if_all_fail_there_is_no_choice(tuner_class: Any, tmp_path: Path) -> None:
    def run(tile: Tile, *, compile_only: bool = False) -> None:
        raise RuntimeError("no")

    assert tuner_class(torch.device("cpu"), autotune=True, folder=tmp_path)._fastest(PROBLEM, run) is None
