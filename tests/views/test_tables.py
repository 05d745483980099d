"""Tables for reading: every row, units below names, nothing invented."""

from __future__ import annotations

import math
import re

import numpy as np
import pandas as pd
import pytest

from vgraph_lab.errors import InputError
from vgraph_lab.graphs.table import cell_text
from vgraph_lab.views.tables import show_table

TABLE = pd.DataFrame(
    {
        "name": ["<a>", "b"],
        "pool_mib": [1234.5, None],
        "max_dbfs": [-math.inf, -128.76],
        "snr_db": [math.inf, 3.0],
        "capture_s": [0.5, 1.25],
        "hit_rate": [0.9, None],
        "hits": pd.array([1200, None], dtype="Int64"),
        "is_equal": [True, False],
        "last_use_utc": pd.to_datetime([0, None], unit="s", utc=True),
    }
)


def cells(markup: str) -> list[list[str]]:
    body = markup.partition("<tbody>")[2]
    return [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in body.split("</tr>")[:-1]]


def test_values_are_formatted_by_their_unit():
    assert cells(show_table(TABLE).markup) == [
        ["&lt;a&gt;", "1,234.50", "−∞", "∞", "0.500", "90.0", "1,200", "yes", "1970-01-01 00:00:00"],
        ["b", "–", "−128.8", "3.0", "1.250", "–", "–", "no", "–"],
    ]


def test_numbers_of_numpy_are_numbers():
    assert cell_text("a_share", np.float32(0.5)) == "50.0"
    assert cell_text("x", np.float32("nan")) == "–"
    assert cell_text("sample_rate", 24_000.0) == "24,000.00"
    assert (cell_text("n", -1234), cell_text("n", np.int64(-1234)), cell_text("x", -0.5)) == ("−1,234", "−1,234", "−0.50")
    assert (cell_text("x", np.True_), cell_text("charge_bytes", 2e6)) == ("yes", "2,000,000")


def test_units_stand_below_the_names():
    headers = re.findall(r"<th[^>]*>(.*?)<small>(.*?)</small>", show_table(TABLE).markup)
    assert headers[1:6] == [("pool", "MiB"), ("max", "dBFS"), ("snr", "dB"), ("capture", "s"), ("hit rate", "%")]
    assert headers[6] == ("hits", "&nbsp;")


def test_every_row_is_shown():
    long = pd.DataFrame({"number": range(500)})
    assert len(cells(show_table(long).markup)) == 500


def test_columns_are_chosen_and_explained():
    markup = show_table(TABLE, ["hits", "name"], meanings={"hits": 'calls "served"'}).markup
    assert [row[0] for row in cells(markup)] == ["1,200", "–"]
    assert 'title="calls &quot;served&quot;"' in markup


def test_no_rows_are_said_to_be_none():
    assert cells(show_table(TABLE.iloc[:0]).markup) == [["no rows"]]


def test_an_unknown_column_fails_with_the_nearest_name():
    with pytest.raises(InputError, match=r"no column 'hit'\. Did you mean 'hits'\?"):
        show_table(TABLE, ["hit"])


def test_a_table_without_units_has_no_line_for_them():
    assert "<small>" not in show_table(TABLE, ["name", "hits"]).markup
    assert show_table(TABLE, ["name", "pool_mib"]).markup.count("<small>") == 2


def test_tuples_are_lists():
    assert cells(show_table(pd.DataFrame({"sizes": [(1, 2), ()]})).markup) == [["1, 2"], ["–"]]


def test_kibibytes_are_a_unit():
    assert "state<small>KiB</small>" in show_table(pd.DataFrame({"state_kib": [1.0]})).markup
