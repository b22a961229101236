"""One HTML page with every result: nothing is loaded from anywhere, and it follows the reader's light or dark theme."""

from __future__ import annotations

import html as escape
from types import ModuleType
from typing import Any

from _plot_style import DARK, LIGHT

STYLE = """
* { box-sizing: border-box }
body { margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 62rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif }
h1 { font-size: 1.7rem; margin: 0 0 .3rem } h2 { font-size: 1.25rem; margin: 2.5rem 0 .4rem }
p, li { max-width: 75ch } .small { color: var(--muted); font-size: .85rem; overflow-wrap: anywhere }
code { font-family: ui-monospace, monospace; font-size: .92em }
figure { margin: 1rem 0; overflow-x: auto } svg { width: 100%; min-width: 34rem; height: auto; display: block }
.wide { overflow-x: auto } table { border-collapse: collapse; font-size: .86rem; margin: .6rem 0 }
th, td { padding: .25rem .7rem; border-bottom: 1px solid var(--grid); text-align: left; vertical-align: top }
th { color: var(--muted); font-weight: 600; white-space: nowrap }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums }
.missed { color: var(--one); font-weight: 600 } .met { color: var(--two) }
td:first-child { min-width: 15rem } a { color: var(--ours) }
nav { columns: 18rem; margin: 1rem 0 } nav a { display: inline-block }
"""


def html(report: ModuleType, found: dict[str, dict[str, Any]], pictures: dict[str, str]) -> str:
    """The page.

    Args:
        report: the report script, for what it knows of tables.
        found: the results by name.
        pictures: SVG by the plot's name.
    """
    titles = {benchmark.name: benchmark.title for benchmark in report.catalog.BENCHMARKS}
    shown = report.pictures_of(found)
    parts = [_section(report, name, titles.get(name, name), result, shown, pictures) for name, result in found.items()]
    links = "".join(f'<a href="#{name}">{text(titles.get(name, name))}</a><br>' for name in found)
    rest = "".join(f"<li>{text(one.title)}: <code>{text(one.command)}</code></li>" for one in report.absent_from(found))
    if rest:
        parts.append(f'<h2 id="absent">Not recorded yet</h2><ul>{rest}</ul>')
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f'<meta name="results" content="{report.digest(found)}">\n<title>fp_multi: benchmarks</title>\n'
        f"<style>\n:root {{ {_variables(LIGHT)} }}\n@media (prefers-color-scheme: dark) "
        f"{{ :root {{ {_variables(DARK)} }} }}{STYLE}</style>\n</head>\n<body>\n<h1>fp_multi: benchmarks</h1>\n"
        f"<p>{_goals(report, found)} Bars and tables are medians; a thin line spans the single rounds.</p>\n"
        f"<nav>{links}</nav>\n" + "\n".join(parts) + "\n</body>\n</html>\n"
    )


def _variables(colors: dict[str, str]) -> str:
    return "; ".join(f"--{role}: {color}" for role, color in colors.items())


def text(value: Any) -> str:
    """Escape, and show what Markdown calls code as code."""
    pieces = escape.escape(str(value)).split("`")
    return "".join(f"<code>{piece}</code>" if number % 2 else piece for number, piece in enumerate(pieces))


def _goals(report: ModuleType, found: dict[str, dict[str, Any]]) -> str:
    count = sum(len(result.get("ratios", ())) for result in found.values())
    return f"{count - sum(len(report.missed(result)) for result in found.values())} of {count} goals are met."


def _section(
    report: ModuleType, name: str, title: str, result: dict[str, Any], shown: dict[str, Any], pictures: dict[str, str]
) -> str:
    figures = "".join(
        f"<figure>{pictures[plot.name]}<figcaption class=small>{text(plot.about)}.</figcaption></figure>"
        for plot in shown.get(name, ())
    )
    ratios = result.get("ratios", ())
    missed = report.missed(result)
    lines = [one | {"": "missed" if one in missed else "met"} for one in ratios]
    return (
        f'<section><h2 id="{name}">{text(title)}</h2><p>{text(report.facts(result))}.</p>{figures}'
        + _table(report, result["rows"])
        + (_table(report, lines) if lines else "")
        + f'<p class="small"><code>{text(result["command"])}</code>, {result["date"]}: '
        f"{text(report.machine(result))}.</p></section>"
    )


def _table(report: ModuleType, rows: list[dict[str, Any]]) -> str:
    keys = report.columns(rows)
    numbers = {key for key in keys if all(isinstance(row.get(key, 0), (int, float)) for row in rows)}

    def cells(tag: str, values: dict[str, Any]) -> str:
        found = ""
        for key, value in values.items():
            kind = "number" if key in numbers else value if value in ("met", "missed") else ""
            found += f"<{tag}{f' class={kind}' if kind else ''}>{text(value)}</{tag}>"
        return f"<tr>{found}</tr>"

    head = cells("th", {key: report.TITLES.get(key, key.replace("_", " ")) for key in keys})
    body = "".join(cells("td", {key: report.cell(row.get(key, "")) for key in keys}) for row in rows)
    return f'<div class="wide"><table><thead>{head}</thead><tbody>{body}</tbody></table></div>'
