"""The tensors that a background save has borrowed, until it has read them."""

from __future__ import annotations

import threading
import weakref
from typing import Any

from fp_multi.errors import ConfigError
from fp_multi.storage import PartWrite, WriteJob

from ._dcp_copies import PoolMemory, copied

_TICK_S = 0.02
_BIND_S = 10.0
"""Within that time the thread that saves has begun, or never will."""

_saving = threading.local()


class Loan:
    """The tensors of one save that have not been copied, until the save has read them.

    Args:
        content: the state.
        steady: where the storages begin that are borrowed.
        spill_nbytes: most that the fence copies; 0 if it waits for the drive.
        memory: of the state, if it is a copy. It is given back when a save in this process has read all of it, and let
            go if the state goes to another process, or nobody has it any more.
    """

    def __init__(
        self,
        content: dict[str, Any],
        steady: set[int],
        spill_nbytes: int,
        memory: PoolMemory | None = None,
    ) -> None:
        self.spill_nbytes = spill_nbytes
        self._memory = memory
        self._let_go = None if memory is None else weakref.finalize(self, memory.discard)
        if self._let_go is not None:
            self._let_go.atexit = False
        self._content: dict[str, Any] | None = content
        self._steady = steady
        self._lock = threading.Lock()  # guards what is below
        self._thread: threading.Thread | None = None
        self._jobs: list[tuple[WriteJob, int]] = []
        self._called = False
        self._over = False
        self._bound = threading.Event()  # a thread saves it, or it is over
        self._begun = threading.Event()  # the engine reads it, or it is over

    @property
    def is_over(self) -> bool:
        """Whether nothing is borrowed any more."""
        return self._over

    # In the thread that saves

    def begin(self) -> dict[str, Any]:
        """The state, for a save in this thread."""
        with self._lock:
            if not self._over and self._thread is None:
                self._thread = threading.current_thread()
                _saving.loan = weakref.ref(self)  # what is never ended here is to end with the state itself
                self._bound.set()
            return self._there()

    def send(self) -> dict[str, Any]:
        """The state for another process: copied, so that nothing is borrowed any more."""
        with self._lock:
            if not self._over and self._steady:
                self._content = copied(self._there(), set(), only=self._steady, shared=True)
            content = self._there()
        if self._let_go is not None:
            self._let_go()
        self.end()
        return content

    def started(self, write: PartWrite) -> None:
        """The engine has begun to read; a fence that came before is for it, too."""
        with self._lock:
            self._jobs = list(zip(write.jobs, write.sizes, strict=True))
            if self._called:
                self._ask()
        self._begun.set()

    def end(self) -> None:
        """Nothing is read any more."""
        with self._lock:
            self._over = True
            self._content = None
            self._jobs = []
        if self._memory is not None and self._let_go is not None and self._let_go.detach() is not None:
            self._memory.give_back()
        self._bound.set()
        self._begun.set()
        if loan_here() is self:
            _saving.loan = None

    def _there(self) -> dict[str, Any]:
        if self._content is None:
            raise ConfigError("what AsyncStager.stage() gives can be saved once; this has been")
        return self._content

    # In the training's thread

    def call_in(self) -> None:
        """The fence."""
        if not self.spill_nbytes:
            self._bound.wait(_BIND_S)
        with self._lock:
            if self._over:
                return None
            thread = self._thread
            if thread is None:
                # The save has not come so far as to need them, and may never: it gets a copy.
                self._content = copied(self._content, set(), only=self._steady)
                self._over = True
                return None
            self._called = True
            self._ask()
        while not self._begun.wait(_TICK_S):
            if thread is threading.current_thread() or not thread.is_alive():
                return self.end()  # it failed before it read anything, or was not ours
        with self._lock:
            jobs = self._jobs
        for job, nbytes in jobs:
            while not job.wait_staged(nbytes, _TICK_S):
                pass  # lets Python handle signals
        return None

    def _ask(self) -> None:
        left = self.spill_nbytes
        for job, nbytes in self._jobs:
            if left:
                job.fence(left)
                left = max(left - nbytes, 0)


class Lent(dict[str, Any]):
    """What ``stage`` gives: tells its loan in which thread, or that in another process, it is used."""

    def __init__(self, loan: Loan) -> None:
        super().__init__(loan._content or {})
        self._loan = loan

    def items(self) -> Any:
        return self._loan.begin().items()

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return dict, (self._loan.send(),)


def loan_here() -> Loan | None:
    """The loan whose state the save in this thread saves."""
    found: weakref.ref[Loan] | None = getattr(_saving, "loan", None)
    return None if found is None else found()
