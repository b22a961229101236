"""What the tests of ``fp-multi convert`` have in common; needs the extra cli."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

import fp_multi as fp
from fp_multi._cli_app import app

OK, CORRUPT, OTHER = 0, 1, 2
QUICK = fp.SaveConfig(durable=False)

_MEASURE = """
import importlib, sys
from pathlib import Path
for module in sys.argv[5:]:
    importlib.import_module(module)
from fp_multi._cli_convert import convert
small, to = Path(sys.argv[3]), sys.argv[4]
convert(small, small.with_name("warm"), overwrite=False)  # what imports and engines take is not counted
if to != "fp_multi":
    convert(small.with_name("warm"), small.with_name("warm_" + to), overwrite=False, to=to)
def peak_kib():
    # Not getrusage: its peak is that of the process that started this one, if that was larger.
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])
Path("/proc/self/clear_refs").write_text("5")  # the peak is from now on
before = peak_kib()
convert(Path(sys.argv[1]), Path(sys.argv[2]), overwrite=False, to=to)
print("grown", (peak_kib() - before) // 1024)
"""


def convert(*args: object) -> Any:
    """Run the command in this process."""
    return CliRunner().invoke(app, ["convert", *map(str, args)], env={"COLUMNS": "200"})


def growth_mib(source: Path, target: Path, small: Path, to: str, *imports: str) -> int:
    """By how much the peak of a process's memory grows while it converts.

    Args:
        source: what is converted.
        target: where to.
        small: something small of the same format, which is converted first.
        to: the format to make.
        *imports: modules that are imported before.
    """
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, source, target, small, to, *imports],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[-1])
