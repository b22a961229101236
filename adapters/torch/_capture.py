"""capture() and resume(): all that the next training step depends on, as one state."""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from fp_multi.errors import ConfigError, KeyNotFoundError

_log = logging.getLogger("fp_multi")
_RNG = "rng"


def capture(
    *,
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    scaler: Any = None,
    dataloader: Any = None,
    rng: bool = True,
    **extra: Any,
) -> dict[str, Any]:
    """Everything that a run needs to go on as if it had not been stopped.

    Each of the objects may also be a list, a tuple or a dict of such.

    Args:
        model: a module.
        optimizer: an optimizer.
        scheduler: a learning-rate scheduler.
        scaler: a ``GradScaler``.
        dataloader: one that has a ``state_dict``, such as torchdata's ``StatefulDataLoader``.
        rng: the states of the random number generators of Python, NumPy (the global one), torch, and CUDA (every
            device, if CUDA is in use).
        **extra: plain values and tensors, such as an epoch's number, or more objects that have a ``state_dict``.

    Returns:
        A dict with an entry for each thing given, for ``save``. Its tensors are the model's and optimizer's own, not
        copies.

    Raises:
        ConfigError: one of the first five has no ``state_dict``.

    Example:
        >>> state = capture(model=model, optimizer=optimizer, epoch=3)  # doctest: +SKIP
        >>> epoch = resume(state, model=model, optimizer=optimizer)["epoch"]  # doctest: +SKIP
    """
    given = _given(model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler, dataloader=dataloader)
    state = {name: _state_of(thing, name) for name, thing in given.items()}
    state |= {name: _state_of(thing, None) for name, thing in extra.items()}
    if rng:
        state[_RNG] = _rng_state()
    return state


def resume(
    state: Mapping[str, Any],
    *,
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    scaler: Any = None,
    dataloader: Any = None,
    rng: bool = True,
    **extra: Any,
) -> dict[str, Any]:
    """Put what :func:`capture` gave back where it was.

    Args:
        state: what ``restore`` or ``load`` gave.
        model: as for :func:`capture`; None leaves it alone.
        optimizer: likewise.
        scheduler: likewise.
        scaler: likewise.
        dataloader: likewise.
        rng: set the random number generators, if the state has them.
        **extra: objects that have a ``load_state_dict``.

    Returns:
        The entries of the state that nothing was given for: plain extras.

    Raises:
        KeyNotFoundError: the state has no entry for something that was given.
        ConfigError: something has no ``load_state_dict``, or the state has another number of them.

    Example:
        >>> step, state = ckpt.restore(map_location="cpu")  # doctest: +SKIP
        >>> epoch = resume(state, model=model, optimizer=optimizer)["epoch"]  # doctest: +SKIP
    """
    given = _given(model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler, dataloader=dataloader)
    given |= extra
    missing = [name for name in given if name not in state]
    if missing:
        raise KeyNotFoundError(f"the state has no {', '.join(missing)}; it has: {', '.join(map(str, state))}")
    for name, thing in given.items():
        _load_into(thing, state[name], name)
    if rng and _RNG in state:
        # Last: what came before may have drawn numbers.
        _set_rng_state(state[_RNG])
    return {name: value for name, value in state.items() if name not in given and name != _RNG}


def _given(**things: Any) -> dict[str, Any]:
    return {name: thing for name, thing in things.items() if thing is not None}


def _state_of(thing: Any, required_as: str | None) -> Any:
    """The state of an object, or of each in a container; what has none must not be ``required_as`` something."""
    if hasattr(thing, "state_dict"):
        return thing.state_dict()
    if required_as is None:
        return thing
    if isinstance(thing, Mapping):
        return {key: _state_of(one, f"{required_as}[{key!r}]") for key, one in thing.items()}
    if isinstance(thing, (list, tuple)):
        return [_state_of(one, f"{required_as}[{i}]") for i, one in enumerate(thing)]
    raise ConfigError(
        f"{required_as}: a {type(thing).__qualname__} has no state_dict(); leave it out, and keep what a resumed run "
        "needs of it as an extra value"
    )


def _load_into(thing: Any, state: Any, name: str) -> None:
    if hasattr(thing, "load_state_dict"):
        thing.load_state_dict(state)
        return
    if isinstance(thing, Mapping):
        parts = [(key, one) for key, one in thing.items()]
        same = isinstance(state, Mapping) and set(state) == set(thing)
    elif isinstance(thing, (list, tuple)):
        parts = list(enumerate(thing))
        same = isinstance(state, (list, tuple)) and len(state) == len(thing)
    else:
        raise ConfigError(f"{name}: a {type(thing).__qualname__} has no load_state_dict()")
    if not same:
        raise ConfigError(f"{name}: the state does not have the same objects in it as were given")
    for key, one in parts:
        _load_into(one, state[key], f"{name}[{key!r}]")


def _rng_state() -> dict[str, Any]:
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
    }
    # Not is_available(): asking for a state would start CUDA in a run that does not use it.
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def _set_rng_state(state: Mapping[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(_on_cpu(state["torch"]))
    saved = state.get("cuda", [])
    found = torch.cuda.device_count() if saved else 0
    if len(saved) != found:
        _log.warning("the state has random states of %d CUDA devices, found %d devices", len(saved), found)
    for device in range(min(len(saved), found)):
        torch.cuda.set_rng_state(_on_cpu(saved[device]), device)


def _on_cpu(state: Any) -> torch.Tensor:
    # map_location may have moved it; without the adapter it is a NumPy array.
    return torch.as_tensor(state, dtype=torch.uint8, device="cpu")
