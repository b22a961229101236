"""AsyncStager: ``dcp.async_save`` without a copy of the state before it returns."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch.utils.hooks import RemovableHandle

from fp_multi.errors import ConfigError
from fp_multi.storage import release_memory

from ._dcp_copies import CopyPool, copied, steady
from ._dcp_loan import Lent, Loan

_UNBOUNDED = (1 << 63) - 1


class AsyncStager:
    """Lets ``dcp.async_save`` return at once, and the drive read the tensors during forward and backward pass.

    What only an optimizer's step changes (FastPersist, arXiv 2406.13768, section 4.3), that is the parameters and the
    states of the optimizers that are attached, is not copied but read where it is, by the background save through
    :class:`fp_multi.adapters.torch.StorageWriter`. All else (buffers, counters, other values) is copied in the call of
    ``async_save``. Without an attached optimizer that is everything.

    ``"borrow"``: the fence, before the optimizer changes anything, waits until the drive has been given everything.
    ``"hybrid"``: the fence copies what is left then, at memory speed, and waits for that only.
    ``"snapshot"``: everything is copied in the call; there is nothing to wait for. The memory of the copy is used again
    by the next call when the save is over, and let go by :meth:`close`.

    What else changes parameters between ``async_save`` and the next step (clipping weights, swapping in averaged ones,
    ``load_state_dict``) must call :meth:`fence` first. A save that fails raises from the future that ``async_save``
    gave, nowhere else.

    With another storage writer the fence waits until its save is over. With the process executor what was not copied
    before is copied into shared memory when it is sent to the process, and the fence waits for that.

    Args:
        overlap: the mode.
        staging_bytes: most memory for the copy of one save at a fence; past it the fence waits for the drive. None: no
            limit.

    Raises:
        ConfigError: there is no such mode.

    Example:
        >>> stager = AsyncStager("hybrid")  # doctest: +SKIP
        >>> stager.attach(optimizer)  # doctest: +SKIP
        >>> future = dcp.async_save(  # doctest: +SKIP
        ...     state, checkpoint_id=path, storage_writer=StorageWriter(), async_stager=stager
        ... )
        >>> stager.close()  # doctest: +SKIP
    """

    _synchronize_after_execute = False

    def __init__(
        self, overlap: Literal["hybrid", "borrow", "snapshot"] = "hybrid", *, staging_bytes: int | None = None
    ) -> None:
        if overlap not in ("hybrid", "borrow", "snapshot"):
            raise ConfigError(f'overlap must be "hybrid", "borrow" or "snapshot", found {overlap!r}')
        if staging_bytes is not None and staging_bytes < 0:
            raise ConfigError(f"staging_bytes must be at least 0, found {staging_bytes}")
        self.overlap = overlap
        self._spill_nbytes = 0 if overlap == "borrow" else _UNBOUNDED if staging_bytes is None else staging_bytes
        self._optimizers: dict[int, tuple[torch.optim.Optimizer, RemovableHandle | None]] = {}
        self._loans: list[Loan] = []
        self._copies = CopyPool()

    @property
    def should_synchronize_after_execute(self) -> bool:
        """Whether ``async_save`` waits for the fence before it returns: no."""
        return self._synchronize_after_execute

    def attach(self, *optimizers: torch.optim.Optimizer, hook: bool = True) -> None:
        """Let the next step of each optimizer wait for the saves that read its parameters.

        Attach every optimizer that changes a parameter. Attaching one again does nothing.

        Args:
            *optimizers: those whose parameters and states are saved.
            hook: pass False to call :meth:`fence` before every step yourself; with ``step(closure)`` at the closure's
                end, because a hook would come before its forward pass.

        Raises:
            ConfigError: not an optimizer.
        """
        for one in optimizers:
            if not isinstance(one, torch.optim.Optimizer):
                raise ConfigError(f"attach() takes torch.optim.Optimizer, found {type(one).__qualname__}")
        for one in optimizers:
            if id(one) not in self._optimizers:
                handle = one.register_step_pre_hook(lambda *_: self.fence()) if hook else None
                self._optimizers[id(one)] = one, handle

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """What ``async_save`` calls: the state for the background save, whose borrowed tensors are the caller's own."""
        lent = set() if self.overlap == "snapshot" else steady(one for one, _ in self._optimizers.values())
        if not lent:
            everything, memory = self._copies.copied(state_dict)
            return Lent(Loan(everything, lent, self._spill_nbytes, memory))
        content: dict[str, Any] = copied(state_dict, lent)
        loan = Loan(content, lent, self._spill_nbytes)
        self._loans = [one for one in self._loans if not one.is_over]
        self._loans.append(loan)
        return Lent(loan)

    def fence(self) -> None:
        """Return when the tensors that were given to ``async_save`` may change."""
        loans, self._loans = self._loans, []
        for loan in loans:
            loan.call_in()

    def synchronize_staging(self) -> None:
        """The same, under the name that torch has for it."""
        self.fence()

    def close(self) -> None:
        """Wait at the fence, and remove the hooks. Saves that are under way go on."""
        self.fence()
        attached, self._optimizers = self._optimizers, {}
        for _, handle in attached.values():
            if handle is not None:
                handle.remove()
        self._copies.close()
        release_memory()
