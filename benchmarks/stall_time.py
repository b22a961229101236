"""What a checkpoint at every step costs a training loop: fp_multi's three modes, its peers, and no checkpoints at all.

Run: python benchmarks/stall_time.py [--directory DIR] [--json FILE] [--plot FILE.png]
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import _harness as harness
import numpy as np
import torch
from _training import CONTENDERS, NOTHING, OURS, Contender, Trainer, busy_python, process_group, trainer_with

from fp_multi.adapters.torch import Checkpointer

WARM_UP_STEPS = 2
BESIDE_BUSY = ("torch.save + fsync", "dcp.async_save, thread")
"""The peers that are measured beside a busy Python thread, too."""
NOT_PEERS = (NOTHING, *OURS.values())
SAVES_OF_THE_CALL = 5


class Scenario(NamedTuple):
    """What the training looks like."""

    name: str
    forward_backward_s: float
    every: int
    """Which steps are saved."""
    beside: Callable[[], AbstractContextManager[None]]
    contenders: Sequence[Contender]
    rounds: int
    steps: int
    warm_up: bool = True
    """Whether a round comes first that does not count; not where each contender has run before."""


def percentile_99(values: Sequence[float]) -> float:
    return float(np.percentile(values, 99))


@dataclass
class Samples:
    """All that one contender's runs gave."""

    steps_s: dict[int, list[float]] = field(default_factory=dict)
    """For each round that it took part in."""
    stalls_s: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    write_rates: list[float] = field(default_factory=list)

    def median_s(self) -> float:
        return statistics.median(step for one in self.steps_s.values() for step in one)

    def p99_s(self) -> float:
        return percentile_99([step for one in self.steps_s.values() for step in one])


def main() -> None:
    parser = harness.options(__doc__)
    parser.add_argument("--width", type=int, default=1856, help="width of the layers")
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--forward-backward-s", type=float, default=1.0, help="how long they take, by way of the batch")
    parser.add_argument("--steps", type=int, default=10, help="of each run; the first two do not count")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--call-size-mib", type=int, default=1730, help="of the state whose call of save() is timed")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the step times into FILE (PNG)")
    args = parser.parse_args()
    ours = [contender for contender in CONTENDERS if contender.name in NOT_PEERS]
    some = [contender for contender in CONTENDERS if contender in ours or contender.name in BESIDE_BUSY]
    work_s, rounds, steps = args.forward_backward_s, args.rounds, args.steps
    scenarios = [
        Scenario("training", work_s, 1, nullcontext, CONTENDERS, rounds, steps),
        # Each step takes several times as long there.
        Scenario("training beside a busy Python thread", work_s / 5, 1, busy_python, some, 1, steps, False),
        # Every fourth: it is the fence that is measured here, not the drive.
        Scenario("steps shorter than the write", 0.02, 4, nullcontext, ours, rounds, 2 * steps),
    ]
    with harness.scratch_in(args.directory) as scratch, process_group(scratch):
        measured = {scenario.name: measure(args, scenario, scratch) for scenario in scenarios}
        call_s = save_call_s(args, scratch)
        if args.plot:
            draw(measured, args.plot)
        nbytes = Trainer(args.width, args.layers, 16).nbytes()
        facts = {
            "state": f"{args.layers} layers of {args.width} with AdamW, {nbytes / harness.MIB:.0f} MiB, in host memory",
            "cache": f"{torch.get_num_threads()} threads train; every save is flushed, two are kept",
            "rounds": args.rounds,
            "rows": [row for name, samples in measured.items() for row in rows(name, samples)],
            "ratios": ratios(measured, nbytes, args, call_s),
        }
        harness.finish("stall", args, facts)


def measure(args: Any, scenario: Scenario, scratch: Path) -> dict[str, Samples]:
    trainer = trainer_with(args.width, args.layers, scenario.forward_backward_s)
    samples = {contender.name: Samples() for contender in scenario.contenders}
    for number in range(0 if scenario.warm_up else 1, scenario.rounds + 1):
        for contender in harness.in_round(scenario.contenders, number, lambda one: one.name in NOT_PEERS):
            directory = scratch / "run"
            directory.mkdir()
            gc.collect()
            with scenario.beside():
                # The first round warms up processes, staging memory, imports: a few steps are enough for that.
                steps = scenario.steps if number else WARM_UP_STEPS + scenario.every
                times_s = run(contender, trainer, directory, steps, scenario.every, samples[contender.name])
                samples[contender.name].steps_s[number] = times_s
            harness.remove(directory)
        if number == 0:
            samples = {name: Samples() for name in samples}
        harness.progress(number, scenario.rounds)
    return samples


