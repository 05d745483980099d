"""The house rules that can be read off the files."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import vgraph_lab

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "vgraph_lab"
# A part imports only from those before it.
ORDER = [
    "errors",
    "bundled",
    "requests",
    "config",
    "graphs",
    "qwen3_tts",
    "vllm_v1",
    "runner",
    "workload",
    "inspect",
    "views",
    "bench",
    "tour",
    "doctor",
    "commands",
    "cli",
]


def part_of(path: Path) -> str:
    relative = path.relative_to(PACKAGE)
    return relative.parts[0].removesuffix(".py")


def imported_parts(path: Path) -> set[str]:
    """Parts of the package that a module imports, at any depth of the file."""
    package = ("vgraph_lab", *path.relative_to(PACKAGE).parent.parts)
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{module}.{alias.name}" for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "vgraph_lab" and len(parts) > 1 and parts[1] in ORDER:
                found.add(parts[1])
    return found


@pytest.mark.parametrize(
    "path",
    [p for p in sorted(PACKAGE.rglob("*.py")) if p.name != "__init__.py" or p.parent != PACKAGE],
    ids=lambda p: str(p.relative_to(PACKAGE)),
)
def test_imports_point_upwards(path: Path) -> None:
    own = part_of(path)
    assert own in ORDER, f"{own} has no place in the order"
    later = [part for part in imported_parts(path) if ORDER.index(part) > ORDER.index(own)]
    assert later == [], f"{own} imports from {later}, which come after it"


def test_graphs_know_no_model_and_models_no_manager() -> None:
    for path in (PACKAGE / "qwen3_tts").rglob("*.py"):
        assert "graphs.manager" not in path.read_text(), path


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_modules_stay_readable(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 400


def test_public_names_exist_and_are_sorted() -> None:
    assert vgraph_lab.__all__ == sorted(vgraph_lab.__all__)
    assert all(hasattr(vgraph_lab, name) for name in vgraph_lab.__all__)


def test_environment_and_pyproject_agree() -> None:
    """environment.yml installs Python in pyproject's range and the project itself, and repeats no dependency."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    conda = [d for d in environment["dependencies"] if isinstance(d, str)]
    (pip,) = [d["pip"] for d in environment["dependencies"] if isinstance(d, dict)]
    assert conda == [f"python{project['requires-python']}", "pip"]
    assert environment["name"] == project["name"]
    ((requirement),) = pip
    assert requirement.startswith("-e .[")
    assert set(requirement.removeprefix("-e .[").removesuffix("]").split(",")) <= set(project["optional-dependencies"])


def test_lock_pins_every_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    locked = {
        line.split("==")[0].strip().lower().replace("_", "-")
        for line in (ROOT / "requirements.lock").read_text().splitlines()
        if "==" in line
    }
    wanted = [*project["dependencies"], *project["optional-dependencies"]["test"]]
    names = {"".join(c if c.isalnum() or c in "-_" else " " for c in w).split()[0].lower().replace("_", "-") for w in wanted}
    assert names <= locked, names - locked
    assert "file:" not in (ROOT / "requirements.lock").read_text()


def test_a_source_tree_works_without_being_installed() -> None:
    """On a borrowed machine the tree is only put on the path: nothing may ask for the distribution's metadata."""
    code = (
        "import importlib.metadata as m\n"
        "real = m.distribution\n"
        "def distribution(name):\n"
        "    if name.replace('_', '-') == 'vgraph-lab': raise m.PackageNotFoundError(name)\n"
        "    return real(name)\n"
        "m.distribution = distribution\n"
        "import vgraph_lab.cli, vgraph_lab.doctor, vgraph_lab.tour\n"
        "print(vgraph_lab.__version__, vgraph_lab.doctor.diagnose('cpu')[1].finding)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == [vgraph_lab.__version__] * 2
