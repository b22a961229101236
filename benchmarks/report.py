"""Make all that shows benchmarks/results/*.json: tables in README.md and docs/performance.md, plots, an HTML page.

Run: python benchmarks/report.py [--check]
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import importlib
import json
import re
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"(<!-- results: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
PNG_START = 8
TITLES = {
    "name": "",
    "gbytes_per_s": "GB/s",
    "write_gbytes_per_s": "write alone, GB/s",
    "handed_back_ms": "handed back, ms",
    "load_gbytes_per_s": "load, GB/s",
    "restore_gbytes_per_s": "restore, GB/s",
    "restore_on_8_devices_gbytes_per_s": "restore on 8 devices, GB/s",
    "blocking_ms": "blocking, ms",
    "ms": "ms",
    "mib": "MiB",
    "cpu_s_per_gb": "CPU s/GB",
    "extra_memory_mib": "extra MiB",
    "memory_beyond_state_mib": "extra MiB",
    "setting": "setting",
    "bytes_on_disk_per_byte": "bytes on disk / byte",
    "not_run": "not run",
    "step_ms": "step, ms",
    "p99_step_ms": "p99, ms",
    "speed": "speed of training",
    "stall_ms": "stall, ms",
    "p99_stall_ms": "p99 stall, ms",
    "describe_ms": "describe, ms",
    "plan_ms": "plan, ms",
    "own_pieces_ms": "own pieces, ms",
    "imbalance_mib": "imbalance, MiB",
    "writer_mb": "MB a writer",
    "drive_mb": "MB a drive",
    "manifest_mib": "manifest, MiB",
    "what": "",
    "value": "measured",
    "goal": "goal",
}
NOT_YET = "Not measured yet.\n"
Results = dict[str, dict[str, Any]]


def _beside(name: str) -> Any:
    """A script of this directory, also when this file was loaded by its path."""
    if str(ROOT / "benchmarks") not in sys.path:
        sys.path.insert(0, str(ROOT / "benchmarks"))
    return importlib.import_module(name)


catalog = _beside("_catalog")
RESULTS: Path = catalog.RESULTS
PLOTS = ROOT / "docs" / "plots"
PAGE = PLOTS / "index.html"


def results(directory: Path | None = None) -> Results:
    """The result files by their name, in the order of the catalogue."""
    found = {path.stem: json.loads(path.read_text()) for path in sorted((directory or RESULTS).glob("*.json"))}
    found.pop(catalog.QUICK.stem, None)
    order = [benchmark.name for benchmark in catalog.BENCHMARKS]
    return {name: found[name] for name in [*order, *(found.keys() - set(order))] if name in found}


def columns(rows: list[dict[str, Any]]) -> list[str]:
    """What a table shows: all but the single rounds; long texts last."""
    found = dict.fromkeys(key for row in rows for key in row if not key.startswith("rounds_"))
    return sorted(found, key=lambda key: key in ("setting", "not_run"))


def cell(value: Any) -> str:
    """A value for a table: digits that somebody may read."""
    return f"{value:,}" if isinstance(value, int) and abs(value) >= 10_000 else str(value)


def markdown(rows: list[dict[str, Any]], keys: list[str]) -> str:
    """A Markdown table of some of the columns."""
    lines = [[TITLES.get(key, key.replace("_", " ")) for key in keys], ["---"] * len(keys)]
    lines += [[cell(row.get(key, "")) for key in keys] for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def about(result: dict[str, Any]) -> str:
    """Where a table comes from, in one sentence."""
    return f"`{result['command']}`, {result['date']}: {machine(result)}.\n"


def machine(result: dict[str, Any]) -> str:
    """What a result depends on."""
    found = result["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items() if version)
    return (
        f"{found['cpu']}, {found['cpus']} CPUs, {found['memory_gib']} GiB, Linux {found['kernel']}, "
        f"{found['file_system']} ({found['mount_options']}), Python {found['python']}, {versions}"
    )


def facts(result: dict[str, Any]) -> str:
    """The conditions of a run."""
    return "; ".join(f"{key}: {result[key]}" for key in ("state", "cache", "rounds", "fio") if key in result)


def missed(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The ratios that do not reach their goals."""
    return [one for one in result.get("ratios", ()) if not catalog.goal_of(one["goal"]).met(one["value"])]


# Blocks of the Markdown pages


def summary(found: Results, plots: str) -> str:
    """README.md: who saves and loads how fast."""
    if not {"save", "load"} <= found.keys():
        return NOT_YET
    save, load = found["save"], found["load"]
    text = (
        f"Saving, until durable ({save['state']}; median of {save['rounds']} alternating rounds; {save['cache']}):\n\n"
        f"![Saving: the table below as bars]({plots}/save.png)\n\n"
    )
    text += markdown(save["rows"], ["name", "gbytes_per_s", "cpu_s_per_gb", "extra_memory_mib"])
    text += f"\nLoading, every byte ({load['state']}; median of {load['rounds']} rounds; {load['cache']}):\n\n"
    text += f"![Loading: the table below as bars]({plots}/load.png)\n\n"
    text += markdown(load["rows"], ["name", "gbytes_per_s", "cpu_s_per_gb"])
    return f"{text}\n{about(save)}Loading: `{load['command']}`, {load['date']}, same machine.\n"


