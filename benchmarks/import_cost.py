"""What ``import fp_multi`` costs beside ``import numpy``, each in fresh interpreters, in turn.

Run: python benchmarks/import_cost.py [--json FILE]
"""

from __future__ import annotations

import statistics
import subprocess
import sys

import _harness as harness

CODE = """
import sys, time
begin = time.perf_counter()
{code}
print(time.perf_counter() - begin, *sorted({{"torch", "jax", "orbax", "tensorstore", "tensorflow"}} & set(sys.modules)))
"""


WORK = "import fp_multi; fp_multi.save, fp_multi.load, fp_multi.verify"
"""What does the work is imported at its first use; this asks for it."""


def import_s(statement: str) -> tuple[float, list[str]]:
    """Seconds inside a new interpreter, and the frameworks that are loaded behind it."""
    code = CODE.format(code=statement)
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    seconds, *frameworks = done.stdout.split()
    return float(seconds), frameworks


def main() -> None:
    parser = harness.options(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    taken: dict[str, list[float]] = {"import numpy": [], "import fp_multi": [], WORK: []}
    frameworks: list[str] = []
    for number in range(args.rounds + 1):
        for statement, times in taken.items():
            seconds, frameworks = import_s(statement)
            if number:  # the first time reads files from the drive
                times.append(seconds)
    ms = {statement: round(statistics.median(times) * 1e3, 1) for statement, times in taken.items()}
    facts = {
        "cache": "files in the page cache",
        "rounds": args.rounds,
        "rows": [{"name": f"`{statement}`", "ms": value} for statement, value in ms.items()],
        "frameworks_imported": frameworks,
        "ratios": [
            harness.ratio("import fp_multi / import numpy", ms["import fp_multi"] / ms["import numpy"], "<= 1.5"),
            harness.ratio("with all that works / import numpy", ms[WORK] / ms["import numpy"], "<= 1.5"),
            harness.ratio("frameworks imported", len(frameworks), "0"),
        ],
    }
    harness.finish("import", args, facts)


if __name__ == "__main__":
    main()
