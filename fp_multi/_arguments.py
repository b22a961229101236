"""What arguments must be, said where they come in, and not by whatever fails first further down."""

from __future__ import annotations

import operator
from typing import Any

from fp_multi.errors import ConfigError


def whole_number(name: str, value: Any, least: int) -> int:
    """An argument that is an integer, of whatever type.

    Args:
        name: the argument's, for the message.
        value: what was passed.
        least: the smallest that it may be.

    Raises:
        ConfigError: it is no integer, or too small.
    """
    try:
        number = operator.index(value)
    except TypeError:
        raise ConfigError(f"{name} must be an integer, found {value!r}") from None
    if number < least:
        raise ConfigError(f"{name} must be at least {least}, found {number}")
    return number


def require(name: str, value: Any, kind: type) -> None:
    """Refuse an argument that is not of a type.

    Args:
        name: the argument's, for the message.
        value: what was passed.
        kind: what it has to be.

    Raises:
        ConfigError: it is something else.
    """
    if not isinstance(value, kind):
        raise ConfigError(f"{name} must be a {kind.__name__}, found {type(value).__qualname__}: {value!r:.80}")
