"""Tests of the training recipe, a package beside the checkpoint and not part of vgraph_lab: make it importable."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "data" / "lab-12hz" / "recipe"))
