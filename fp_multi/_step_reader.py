"""The reading half of a Checkpointer: which steps there are, and restoring one."""

from __future__ import annotations

from typing import Any

from fp_multi._comm import Comm
from fp_multi._steps import Retention, complete_steps
from fp_multi._together import team_of
from fp_multi._types import Selection, TensorBuilder
from fp_multi.checkpoint import load
from fp_multi.config import LoadConfig


class StepReader:
    """Steps in a directory, for reading.

    Args:
        directory: where they are, an absolute path.
        load_config: how to read.
        retention: keeps a step while it is read.
        comm: the processes that restore together; None for this one alone.
    """

    def __init__(self, directory: str, load_config: LoadConfig, retention: Retention, comm: Comm | None) -> None:
        self.directory = directory
        self.load_config = load_config
        self.comm = comm
        self._retention = retention

    def _before_restore(self, *, inplace: bool) -> None:
        """What has to happen first."""

    def steps(self) -> list[int]:
        """The complete steps, in order."""
        return list(complete_steps(self.directory))

    def latest_step(self) -> int | None:
        """The newest complete step, None if there is none."""
        steps = self.steps()
        return steps[-1] if steps else None

    def restore(
        self,
        step: int | None = None,
        *,
        target: Any = None,
        only: Selection | None = None,
        inplace: bool = False,
        allow_pickle: bool = False,
        tensor_builder: TensorBuilder | None = None,
    ) -> tuple[int, Any]:
        """Load a step.

        Retention leaves it alone meanwhile, in whatever process that runs.

        Args:
            step: which; None for the newest complete one.
            target: as for :func:`fp_multi.load`, like all below.
            only: subtrees to load.
            inplace: fill the target's own arrays; waits for the fence first.
            allow_pickle: unpickle leaves that were pickled.
            tensor_builder: makes a framework's tensors.

        Returns:
            The step and the state.

        Raises:
            CheckpointNotFoundError: there is no such step; the message names those that there are.
            FpMultiError: whatever :func:`fp_multi.load` raises.
        """
        self._before_restore(inplace=inplace)
        if self.comm is not None:
            step = self._agreed_step(self.comm, step)
        with self._retention.reading(step) as (chosen, path):
            return chosen, load(
                path,
                target=target,
                only=only,
                inplace=inplace,
                config=self.load_config,
                allow_pickle=allow_pickle,
                tensor_builder=tensor_builder,
            )

    def _agreed_step(self, comm: Comm, step: int | None) -> int | None:
        """The step that all ranks restore: the first rank's, which may see a newer one than others."""

        def newest() -> bytes:
            latest = self.latest_step() if step is None else step
            return b"" if latest is None else b"%d" % latest

        said = team_of(comm).first_says(f"restore from {self.directory!r}", newest)
        return int(said) if said else None
