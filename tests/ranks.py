"""What the functions have in common that tests run in several processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fp_multi as fp


def make_comm(timeout_s: float = 60.0) -> Any:
    """A comm of all ranks of a torch job."""
    from fp_multi.adapters.torch.comm import TorchComm

    return TorchComm(timeout_s=timeout_s)


def config(**settings: Any) -> fp.SaveConfig:
    """A configuration with which every rank writes."""
    return fp.SaveConfig(**{"writers": "all", **settings})


def said(act: Callable[[], Any]) -> str:
    """What an action raises, or "fine"."""
    try:
        act()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


def await_file(path: Path) -> None:
    """Return when another process (or thread) has made a file; the harness ends a test that hangs."""
    while not path.exists():
        time.sleep(0.01)
