"""How often to save: what the drive allows, what an overhead allows, what failures ask for. Pure arithmetic."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass

from fp_multi.errors import ConfigError


def needed_bytes_per_s(nbytes: int, forward_backward_s: float) -> float:
    """FastPersist's bound: a drive of this rate saves every step without a wait (arXiv 2406.13768, section 4.3).

    Args:
        nbytes: size of a checkpoint.
        forward_backward_s: time in which a step does not change the state.
    """
    return nbytes / forward_backward_s


def least_interval_steps(step_s: float, write_s: float, stall_s: float, overhead: float) -> int:
    """How many steps must lie between saves so that training loses at most a share of its time.

    A save costs its stall; if it is not on the drive when the next one comes, that one waits for the rest.

    Args:
        step_s: time of a step without saving.
        write_s: time of a save in the background.
        stall_s: what training waits for each save in any case.
        overhead: the share, 0.05 for 5 %.
    """
    stall_allows = stall_s / (overhead * step_s)
    drive_allows = (stall_s + write_s) / ((1.0 + overhead) * step_s)
    return max(1, _ceil(stall_allows), _ceil(drive_allows))


def young_interval_s(cost_s: float, mtbf_s: float) -> float:
    """Young's interval between checkpoints: the square root of 2 * cost * mean time between failures.

    Args:
        cost_s: what training loses for each checkpoint.
        mtbf_s: mean time between failures.
    """
    return math.sqrt(2.0 * cost_s * mtbf_s)


def daly_interval_s(cost_s: float, mtbf_s: float) -> float:
    """Daly's interval: Young's with the next two terms of the expansion, right also for short times between failures.

    Args:
        cost_s: what training loses for each checkpoint.
        mtbf_s: mean time between failures.
    """
    if cost_s >= 2.0 * mtbf_s:
        return mtbf_s
    share = cost_s / (2.0 * mtbf_s)
    return young_interval_s(cost_s, mtbf_s) * (1.0 + math.sqrt(share) / 3.0 + share / 9.0) - cost_s


def lost_share(interval_s: float, cost_s: float, write_s: float, mtbf_s: float) -> float:
    """Share of the time that saving and failures cost, to first order.

    A failure loses half an interval of work, and what was on its way to the drive.

    Args:
        interval_s: training time between saves.
        cost_s: what training loses for each save.
        write_s: time until a save is on the drive.
        mtbf_s: mean time between failures.
    """
    return cost_s / (interval_s + cost_s) + (interval_s / 2.0 + write_s) / mtbf_s


def _ceil(value: float) -> int:
    # 3.0000000000000004 steps are 3.
    return math.ceil(value * (1.0 - 1e-12))


@dataclass(frozen=True, slots=True)
class Advice:
    """How often to save; ``str()`` says it in words. Made by :meth:`fp_multi.Checkpointer.advise`.

    Sizes are in bytes, times in seconds.
    """

    step_s: float
    """A training step without saving."""
    forward_backward_s: float
    """The part of it in which the state does not change."""
    nbytes: int
    """Size of a checkpoint."""
    bytes_per_s: float
    """Rate of the drive, beside training."""
    stall_s: float
    """What training waits for each save, if the one before it is complete."""
    mtbf_s: float
    """Mean time between failures."""
    overhead: float
    """Share of the training time that saving may cost."""

    def __post_init__(self) -> None:
        """Reject what cannot be.

        Raises:
            ConfigError: a value is not positive, or not a number.
        """
        for name in self.__slots__:
            value = getattr(self, name)
            least = "at least 0" if name in ("stall_s", "nbytes") else "above 0"
            if not isinstance(getattr(self, name), numbers.Real):
                raise ConfigError(f"{name} must be a number {least}, found {value!r}")
            if not (value > 0 or (value == 0 and least == "at least 0")) or math.isinf(value):
                raise ConfigError(f"{name} must be a number {least}, found {value}")

    @property
    def write_s(self) -> float:
        """Time of a save in the background."""
        return self.nbytes / self.bytes_per_s

    @property
    def needed_bytes_per_s(self) -> float:
        """A drive of this rate saves every step without a wait."""
        return needed_bytes_per_s(self.nbytes, self.forward_backward_s)

    @property
    def every_step_is_free(self) -> bool:
        """Whether this drive does."""
        return self.bytes_per_s >= self.needed_bytes_per_s

    @property
    def least_interval_steps(self) -> int:
        """Save every so many steps, or less often, to stay below the overhead."""
        return least_interval_steps(self.step_s, self.write_s, self.stall_s, self.overhead)

    @property
    def overhead_share(self) -> float:
        """What saving at that interval costs."""
        apart_s = self.least_interval_steps * self.step_s
        return (self.stall_s + max(self.write_s - apart_s, 0.0)) / apart_s

    @property
    def young_s(self) -> float:
        """Young's interval, for a save that costs its stall."""
        return young_interval_s(self.stall_s, self.mtbf_s)

    @property
    def daly_s(self) -> float:
        """Daly's interval, for a save that costs its stall."""
        return daly_interval_s(self.stall_s, self.mtbf_s)

    @property
    def interval_steps(self) -> int:
        """Save every so many steps: Daly's interval, but not more often than the overhead allows."""
        return max(self.least_interval_steps, round(self.daly_s / self.step_s))

    @property
    def lost_share(self) -> float:
        """What saving at ``interval_steps`` and failures cost together."""
        return lost_share(self.interval_steps * self.step_s, self.stall_s, self.write_s, self.mtbf_s)

    @property
    def blocking_daly_s(self) -> float:
        """Daly's interval, for saves that training waits for."""
        return daly_interval_s(self.write_s, self.mtbf_s)

    @property
    def blocking_lost_share(self) -> float:
        """What saving at that interval and failures cost together."""
        return lost_share(self.blocking_daly_s, self.write_s, 0.0, self.mtbf_s)

    def __str__(self) -> str:
        free = "so every step can be saved without a wait" if self.every_step_is_free else "which is less"
        return "\n".join(
            (
                f"A checkpoint of {_gbytes(self.nbytes)} takes {_time(self.write_s)} at {_gbytes(self.bytes_per_s)}/s. "
                f"A step takes {_time(self.step_s)}, {_time(self.forward_backward_s)} of it forward and backward.",
                f"Saving every step beside forward and backward needs {_gbytes(self.needed_bytes_per_s)}/s; "
                f"the drive gives {_gbytes(self.bytes_per_s)}/s, {free}.",
                f"With at most {self.overhead:.1%} overhead: every {_steps(self.least_interval_steps)} "
                f"({_time(self.least_interval_steps * self.step_s)}), which costs {self.overhead_share:.2%}.",
                f"With a failure every {_time(self.mtbf_s)} and {_time(self.stall_s)} of waiting for each save, "
                f"Young's interval is {_time(self.young_s)} and Daly's {_time(self.daly_s)}.",
                f"Save every {_steps(self.interval_steps)}: saving and failures then cost {self.lost_share:.2%} "
                f"together. Saves that training waits for would cost {self.blocking_lost_share:.2%} at their best "
                f"interval, {_time(self.blocking_daly_s)}.",
            )
        )


def _gbytes(nbytes: float) -> str:
    return f"{nbytes / 1e9:.3g} GB"


def _steps(count: int) -> str:
    return "step" if count == 1 else f"{count} steps"


def _time(seconds: float) -> str:
    for unit, length_s in (("h", 3600.0), ("min", 60.0), ("s", 1.0)):
        if seconds >= 2 * length_s:
            return f"{seconds / length_s:.3g} {unit}"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
