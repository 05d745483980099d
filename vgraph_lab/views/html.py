"""HTML that looks the same in JupyterLab, light or dark, and in a static report: one style sheet, no script, no network."""

from __future__ import annotations

import html
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

__all__ = ["Html", "escape", "script", "style_sheet", "styled"]

_STATIC = Path(__file__).parent / "static"

escape = html.escape


@dataclass(frozen=True, slots=True)
class Html:
    """Markup that a notebook shows as such."""

    markup: str

    def _repr_html_(self) -> str:
        return self.markup

    def __repr__(self) -> str:
        return f"Html({len(self.markup):,} characters)"


@cache
def style_sheet(name: str = "vgl.css") -> str:
    """A style sheet of ``views/static``. Colours follow the surrounding text, so any theme suits it."""
    return (_STATIC / name).read_text(encoding="utf-8")


@cache
def script(*names: str) -> str:
    """Modules of ``views/static`` as one module, in this order: each may import from those before it."""
    sources = ((_STATIC / name).read_text(encoding="utf-8") for name in names)
    return "\n".join(re.sub(r'^import \{[^}]*\} from "\./[\w.]+";\n', "", source, flags=re.MULTILINE) for source in sources)


def styled(markup: str) -> Html:
    """Markup with the style sheet it needs, for display. It depends on nothing else on the page."""
    return Html(f'<div class="vgl"><style>{style_sheet()}</style>{markup}</div>')
