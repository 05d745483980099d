"""The look. Truth: WCAG's contrast formula and a published model of colour blindness."""

from __future__ import annotations

import itertools
import xml.etree.ElementTree as ET

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.axes import Axes

from vgraph_lab.errors import FallbackReason
from vgraph_lab.views.style import COLOURS, INK, RC, REASON_COLOURS, chart, look

# Machado, Oliveira & Fernandes (2009), severity 1.0, on linear RGB.
BLINDNESS = {
    "none": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
TO_XYZ = np.array([[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]])


def linear(colour: str) -> np.ndarray:
    c = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)


def contrast(one: str, other: str) -> float:
    high, low = sorted((float(linear(c) @ TO_XYZ[1]) for c in (one, other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def lab(rgb: np.ndarray) -> np.ndarray:
    x = TO_XYZ @ rgb / np.array([0.95047, 1, 1.08883])
    f = np.where(x > 0.008856, np.cbrt(x), 7.787 * x + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def distance(one: str, other: str, blindness: str) -> float:
    seen = [np.clip(np.array(BLINDNESS[blindness]) @ linear(c), 0, 1) for c in (one, other)]
    return float(np.linalg.norm(lab(seen[0]) - lab(seen[1])))


@pytest.mark.parametrize("colour", sorted({*COLOURS.values(), *REASON_COLOURS.values(), INK}))
@pytest.mark.parametrize("page", ["#ffffff", "#111111"])
def test_every_colour_is_visible_on_light_and_dark_pages(colour, page):
    assert contrast(colour, page) >= 3


@pytest.mark.parametrize("blindness", list(BLINDNESS))
@pytest.mark.parametrize("group", [("eager", "graph", "difference"), ("charge", "pool", "device"), ("exact hit", "padded hit", "error")])
def test_colours_side_by_side_stay_apart(group, blindness):
    for one, other in itertools.combinations(group, 2):
        assert distance(COLOURS[one], COLOURS[other], blindness) > 10, (one, other)


def test_every_reason_has_a_colour_of_its_own():
    assert set(REASON_COLOURS) == set(FallbackReason)
    assert len(set(REASON_COLOURS.values())) == len(FallbackReason)


def draw(value: float, *, ax: Axes) -> Axes:
    ax.plot([0, value])
    ax.set_title("a <title>")
    ax.set_xlabel("time (s)")
    return ax


def test_the_look_ends_with_its_context():
    before = {name: mpl.rcParams[name] for name in RC}
    with look():
        assert mpl.rcParams["text.color"] == INK
    chart(draw, 1.0)._repr_html_()
    assert {name: mpl.rcParams[name] for name in RC} == before


def test_charts_take_the_text_colour_of_the_page():
    svg = chart(draw, 1.0).to_svg()
    assert "currentColor" in svg
    assert INK not in svg
    root = ET.fromstring(svg)
    assert root.tag.endswith("svg")
    assert root.attrib["role"] == "img"
    assert root.attrib["aria-label"] == "a <title>. time (s)"


def test_charts_link_to_nothing_and_are_reproducible():
    svg = chart(draw, 1.0).to_svg()
    assert svg == chart(draw, 1.0).to_svg()
    links = [value for element in ET.fromstring(svg).iter() for name, value in element.attrib.items() if name.endswith("href")]
    assert all(link.startswith("#") for link in links)
    assert "<image" not in svg
