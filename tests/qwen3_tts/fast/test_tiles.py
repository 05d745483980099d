"""Tiles: what may be asked of the kernels, and how choices are kept."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vgraph_lab.qwen3_tts.fast import tiles
from vgraph_lab.qwen3_tts.fast.tiles import MOST_TILES, RESIDENT, RESIDENT_CHANNELS, Problem, Tile, candidates, fits, padded, tile_by_rule

DTYPES = st.sampled_from([torch.bfloat16, torch.float16, torch.float32])
products = st.builds(
    Problem,
    rows=st.integers(1, 10**6),
    columns=st.integers(1, 4096).map(lambda n: n * 16 if n > 1 else 7) | st.sampled_from([192, 288, 384]),
    channels=st.integers(1, 128).map(lambda n: n * 16),
    taps=st.integers(1, 11),
    kind=st.sampled_from(["", "s", "e", "n", "ng"]),
    may_split=st.booleans(),
    dtype=DTYPES,
)


@st.composite
def units(draw: st.DrawFn) -> Problem:
    channels, dtype = draw(st.integers(1, 8).map(lambda n: n * 16)), draw(DTYPES)
    may_stay = channels == RESIDENT_CHANNELS and dtype != torch.float32 and draw(st.booleans())
    return Problem(draw(st.integers(1, 10**6)), channels, channels, 7, "u", False, dtype, may_stay)


@given(products | units())
def test_every_tile_fits_its_problem(problem: Problem) -> None:
    found = candidates(problem)
    assert found
    assert len(set(found)) == len(found)
    assert (found[0] == RESIDENT) == problem.may_stay
    assert RESIDENT not in found[1:]
    for tile in found:
        assert fits(problem, tile)
        if tile == RESIDENT:
            continue
        assert problem.channels % (tile.depth * tile.parts) == 0, "a step ends where a tap ends"
        assert {n & (n - 1) for n in (tile.rows, tile.columns, tile.depth, tile.more)} == {0}
        assert min(tile.rows, tile.columns, tile.depth) >= 16
        assert tile.width == tile.columns + tile.more
        assert tile.more == 0 or (tile.more >= 16 and tile.split == 1 and problem.kind in ("", "s", "e"))
        assert "n" not in problem.kind or tile.rows <= 32, "with more, sums of squares come out wrong on Hopper"
        assert "u" not in problem.kind or tile.columns >= problem.columns, "one program holds all channels"
        assert tile.split == 1 or problem.may_split
        assert tile.split * 384 <= max(384, problem.taps * problem.channels)
        programs = -(-problem.rows // tile.rows) * -(-problem.columns // tile.width)
        assert tile.split == 1 or programs <= MOST_TILES


SIZES = st.integers(4, 10).map(lambda n: 1 << n)


@given(
    products | units(),
    st.builds(Tile, rows=st.sampled_from([16, 32]), columns=SIZES, depth=st.just(16), more=st.just(0) | SIZES.filter(lambda n: n <= 256)),
)
def test_no_program_of_a_tile_that_fits_reads_beyond_a_matrix(problem: Problem, tile: Tile) -> None:
    """As the kernels count: programs one beside the other, each with its columns, and more beside them."""
    for each in [tile, *candidates(problem)]:
        if each != RESIDENT and fits(problem, each):
            programs = math.ceil(problem.columns / each.width)
            last = (programs - 1) * each.width + each.columns + each.more
            assert problem.columns <= last <= padded(problem.columns)


@pytest.mark.parametrize("columns", [7, 128, 129, 256, 257, 1536])
@pytest.mark.parametrize("gate", [False, True])
def test_matrices_are_padded_to_whole_tiles(kernels: Any, columns: int, gate: bool) -> None:
    """A gate's second half begins where the first one ends, and is as wide."""
    from vgraph_lab.qwen3_tts.fast.products import Product

    given = columns * (2 if gate else 1)
    product = Product(torch.ones(16, given), None, gate=gate)
    assert product.matrix.shape == (16, padded(columns) + (columns if gate else 0))
    assert product.bias.shape == product.matrix.shape[1:]
    assert bool((product.matrix[:, :given] == 1).all())
    assert not product.matrix[:, given:].any()


def test_the_rule_is_the_first_candidate_and_fills_the_gpu() -> None:
    """The wide convolution of one row: few rows, a long sum."""
    tile = tile_by_rule(Problem(100, 1536, 1024, 7, "s", True, torch.bfloat16))
    assert (100 // tile.rows + 1) * (1536 // tile.columns) * tile.split >= 132


@pytest.fixture
def tuner_class(kernels: Any) -> Any:
    from vgraph_lab.qwen3_tts.fast.tuning import TileTuner

    return TileTuner


PROBLEM = Problem(100, 256, 64, 3, "", True, torch.bfloat16)
SMALL = Problem(100, 48, 48, 3, "", True, torch.bfloat16)
UNIT = Problem(100, 96, 96, 7, "u", False, torch.bfloat16)
NORM = Problem(100, 96, 64, 1, "n", False, torch.bfloat16)


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


REFUSED = {
    "depth": (SMALL, Tile(16, 16, 32)),
    "step": (SMALL, Tile(16, 16, 16, parts=4)),
    "norm in parts": (Problem(100, 64, 64, 1, "n", False, torch.bfloat16), Tile(16, 16, 16, split=2)),
    "counters": (Problem(10**6, 4096, 64, 7, "", True, torch.bfloat16), Tile(16, 16, 64, split=2)),
    "unit": (Problem(100, 48, 48, 7, "u", False, torch.bfloat16), Tile(16, 32, 16)),
    "unit with more": (UNIT, Tile(16, 64, 32, more=32)),
    "unit that cannot stay": (UNIT, RESIDENT),
    "width": (SMALL, Tile(16, 256, 16)),
    "last program": (Problem(100, 200, 64, 1, "", True, torch.bfloat16), Tile(16, 64, 64, more=32)),
    "registers": (Problem(1000, 1024, 64, 1, "", True, torch.bfloat16), Tile(512, 256, 64)),
    "parts with more": (PROBLEM, Tile(16, 32, 64, split=2, more=32)),
    "parts": (PROBLEM, Tile(16, 64, 64, split=4)),
    "norm of many rows": (NORM, Tile(64, 64, 64)),
    "norm with more": (NORM, Tile(16, 64, 64, more=32)),
    "gate with more": (replace(NORM, kind="g"), Tile(16, 64, 64, more=32)),
    "zero": (PROBLEM, Tile(0, 16, 16)),
    "power": (PROBLEM, Tile(24, 16, 16)),
    "power of more": (SMALL, Tile(16, 32, 16, more=24)),
    "too few more": (SMALL, Tile(16, 32, 16, more=8)),
    "less than none": (SMALL, Tile(16, 32, 16, more=-16)),
    "warps": (PROBLEM, Tile(16, 16, 16, warps=3)),
}


@pytest.mark.parametrize(("problem", "tile"), REFUSED.values(), ids=REFUSED)
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
            may_split, may_stay = not set(kind) & set("ngu"), kind == "u" and int(channels) == RESIDENT_CHANNELS and dtype != "float32"
            problem = Problem(int(rows), int(columns), int(channels), int(taps), kind, may_split, getattr(torch, dtype), may_stay)
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
