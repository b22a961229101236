"""The plots of the result files: one function for each."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from _plot_style import Plot, Results
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

Rows = list[dict[str, Any]]

WIDTH = 8.6
ROW = 0.34
ALL_LINES = (("ours", "o", "-"), ("one", "s", "--"), ("two", "^", "-."), ("three", "D", ":"))
"""Colour, marker and line of the first, second, ... in a plot with lines: never colour alone."""


# Bars


def bars(ax: Axes, rows: Rows, key: str, colors: dict[str, str], unit: str, drive: str | None = None) -> None:
    """A bar for each row, the least and the greatest round as a line, and the drive's own rate through all of them."""
    rows = [row for row in rows if key in row]
    ceiling = next((row[key] for row in rows if row["name"] == drive), None)
    right = max([*_rounds(rows, key), *(row[key] for row in rows)])
    for place, row in enumerate(rows):
        value = row[key]
        rounds = row.get(f"rounds_{key}") or [value]
        ax.barh(place, value, 0.66, color=colors[_role(row["name"])])
        if max(rounds) > min(rounds):
            ax.plot([min(rounds), max(rounds)], [place, place], color=colors["ink"], lw=1, marker="|", ms=5)
        text = f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
        if ceiling and row["name"] != drive:
            text += f"  ({value / ceiling:.0%})"
        _label(ax, max(value, *rounds) + 0.012 * right, place, text, colors)
    if ceiling:
        ax.axvline(ceiling, color=colors["ink"], lw=1, ls=(0, (4, 3)), zorder=3)
        unit += f"; in brackets and as a line: of “{drive}”"
    ax.set(yticks=range(len(rows)), yticklabels=[row["name"] for row in rows], xlabel=unit, xlim=(0, right * 1.2))
    ax.set_ylim(len(rows) - 0.45, -0.55)
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="x")


def _label(ax: Axes, x: float, y: float, text: str, colors: dict[str, str], ha: str = "left") -> None:
    """Text that no line runs through."""
    box = {"facecolor": colors["paper"], "edgecolor": "none", "pad": 1}
    ax.text(x, y, text, ha=ha, va="center", zorder=4, bbox=box)


def _rounds(rows: Rows, key: str) -> list[float]:
    return [value for row in rows for value in row.get(f"rounds_{key}", ())]


def _role(name: str) -> str:
    name = name.rpartition(": ")[2]
    if name.startswith("fp_multi"):
        return "ours"
    return "drive" if name.startswith("the drive") or "raw writers" in name else "one"


def stacked(panels: Sequence[tuple[str, Rows, str, str, str | None]], colors: dict[str, str]) -> Figure:
    """Bars below bars: title, rows, the column that is drawn, its unit, the row that is the drive's own."""
    panels = [panel for panel in panels if any(panel[2] in row for row in panel[1])]
    heights = [sum(key in row for row in rows) * ROW + 0.85 for _, rows, key, _, _ in panels]
    figure = Figure(figsize=(WIDTH, sum(heights)), layout="constrained")
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    for ax, (title, rows, key, unit, drive) in zip(axes, panels, strict=True):
        bars(ax, rows, key, colors, unit, drive)
        ax.set_title(title)
    return figure


def throughput(found: Results, colors: dict[str, str]) -> Figure:
    (name, result) = next(iter(found.items()))
    drive = {"save": "the drive, new file", "load": "the drive, direct"}.get(name)
    unit = "GB/s until durable" if name.startswith("save") else "GB/s from a cold cache"
    return stacked([(result["state"], result["rows"], "gbytes_per_s", unit, drive)], colors)


def ceiling(found: Results, colors: dict[str, str]) -> Figure:
    rows = [row | {"name": f"the drive: {row['name']}"} for row in found["ceiling"]["rows"]]
    return stacked([(found["ceiling"]["state"], rows, "gbytes_per_s", "GB/s", None)], colors)


def contenders(found: Results, colors: dict[str, str]) -> Figure:
    result = found["contenders"]
    return stacked(
        [
            (f"Save: {result['state']}", result["rows"], "gbytes_per_s", "GB/s until durable", "the drive, new file"),
            ("Load", result["rows"], "load_gbytes_per_s", "GB/s from a cold cache", "the drive, direct"),
        ],
        colors,
    )