def everything(found: Results, plots: str) -> str:
    """docs/performance.md: all plots and tables, and what is not measured."""
    parts = []
    pictures = pictures_of(found)
    for name, result in found.items():
        part = f"### {name.replace('_', ' ')}\n\n{facts(result)}.\n\n"
        for plot in pictures.get(name, ()):
            part += f"![{plot.about}]({plots}/{plot.name}.png)\n\n"
        part += markdown(result["rows"], columns(result["rows"]))
        if result.get("ratios"):
            part += "\n" + markdown(result["ratios"], ["what", "value", "goal"])
        parts.append(f"{part}\n{about(result)}")
    absent = [f"- {one.title}: `{one.command}`\n" for one in absent_from(found)]
    if absent:
        parts.append(f"### Not recorded yet\n\n{''.join(absent)}")
    return "\n".join(parts) or NOT_YET


def goals(found: Results, plots: str) -> str:
    """docs/performance.md: the goals that are missed."""
    lines = [
        f"- {name.replace('_', ' ')}: {one['what']}: {one['value']}, goal {one['goal']}\n"
        for name, result in found.items()
        for one in missed(result)
    ]
    count = sum(len(result.get("ratios", ())) for result in found.values())
    if not lines:
        return f"All {count} goals are met in the newest run.\n"
    return f"{len(lines)} of {count} goals are missed in the newest run:\n\n{''.join(lines)}"


def absent_from(found: Results) -> list[Any]:
    """The benchmarks without a result file."""
    return [benchmark for benchmark in catalog.BENCHMARKS if benchmark.name not in found]


def pictures_of(found: Results) -> dict[str, list[Any]]:
    """For each result file the plots that are shown with it and that its numbers are enough for."""
    shown: dict[str, list[Any]] = {}
    for plot in _plots().PLOTS:
        present = [name for name in plot.sources if name in found]
        if present and plot.has(found[present[0]]):
            shown.setdefault(present[0], []).append(plot)
    return shown


def rendered(text: str, plots: str) -> str:
    """A page with its result blocks renewed; ``plots`` is the way from it to the pictures."""
    found = results()
    makers: dict[str, Callable[[Results, str], str]] = {"summary": summary, "everything": everything, "goals": goals}
    return BLOCK.sub(lambda match: f"{match[1]}\n{makers[match[2]](found, plots)}\n{match[3]}", text)


# Files


def digest(found: Results) -> str:
    """Of the numbers that a picture or the page was made from."""
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:16]


def digest_in(path: Path) -> str | None:
    """The digest that a PNG or the page carries."""
    if not path.exists():
        return None
    if path.suffix == ".html":
        found = re.search(r'<meta name="results" content="(\w+)">', path.read_text())
        return found[1] if found else None
    data, at = path.read_bytes(), PNG_START
    while at < len(data):
        size, kind = struct.unpack_from(">I4s", data, at)
        if kind == b"tEXt" and data[at + 8 :].startswith(b"Description\0"):
            return data[at + 20 : at + 8 + size].decode()
        at += size + 12
    return None


def wanted_pictures(found: Results) -> dict[Path, tuple[Any, str]]:
    """Every PNG that there should be: its plot and digest."""
    plots = [plot for shown in pictures_of(found).values() for plot in shown]
    return {
        PLOTS / f"{plot.name}.png": (plot, digest({name: found[name] for name in plot.sources if name in found}))
        for plot in plots
    }


def pages() -> dict[Path, str]:
    """The Markdown pages, and from each the way to the pictures."""
    return {ROOT / "README.md": "docs/plots", ROOT / "docs" / "performance.md": "plots"}


def stale() -> list[Path]:
    """The pages and pictures that are not those of the result files."""
    found = results()
    old = [page for page, plots in pages().items() if rendered(page.read_text(), plots) != page.read_text()]
    wanted = wanted_pictures(found)
    old += [path for path, (_, expected) in wanted.items() if digest_in(path) != expected]
    old += [path for path in PLOTS.glob("*.png") if path not in wanted]
    return old + ([] if digest_in(PAGE) == digest(found) else [PAGE])


@functools.cache
def _plots() -> Any:
    return _beside("_plots")


def write(found: Results, directory: Path) -> list[Path]:
    """Draw all plots and write the page.

    Args:
        found: the results.
        directory: where the PNG files and index.html go.
    """
    drawing, page = _beside("_plot_style"), _beside("_page")
    directory.mkdir(parents=True, exist_ok=True)
    written, inline = [], {}
    for path, (plot, expected) in wanted_pictures(found).items():
        written.append(directory / path.name)
        written[-1].write_bytes(drawing.png(plot, found, expected))
        inline[plot.name] = drawing.svg(plot, found)
    written.append(directory / PAGE.name)
    written[-1].write_text(page.html(sys.modules[__name__], found, inline))
    return written


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a page or a picture is stale")
    parser.add_argument("--results", type=Path, help="read result files from here; needs --to")
    parser.add_argument(
        "--to", type=Path, help="write the pictures and the HTML page there, leave README and docs alone"
    )
    args = parser.parse_args()
    if args.to:
        for path in write(results(args.results), args.to):
            print(path)
        return
    if args.results:
        parser.error("--results needs --to: the pages of the project show benchmarks/results")
    old = stale()
    if args.check:
        if old:
            names = ", ".join(str(path.relative_to(ROOT)) for path in old)
            raise SystemExit(f"stale: {names}: run python benchmarks/report.py")
        return
    for page, plots in pages().items():
        if page in old:
            page.write_text(rendered(page.read_text(), plots))
    if {*old} - pages().keys():
        for path in old:
            if path.suffix == ".png":
                path.unlink(missing_ok=True)
        write(results(), PLOTS)
    for path in old:
        print(f"{path.relative_to(ROOT)} renewed")


if __name__ == "__main__":
    main()
