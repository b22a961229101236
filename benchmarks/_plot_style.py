"""How a plot becomes a file: themes, PNG, and SVG whose colours are a page's CSS variables."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import matplotlib
from matplotlib.figure import Figure

Result = dict[str, Any]
Results = dict[str, Result]

LIGHT = {
    "paper": "#ffffff",
    "ink": "#1b1f24",
    "muted": "#59636e",
    "grid": "#d8dee4",
    "ours": "#0072b2",
    "drive": "#8c959f",
    "one": "#d55e00",
    "two": "#007a5a",
    "three": "#9b4f85",
}
DARK = {
    "paper": "#0d1117",
    "ink": "#e6edf3",
    "muted": "#9198a1",
    "grid": "#30363d",
    "ours": "#56b4e9",
    "drive": "#6e7681",
    "one": "#e69f00",
    "two": "#3fc79a",
    "three": "#d58fbd",
}
"""Okabe and Ito's colours, which all kinds of colour vision tell apart, made darker or lighter for the background."""
MARKS = {role: f"#f0f0{number:02x}" for number, role in enumerate(LIGHT, 1)}
"""Drawn into an SVG in place of a theme's colours, and then replaced by CSS variables."""


class Plot(NamedTuple):
    """A picture and what it needs."""

    name: str
    sources: tuple[str, ...]
    """Result files; without any of them it is left out."""
    about: str
    """What it shows, for those who do not see it."""
    draw: Callable[[Results, dict[str, str]], Figure]
    rows: str = ""
    """Pattern of the rows that it shows."""

    def has(self, result: Result) -> bool:
        """Whether the first of its files has what it shows."""
        return any(re.match(self.rows, row["name"]) for row in result["rows"])


def png(plot: Plot, found: Results, digest: str) -> bytes:
    """The light form, with the digest of its numbers in its description."""
    return _saved(plot, found, LIGHT, "png", dpi=130, metadata={"Software": None, "Description": digest})


def svg(plot: Plot, found: Results) -> str:
    """For the page: colours are its CSS variables."""
    with matplotlib.rc_context({"svg.hashsalt": plot.name}):
        text = _saved(plot, found, MARKS, "svg", metadata={"Date": None, "Creator": None}).decode()
    text = text[text.index("<svg") :]
    for role, mark in MARKS.items():
        text = text.replace(mark, f"var(--{role})")
    # Glyphs and clips have names of their own in each picture; the page has many pictures.
    text = re.sub(r'(id="|"#|url\(#)', rf"\g<1>{plot.name}-", text)
    return text.replace("<svg ", f'<svg role="img" aria-label="{plot.about}" ', 1)


def _saved(plot: Plot, found: Results, colors: dict[str, str], kind: str, **options: Any) -> bytes:
    style = {
        "font.size": 9.5,
        "axes.edgecolor": colors["grid"],
        "axes.labelcolor": colors["muted"],
        "axes.titlecolor": colors["ink"],
        "axes.titlesize": 10.5,
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "text.color": colors["ink"],
        "xtick.color": colors["muted"],
        "ytick.color": colors["muted"],
        "ytick.labelcolor": colors["ink"],
        "grid.color": colors["grid"],
        "figure.facecolor": colors["paper"],
        "axes.facecolor": colors["paper"],
        "legend.frameon": False,
        "hatch.linewidth": 0.6,
    }
    with matplotlib.rc_context(style):
        figure = plot.draw({name: found[name] for name in plot.sources if name in found}, colors)
        file = io.BytesIO()
        figure.savefig(file, format=kind, **options)
    return file.getvalue()