def orbax(found: Results, colors: dict[str, str]) -> Figure:
    panels = []
    for result in found.values():
        rows, state = result["rows"], result["state"]
        panels += [
            (f"Save: {state}", rows, "gbytes_per_s", "GB/s until durable", "the drive, new file"),
            ("Restore", rows, "restore_gbytes_per_s", "GB/s from a cold cache", None),
            ("Restore on 8 devices", rows, "restore_on_8_devices_gbytes_per_s", "GB/s from a cold cache", None),
            ("Blocking part of a save", rows, "blocking_ms", "ms", None),
        ]
    return stacked(panels, colors)


def dcp(found: Results, colors: dict[str, str]) -> Figure:
    panels = []
    for count in ("1", "2"):
        rows = [row for row in found["dcp"]["rows"] if row["name"].startswith(f"{count} ranks: ")]
        rows = [row | {"name": row["name"].partition(": ")[2]} for row in rows]
        ranks = "1 rank" if count == "1" else f"{count} ranks"
        panels += [
            (f"dcp.save, {ranks}", rows, "gbytes_per_s", "GB/s until durable", "the drive, new file"),
            (f"dcp.load, {ranks}", rows, "load_gbytes_per_s", "GB/s from a cold cache", None),
        ]
    return stacked(panels, colors)


def partition(found: Results, colors: dict[str, str]) -> Figure:
    keys = ("describe_ms", "plan_ms", "own_pieces_ms")
    rows = [
        {"name": f"fp_multi: {row['name']}", "ms": round(sum(row[key] for key in keys), 1)}
        for row in found["partition"]["rows"]
    ]
    figure = stacked([("Planning on one rank", rows, "ms", "ms, median (describe, plan, own pieces)", None)], colors)
    figure.axes[0].set_yticklabels([row["name"].partition(": ")[2] for row in rows])
    return figure


# Training


def training(found: Results, colors: dict[str, str]) -> Figure:
    """The steps of one round one after the other; the parts in which the loop waited for a save are set off."""
    rows = [row for row in found["stall"]["rows"] if row["name"].startswith("training: ")]
    figure = Figure(figsize=(WIDTH, len(rows) * 0.42 + 1.1), layout="constrained")
    ax = figure.subplots()
    ends = []
    for place, row in enumerate(rows):
        steps, stalls = _median_round(row)
        at = 0.0
        for step, stall in zip(steps, stalls, strict=True):
            work = max(step - stall, 0.0)
            ax.barh(place, work, 0.6, at, color=colors["drive"], edgecolor=colors["paper"], lw=0.7)
            ax.barh(place, stall, 0.6, at + work, color=colors["one"], hatch="////", edgecolor=colors["paper"], lw=0)
            at += step
        ends.append(at)
    for place, (row, end) in enumerate(zip(rows, ends, strict=True)):
        stall = f", stall {row['stall_ms']:.3g} ms" if "stall_ms" in row else ""
        _label(ax, end + 0.01 * max(ends), place, f"{row['speed']:.0%}{stall}", colors)
    names = [row["name"].partition(": ")[2] for row in rows]
    unit = f"s for {len(_median_round(rows[0])[0])} steps, saved each time; beside: speed of training, median stall"
    ax.set(yticks=range(len(rows)), yticklabels=names, xlabel=unit, xlim=(0, max(ends) * 1.3))
    ax.invert_yaxis()
    ax.tick_params(axis="y", length=0)
    ax.axvline(ends[0], color=colors["ink"], lw=1, ls=(0, (4, 3)))
    ax.grid(axis="x")
    handles = [
        Patch(color=colors["drive"], label="training"),
        Patch(facecolor=colors["one"], hatch="////", edgecolor=colors["paper"], lw=0, label="waiting for a save"),
    ]
    figure.legend(handles=handles, loc="outside upper left", ncols=2)
    return figure


