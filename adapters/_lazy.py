"""Names of a package that cost an import only when somebody asks for them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazily(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """What a package calls ``__getattr__``.

    Args:
        package: its name.
        homes: the name of the submodule that has it, for each name.

    Returns:
        A function that imports the submodule of a name, and remembers the value.
    """

    def get(name: str) -> Any:
        home = homes.get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{package}.{home}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return get
