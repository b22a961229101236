"""The reading half of a Checkpointer: which steps there are, and restoring one."""

from __future__ import annotations

import contextlib
import errno
import json
from collections.abc import Iterator
from typing import Any

from fp_multi._arguments import whole_number
from fp_multi._comm import Comm
from fp_multi._steps import Retention, complete_steps
from fp_multi._together import team_of
from fp_multi._types import Selection, TensorBuilder
from fp_multi.checkpoint import load
from fp_multi.config import LoadConfig
from fp_multi.errors import CheckpointNotFoundError


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
        """The complete steps, in order. Old ones that cannot be read are left out, with a warning in the log.

        Raises:
            StorageError: the directory, or its newest step, cannot be read.
        """
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
            ConfigError: the step is no integer, or below 0.
            CommError: with ``comm``: another rank failed, is gone, or wants something else.
            FpMultiError: whatever :func:`fp_multi.load` raises.
        """
        if step is not None:
            step = whole_number("step", step, 0)
        self._before_restore(inplace=inplace)
        with self._reading(step) as (chosen, path):
            return chosen, load(
                path,
                target=target,
                only=only,
                inplace=inplace,
                config=self.load_config,
                allow_pickle=allow_pickle,
                tensor_builder=tensor_builder,
            )

    @contextlib.contextmanager
    def _reading(self, step: int | None) -> Iterator[tuple[int, str]]:
        """Choose a step and keep it while it is read; of several ranks the first chooses, which may see a newer one.

        Retention is the first rank's, and may come at any moment. So that rank locks the step before it names it, and
        nobody goes on, or lets go of it, before all ranks have locked it.
        """
        if self.comm is None:
            with self._retention.reading(step) as chosen:
                yield chosen
            return
        team = team_of(self.comm)
        which = "the newest step" if step is None else f"step {step}"
        with contextlib.ExitStack() as locks:
            with team.round(f"restore {which} of {self.directory!r}") as one:
                found: tuple[int, str] | None = None
                word: Any = None
                if team.leads:
                    try:
                        found = locks.enter_context(self._retention.reading(step))
                        word = found[0]
                    except CheckpointNotFoundError as error:
                        # Every rank's error, not only this one's: it may mean that there is nothing to go on from.
                        word = error.strerror, error.filename
                said = json.loads(one.exchange("step", json.dumps(word).encode())[0])
                if not isinstance(said, int):
                    raise CheckpointNotFoundError(errno.ENOENT, *said)
                found = found or locks.enter_context(self._retention.reading(said))
                one.exchange("locks", b"")
            yield found