def _median_round(row: dict[str, Any]) -> tuple[list[float], list[float]]:
    """The steps of the middle one of the rounds, and what of each was a stall, in seconds."""
    rounds = row["rounds_step_ms"]
    number = sorted(range(len(rounds)), key=lambda i: sum(rounds[i]))[len(rounds) // 2]
    count = len(rounds[number])
    stalls = row["rounds_stall_ms"][number * count : (number + 1) * count] or [0.0] * count
    return [ms / 1e3 for ms in rounds[number]], [ms / 1e3 for ms in stalls]


# Scaling

_THIS_DRIVE = re.compile(r"this drive, (\d+) (writers, fp_multi|raw writers)")
_THROTTLED = re.compile(r"(\d+) drives of (\d+) MiB/s, as many (writers, fp_multi|raw writers)")


def writers(found: Results, colors: dict[str, str]) -> Figure:
    """Rates by the number of writers, on one drive and on as many throttled ones."""
    rows = found["parallel"]["rows"]
    here = [(m[1], m[2], row) for row in rows if (m := _THIS_DRIVE.fullmatch(row["name"]))]
    throttled = [(m[1], m[3], row) for row in rows if (m := _THROTTLED.fullmatch(row["name"]))]
    each = next((int(m[2]) for row in rows if (m := _THROTTLED.fullmatch(row["name"]))), 0)
    panels = [("Writers on this drive", here), (f"As many throttled drives of {each} MiB/s", throttled)]
    panels = [panel for panel in panels if panel[1]]
    figure = Figure(figsize=(WIDTH, 3.2), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for ax, (title, entries) in zip(axes, panels, strict=True):
        counts = list(dict.fromkeys(count for count, _, _ in entries))
        sums = [int(count) * each * 1.048576e-3 if entries is throttled else 0.0 for count in counts]
        top = max(*sums, *(row["gbytes_per_s"] for _, _, row in entries))
        for count, kind, row in entries:
            raw = kind.startswith("raw")
            place = counts.index(count) + (0.2 if raw else -0.2)
            rate, line = row["gbytes_per_s"], sums[counts.index(count)]
            color = colors["drive" if raw else "ours"]
            ax.bar(place, rate, 0.36, color=color, edgecolor=colors["paper"], lw=0, hatch="////" if raw else None)
            above = line if 0 <= line - rate < 0.09 * top else rate
            _label(ax, place, above + 0.045 * top, f"{rate:.2f}", colors, ha="center")
        for place, line in enumerate(sums):
            if line:
                ax.plot([place - 0.42, place + 0.42], [line] * 2, color=colors["ink"], lw=1, ls=(0, (4, 3)))
        ax.set(title=title, ylabel="GB/s until durable", ylim=(0, top * 1.15))
        ax.set_xticks(range(len(counts)), [f"{count} writer{'s' if count != '1' else ''}" for count in counts])
        ax.tick_params(axis="x", length=0)
        ax.grid(axis="y")
    handles: list[Artist] = [
        Patch(color=colors["ours"], label="fp_multi"),
        Patch(facecolor=colors["drive"], hatch="////", edgecolor=colors["paper"], lw=0, label="raw writers"),
    ]
    if throttled:
        handles += axes[-1].plot([], [], color=colors["ink"], lw=1, ls=(0, (4, 3)), label="sum of the drives' rates")
    figure.legend(handles=handles, loc="outside upper left", ncols=3)
    return figure


def scaling(kind: str, column: str, label: str) -> Callable[[Results, dict[str, str]], Figure]:
    """Lines over the size of the state or the number of its leaves."""

    def draw(found: Results, colors: dict[str, str]) -> Figure:
        rows = [row for row in found["workloads"]["rows"] if row["name"].startswith(f"{kind}: ")]
        names = list(dict.fromkeys(row["name"].partition(": ")[2] for row in rows))
        panels = (("Save", "gbytes_per_s", "GB/s until durable"), ("Load", "load_gbytes_per_s", "GB/s, cold cache"))
        figure = Figure(figsize=(WIDTH, 3.4), layout="constrained")
        axes = figure.subplots(1, 2)
        lines = []
        for ax, (title, key, unit) in zip(axes, panels, strict=True):
            lines = []
            for name, (color, marker, style) in zip(names, ALL_LINES, strict=False):
                own = [row for row in rows if row["name"] == f"{kind}: {name}"]
                at, rates = [row[column] for row in own], [row[key] for row in own]
                lines += ax.plot(at, rates, color=colors[color], marker=marker, ls=style, ms=5, label=name)
            ax.set(title=title, xlabel=label, ylabel=unit, xscale="log")
            ticks = sorted({row[column] for row in rows})
            ax.set_xticks(ticks, [f"{tick:,}" for tick in ticks], minor=False)
            ax.minorticks_off()
            ax.tick_params(axis="x", labelrotation=30 if len(ticks) > 5 else 0)
            if _wide(rows, key):
                ax.set_yscale("log")
                ax.yaxis.set_major_formatter("{x:g}")
            else:
                ax.set_ylim(0)
            ax.grid()
        figure.legend(handles=lines, loc="outside upper left", ncols=len(lines))
        return figure

    return draw


def _wide(rows: Rows, key: str) -> bool:
    """Whether a linear axis would hide the small ones."""
    return bool(max(row[key] for row in rows) > 15 * min(row[key] for row in rows))


def models(found: Results, colors: dict[str, str]) -> Figure:
    """One dot for each contender and state."""
    rows = [row for row in found["workloads"]["rows"] if row["name"].partition(": ")[0] not in ("size", "leaves")]
    states = list(dict.fromkeys(row["name"].rpartition(": ")[0] for row in rows))
    names = list(dict.fromkeys(row["name"].rpartition(": ")[2] for row in rows))
    figure = Figure(figsize=(WIDTH, len(states) * 0.42 + 1.3), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    lines = []
    for ax, (title, key, unit) in zip(
        axes,
        (("Save", "gbytes_per_s", "GB/s until durable"), ("Load", "load_gbytes_per_s", "GB/s, cold cache")),
        strict=True,
    ):
        lines = []
        for number, (name, (color, marker, _)) in enumerate(zip(names, ALL_LINES, strict=False)):
            rates = [next(r[key] for r in rows if r["name"] == f"{state}: {name}") for state in states]
            # A little apart, so that equal ones stay visible.
            places = [place + 0.16 * (number - (len(names) - 1) / 2) for place in range(len(states))]
            lines += ax.plot(rates, places, ls="", marker=marker, color=colors[color], ms=6.5, label=name)
        ax.set(title=title, xlabel=unit, yticks=range(len(states)), yticklabels=states)
        if _wide(rows, key):
            ax.set_xscale("log")
            ax.xaxis.set_major_formatter("{x:g}")
        else:
            ax.set_xlim(0)
        ax.set_ylim(len(states) - 0.5, -0.5)
        ax.tick_params(axis="y", length=0)
        ax.grid()
    figure.legend(handles=lines, loc="outside upper left", ncols=len(lines))
    return figure


PLOTS = (
    Plot("save", ("save",), "Rate of a durable save, by contender, against the drive's own", throughput),
    Plot("load", ("load",), "Rate of a cold load, by contender, against the drive's own", throughput),
    Plot(
        "training",
        ("stall",),
        "Training steps one after the other, with and without checkpoints",
        training,
        "training: ",
    ),
    Plot(
        "writers", ("parallel",), "Rate by the number of processes that write one checkpoint", writers, "this drive, "
    ),
    Plot("sizes", ("workloads",), "Rates by the size of the state", scaling("size", "mib", "MiB"), "size: "),
    Plot(
        "leaves", ("workloads",), "Rates by the number of tensors", scaling("leaves", "tensors", "tensors"), "leaves: "
    ),
    Plot("models", ("workloads",), "Rates for states of real models", models, "(?!size: |leaves: )"),
    Plot("contenders", ("contenders",), "Rates of many more contenders", contenders),
    Plot("dcp", ("dcp",), "torch.distributed.checkpoint on its own storage and on fp_multi's", dcp),
    Plot("orbax", ("orbax", "orbax_many_leaves"), "Orbax with its own handler and with fp_multi's", orbax),
    Plot("save_many_leaves", ("save_many_leaves",), "Rate of a durable save of 100,000 tensors", throughput),
    Plot("load_many_leaves", ("load_many_leaves",), "Rate of a cold load of 100,000 tensors", throughput),
    Plot("partition", ("partition",), "Planning time on one rank of large trainings", partition),
    Plot("ceiling", ("ceiling",), "What the drive itself can do", ceiling),
)
