"""Put the tables of benchmarks/results/*.json into README.md and docs/performance.md: no number is typed by hand.

Run: python benchmarks/report.py [--check]
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BLOCK = re.compile(r"(<!-- results: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
TITLES = {
    "name": "",
    "gbytes_per_s": "GB/s",
    "write_gbytes_per_s": "write alone, GB/s",
    "ms": "ms",
    "cpu_s_per_gb": "CPU s/GB",
    "extra_memory_mib": "extra MiB",
    "memory_beyond_state_mib": "extra MiB",
    "setting": "best setting",
    "step_ms": "step, ms",
    "p99_step_ms": "p99, ms",
    "speed": "speed of training",
    "stall_ms": "stall, ms",
    "p99_stall_ms": "p99 stall, ms",
    "what": "",
    "value": "measured",
    "goal": "goal",
}
NOT_YET = "Not measured yet.\n"


def results() -> dict[str, dict[str, Any]]:
    """The result files by their name."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}


def markdown(rows: list[dict[str, Any]], keys: list[str]) -> str:
    """A Markdown table of some of the columns."""
    lines = [[TITLES.get(key, key.replace("_", " ")) for key in keys], ["---"] * len(keys)]
    lines += [[str(row.get(key, "")) for key in keys] for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def about(result: dict[str, Any]) -> str:
    """Where a table comes from, in one sentence."""
    machine = result["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items() if version)
    return (
        f"`{result['command']}`, {result['date']}: {machine['cpu']}, {machine['cpus']} CPUs, "
        f"{machine['memory_gib']} GiB, Linux {machine['kernel']}, {machine['file_system']} "
        f"({machine['mount_options']}), Python {machine['python']}, {versions}.\n"
    )


def summary(found: dict[str, dict[str, Any]]) -> str:
    """README.md: who saves and loads how fast."""
    if not {"save", "load"} <= found.keys():
        return NOT_YET
    save, load = found["save"], found["load"]
    text = (
        f"Saving, until durable ({save['state']}; median of {save['rounds']} alternating rounds; {save['cache']}):\n\n"
    )
    text += markdown(save["rows"], ["name", "gbytes_per_s", "cpu_s_per_gb", "extra_memory_mib"])
    text += f"\nLoading, every byte ({load['state']}; median of {load['rounds']} rounds; {load['cache']}):\n\n"
    text += markdown(load["rows"], ["name", "gbytes_per_s", "cpu_s_per_gb"])
    return f"{text}\n{about(save)}Loading: `{load['command']}`, {load['date']}, same machine.\n"


def everything(found: dict[str, dict[str, Any]]) -> str:
    """docs/performance.md: all tables."""
    parts = []
    for name, result in found.items():
        keys = list(dict.fromkeys(key for row in result["rows"] for key in row if not key.startswith("rounds_")))
        facts = [f"{key}: {result[key]}" for key in ("state", "cache", "rounds", "fio") if key in result]
        part = f"### {name.replace('_', ' ')}\n\n{'; '.join(facts)}.\n\n{markdown(result['rows'], keys)}"
        if result.get("ratios"):
            part += "\n" + markdown(result["ratios"], ["what", "value", "goal"])
        parts.append(f"{part}\n{about(result)}")
    return "\n".join(parts) or NOT_YET


def rendered(text: str) -> str:
    """A page with its result blocks renewed."""
    found = results()
    makers = {"summary": summary, "everything": everything}
    return BLOCK.sub(lambda match: f"{match[1]}\n{makers[match[2]](found)}\n{match[3]}", text)


def stale() -> list[Path]:
    """The pages whose tables are not those of the result files."""
    pages = [ROOT / "README.md", ROOT / "docs" / "performance.md"]
    return [page for page in pages if rendered(page.read_text()) != page.read_text()]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a page is stale")
    check = parser.parse_args().check
    for page in stale():
        if check:
            raise SystemExit(f"{page.relative_to(ROOT)} is stale: run python benchmarks/report.py")
        page.write_text(rendered(page.read_text()))
        print(f"{page.relative_to(ROOT)} renewed")


if __name__ == "__main__":
    main()
