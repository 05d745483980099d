"""What commands have in common: options, a status line, and tables for people and for programs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any

import pandas as pd
import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vgraph_lab.graphs.table import cell_text

__all__ = ["AsJson", "Device", "Dtype", "Kind", "as_json_text", "console", "names", "numbers", "records", "rich_table", "status"]

console = Console()

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]


class Dtype(StrEnum):
    """Dtypes of weights and activations."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"

    @property
    def torch(self) -> torch.dtype:
        """The torch dtype of this name."""
        return getattr(torch, self.value)  # type: ignore[no-any-return]  # torch's attributes by name are Any


class Kind(StrEnum):
    """Kinds of requests: with a reference, without, or both in turn."""

    icl = "icl"
    xvec = "xvec"
    mixed = "mixed"


@contextmanager
def status() -> Iterator[Callable[[str], None]]:
    """A status line on stderr; plain lines where that is no terminal."""
    messages = Console(stderr=True)
    with messages.status("loading") as line:

        def progress(message: str) -> None:
            line.update(message)
            if not messages.is_terminal:
                messages.print(message, highlight=False)

        yield progress


def names(text: str) -> list[str]:
    """Names as an option has them: separated by commas. An empty one stays, for whoever knows what is accepted to refuse it."""
    return [name.strip() for name in text.split(",")]


def numbers(text: str | None, option: str, *, default: str) -> list[int]:
    """Distinct whole numbers from 1, as an option has them: separated by commas.

    Args:
        text: what was given; None if nothing was.
        option: its name, for the error.
        default: takes the place of None, and of nothing else.

    Raises:
        typer.BadParameter: they are something else.
    """
    text = default if text is None else text
    try:
        found = [int(part) for part in names(text)]
    except ValueError:
        found = []
    if not found or min(found) < 1 or len(set(found)) != len(found):
        raise typer.BadParameter(f"{option} must be distinct whole numbers from 1, separated by commas, got {text!r}.")
    return found


_WHOLE = ("target", "descriptor", "requested")  # columns that are not broken over lines


def rich_table(table: pd.DataFrame, headings: Mapping[str, str], *, title: str) -> Table:
    """Columns of a table for a terminal of eighty columns.

    Args:
        table: any table.
        headings: column → heading, in the order in which they are shown; shares and rates are shown in percent.
        title: above the table.
    """
    shown = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name, heading in headings.items():
        numeric = pd.api.types.is_numeric_dtype(table[name]) and not pd.api.types.is_bool_dtype(table[name])
        shown.add_column(heading, justify="right" if numeric else "left", overflow="fold", no_wrap=name in _WHOLE)
    for row in records(table[list(headings)]):
        shown.add_row(*(escape(cell_text(name, value)) for name, value in row.items()))
    return shown


def records(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows of a table as JSON has them: what is missing is null, times are ISO 8601."""
    return [{str(name): _plain(value) for name, value in row.items()} for row in table.astype(object).to_dict("records")]


def _plain(value: Any) -> Any:
    if value is None or value is pd.NA or value is pd.NaT or (isinstance(value, float) and math.isnan(value)):
        return None
    if isinstance(value, datetime):
        return value.isoformat()
    return value.item() if hasattr(value, "item") else value


def as_json_text(content: Any) -> str:
    """Indented JSON."""
    return json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False)