def run(
    contender: Contender, trainer: Trainer, directory: Path, steps: int, every: int, samples: Samples
) -> list[float]:
    with contender.opened(trainer, directory) as saver:
        times = []
        for step in range(steps):
            begin = time.perf_counter()
            trainer.step()
            if step % every == 0:
                saver.save(step)
            times.append(time.perf_counter() - begin)
        # One more, which is neither timed nor saved: what the last save makes training wait for is a step's, too.
        trainer.step()
    first = -(-WARM_UP_STEPS // every)
    samples.stalls_s += saver.stalls_s[first:]
    samples.rates += saver.rates[first:]
    samples.write_rates += saver.write_rates[first:]
    return times[WARM_UP_STEPS:]


def save_call_s(args: Any, scratch: Path) -> dict[str, float]:
    """How long the call of save() takes for a big state in 180 tensors, by mode: the median."""
    arrays = harness.transformer(args.call_size_mib)
    tensors = {name: torch.nn.Parameter(torch.from_numpy(array)) for name, array in arrays.items()}
    optimizer = torch.optim.SGD(tensors.values(), lr=0.1)
    found = {}
    for mode in OURS:
        took = []
        directory = scratch / "call"
        with Checkpointer(directory, overlap=mode, keep=2) as checkpointer:  # type: ignore[arg-type]
            checkpointer.attach(optimizer)
            for step in range(SAVES_OF_THE_CALL):
                pending = checkpointer.save(step, tensors)
                checkpointer.wait()
                took.append(pending.report.stall_save_s)
        harness.remove(directory)
        found[mode] = statistics.median(took)
    return found


def rows(scenario: str, measured: dict[str, Samples]) -> list[dict[str, Any]]:
    table = []
    for name, samples in measured.items():
        row: dict[str, Any] = {
            "name": f"{scenario}: {name}",
            "step_ms": round(samples.median_s() * 1e3, 1),
            "p99_step_ms": round(samples.p99_s() * 1e3, 1),
            "speed": round(speed(measured, name), 3),
        }
        if samples.stalls_s:
            row["stall_ms"] = round(statistics.median(samples.stalls_s) * 1e3, 1)
            row["p99_stall_ms"] = round(percentile_99(samples.stalls_s) * 1e3, 1)
        if samples.rates:
            row["gbytes_per_s"] = round(statistics.median(samples.rates), 3)
            row["write_gbytes_per_s"] = round(statistics.median(samples.write_rates), 3)
        row["rounds_step_ms"] = [[round(step * 1e3, 1) for step in one] for one in samples.steps_s.values()]
        row["rounds_stall_ms"] = [round(stall * 1e3, 2) for stall in samples.stalls_s]
        table.append(row)
    return table


def speed(measured: dict[str, Samples], name: str) -> float:
    """Training without checkpoints / with them: the median over the rounds of the mean step."""
    without = measured[NOTHING].steps_s
    taken = measured[name].steps_s.items()
    return statistics.median(statistics.fmean(without[number]) / statistics.fmean(steps) for number, steps in taken)


def ratios(
    measured: dict[str, dict[str, Samples]], nbytes: int, args: Any, call_s: dict[str, float]
) -> list[dict[str, Any]]:
    plain, busy, short = measured.values()
    hybrid, borrow = OURS["hybrid"], OURS["borrow"]
    write_s = nbytes / 1e9 / statistics.median(plain[borrow].rates)
    step_s = plain[hybrid].median_s()
    return [
        harness.ratio("forward and backward / write", args.forward_backward_s / write_s, ">= 6, or the rest is moot"),
        *(harness.ratio(f"speed of training, {mode}", speed(plain, name), ">= 0.95") for mode, name in OURS.items()),
        harness.ratio("p99 stall / step, hybrid", percentile_99(plain[hybrid].stalls_s) / step_s, "<= 0.05"),
        *(harness.ratio(f"call of save(), ms, {mode}", call_s[mode] * 1e3, "<= 5") for mode in ("hybrid", "borrow")),
        harness.ratio(
            "stall when the write is longer, borrow / hybrid",
            statistics.median(short[borrow].stalls_s) / statistics.median(short[hybrid].stalls_s),
            ">= 2",
        ),
        *(
            harness.ratio(
                f"write rate beside a busy Python thread / without, {mode}",
                statistics.median(busy[name].write_rates) / statistics.median(plain[name].write_rates),
                ">= 0.85",
            )
            for mode, name in OURS.items()
        ),
    ]


def draw(measured: dict[str, dict[str, Samples]], path: Path) -> None:
    """Step times of the first two scenarios: the median as a bar, the 99th percentile as a line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    scenarios = list(measured)[:2]
    figure, axes = pyplot.subplots(1, len(scenarios), figsize=(13, 4.2), sharey=True, layout="constrained")
    for ax, scenario in zip(axes, scenarios, strict=True):
        samples = measured[scenario]
        medians = np.array([one.median_s() for one in samples.values()]) * 1e3
        tails = np.array([one.p99_s() for one in samples.values()]) * 1e3
        colors = ["0.6" if name == NOTHING else "C0" if name in OURS.values() else "C1" for name in samples]
        beyond = [np.zeros_like(medians), np.maximum(tails - medians, 0)]
        ax.barh(list(samples), medians, xerr=beyond, color=colors, ecolor="0.3", capsize=3)
        ax.axvline(medians[0], color="0.3", linestyle=":")
        ax.set(title=scenario, xlabel="ms for a step, saved every time (bar: median, line: 99th percentile)")
    axes[0].invert_yaxis()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
