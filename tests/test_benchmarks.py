"""The benchmarks' report and guard, from small made-up results; nothing is measured here."""

from __future__ import annotations

import importlib
import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
MACHINE = {
    "cpu": "a <fast> one",
    "cpus": 2,
    "memory_gib": 8.0,
    "kernel": "6.1",
    "file_system": "ext4",
    "mount_options": "rw",
    "python": "3.11",
    "versions": {"fp_multi": "0", "torch": None},
}


@pytest.fixture(scope="module", autouse=True)
def scripts() -> Iterator[None]:
    """The benchmarks import each other as scripts do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        yield


class Report(NamedTuple):
    module: ModuleType
    found: dict[str, Any]
    paths: list[Path]
    out: Path


@pytest.fixture(scope="module")
def report(scripts: None, tmp_path_factory: pytest.TempPathFactory) -> Report:
    """Drawn once: it takes seconds."""
    pytest.importorskip("matplotlib")
    module = importlib.import_module("report")
    directory = tmp_path_factory.mktemp("report")
    found = module.results(written(directory / "results"))
    return Report(module, found, module.write(found, directory / "out"), directory / "out")


@pytest.fixture
def check(scripts: None) -> ModuleType:
    return importlib.import_module("check")


def rate(name: str, gbytes_per_s: float, **more: Any) -> dict[str, Any]:
    rounds = [gbytes_per_s * 0.9, gbytes_per_s, gbytes_per_s * 1.1]
    return {"name": name, "gbytes_per_s": gbytes_per_s, "rounds_gbytes_per_s": rounds, **more}


def results() -> dict[str, list[dict[str, Any]]]:
    """Rows as the scripts write them."""
    training = [
        {"name": f"training: {name}", "speed": 0.9, "rounds_step_ms": [[9.0, 8.0]], "rounds_stall_ms": stalls, **more}
        for name, stalls, more in (("no checkpoints", [], {}), ("fp_multi, hybrid", [1.0, 2.0], {"stall_ms": 1.5}))
    ]
    scaled = [
        rate(f"{kind}: {name}", 1.0 + at, load_gbytes_per_s=2.0, mib=10**at, tensors=10**at)
        for kind in ("size", "leaves", "GPT & co")
        for name in ("fp_multi", "torch.save", "safetensors")
        for at in ((1,) if kind == "GPT & co" else (1, 2))
    ]
    writers = [
        rate(name, 1.0)
        for count in (1, 2)
        for name in (
            f"this drive, {count} writers, fp_multi",
            f"this drive, {count} raw writers",
            f"{count} drives of 200 MiB/s, as many writers, fp_multi",
            f"{count} drives of 200 MiB/s, as many raw writers",
        )
    ]
    dcp = [rate(f"{count} ranks: {name}", 1.0, load_gbytes_per_s=2.0) for count in (1, 2) for name in ("fp_multi", "x")]
    planned = {"name": "DP 8", "describe_ms": 1.0, "plan_ms": 2.0, "own_pieces_ms": 0.5}
    return {
        "save": [rate("the drive, new file", 3.0), rate("fp_multi, torch", 2.5), rate("torch.save + fsync", 0.5)],
        "load": [rate("the drive, direct", 3.0), rate("fp_multi, torch", 2.9)],
        "stall": training,
        "parallel": writers,
        "workloads": scaled,
        "contenders": [rate("fp_multi", 2.0, load_gbytes_per_s=2.0), {"name": "absent", "not_run": "not installed"}],
        "dcp": dcp,
        "orbax": [rate("fp_multi, async", 2.0, blocking_ms=3.0, restore_gbytes_per_s=1.0)],
        "partition": [planned],
        "ceiling": [rate("write, new file", 3.0)],
        "import": [{"name": "`import numpy`", "ms": 90.0}],
    }


def written(directory: Path) -> Path:
    directory.mkdir()
    for name, rows in results().items():
        ratios = [{"what": "save / x", "value": 0.5, "goal": ">= 0.9"}, {"what": "memory", "value": 5, "goal": "<= 64"}]
        facts = {"command": f"python {name}", "date": "2026-01-01", "machine": MACHINE, "state": "a < state"}
        (directory / f"{name}.json").write_text(json.dumps({**facts, "rows": rows, "ratios": ratios}))
    (directory / "quick.json").write_text("{}")
    return directory


def test_report_shows_all_that_is_there(report: Report) -> None:
    assert set(report.found) == set(results())
    expected = {"save", "load", "training", "writers", "sizes", "leaves", "models", "contenders", "dcp", "orbax"}
    assert {path.stem for path in report.paths} == {*expected, "partition", "ceiling", "index"}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in report.paths if path.suffix == ".png")
    page = (report.out / "index.html").read_text()
    assert "11 of 22 goals are met" in page
    assert "a &lt;fast&gt; one" in page
    # What has no result file is named with the command that makes it.
    absent = report.module.absent_from(report.found)
    expected = {"save_many_leaves", "load_many_leaves", "orbax_many_leaves", "reshard"}
    assert {benchmark.name for benchmark in absent} == expected
    assert all(benchmark.command in page for benchmark in absent)
    assert "contenders.py" not in page


def test_page_needs_nothing_else_and_follows_the_theme(report: Report) -> None:
    page = (report.out / "index.html").read_text()
    assert not re.search(r"(?:src|href)=[\"'](?!#)|url\((?!#)", page)
    assert "prefers-color-scheme: dark" in page
    pictures = re.findall(r"<svg .*?</svg>", page, re.DOTALL)
    assert len(pictures) == 12
    names: list[str] = []
    for picture in pictures:
        tree = ElementTree.fromstring(picture)
        names += [node.attrib["id"] for node in tree.iter() if "id" in node.attrib]
        assert "var(--ink)" in picture
        # Marks in place of colours would be nobody's colours.
        assert "#f0f0" not in picture
    assert len(names) == len(set(names))


def test_pages_of_the_project_name_missed_goals(report: Report) -> None:
    assert report.module.goals(report.found, "plots").startswith("11 of 22 goals are missed")
    assert "- save: save / x: 0.5, goal >= 0.9\n" in report.module.goals(report.found, "plots")
    assert "![Rates by the number of tensors](plots/leaves.png)" in report.module.everything(report.found, "plots")


def test_changed_numbers_are_noticed(report: Report) -> None:
    assert report.module.digest_in(report.out / "index.html") == report.module.digest(report.found)
    save = report.found["save"]
    changed = report.found | {"save": save | {"rows": save["rows"][:1]}}
    assert report.module.digest_in(report.out / "index.html") != report.module.digest(changed)
    wanted = {path.stem: digest for path, (_, digest) in report.module.wanted_pictures(changed).items()}
    assert wanted["save"] != report.module.digest_in(report.out / "save.png")
    assert wanted["load"] == report.module.digest_in(report.out / "load.png")


def ratio(what: str, value: float, goal: str) -> dict[str, Any]:
    return {"what": what, "value": value, "goal": goal}


def test_check_finds_what_got_worse(check: ModuleType) -> None:
    result = [ratio("save / raw", 0.9, ">= 0.95"), ratio("stall / step", 0.02, "<= 0.05"), ratio("MiB", 9, "<= 64")]
    record = check.recorded([check.ratios_of({"ratios": result})] * 3)
    assert set(record) == {"save / raw", "stall / step"}

    def bad(save: float, stall: float) -> list[str]:
        now = [ratio("save / raw", save, ">= 0.95"), ratio("stall / step", stall, "<= 0.05")]
        return [one.what for one in check.worse(record, check.ratios_of({"ratios": now}))]

    assert bad(0.9, 0.02) == []
    assert bad(9.0, 0.0) == []  # better is not worse
    assert bad(0.76, 0.0239) == []
    assert bad(0.74, 0.02) == ["save / raw"]
    assert bad(0.9, 0.025) == ["stall / step"]
    assert [one.found for one in check.worse(record, {})] == [None, None]


def test_tolerance_is_what_the_record_was_apart(check: ModuleType) -> None:
    runs = [{"a / b": ratio("a / b", value, ">= 1")} for value in (1.0, 2.0, 2.2)]
    assert check.recorded(runs)["a / b"]["tolerance"] == pytest.approx(2.0)
    assert check.recorded(runs)["a / b"]["value"] == 2.0


def test_check_measures_twice_before_it_complains(check: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    values = iter([0.1, 1.0, 0.1, 0.1])
    monkeypatch.setattr(check, "run", lambda *args: {"ratios": [ratio("a / b", next(values), ">= 1")]})
    record = check.recorded([{"a / b": ratio("a / b", 1.0, ">= 1")}])
    assert check.compare(check.BENCHMARKS[0], record, Path()) == []
    assert [one.what for one in check.compare(check.BENCHMARKS[0], record, Path())] == ["a / b"]


def test_catalogue_names_what_exists(check: ModuleType) -> None:
    for benchmark in check.BENCHMARKS:
        assert (ROOT / "benchmarks" / benchmark.script).exists()
    recorded = {path.stem for path in (ROOT / "benchmarks" / "results").glob("*.json")} - {"quick"}
    assert recorded <= {benchmark.name for benchmark in check.BENCHMARKS}
