"""The shardings that arrays had when they were saved: strings in the checkpoint's metadata, and back."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, groupby, repeat
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, SingleDeviceSharding

SHARDINGS_KEY = "orbax.shardings"
"""In a checkpoint's metadata: JSON, ``[[sharding or null, ...], [[number, run length], ...]]``; see docs/orbax.md."""


_CLASSES: dict[str, Any] = {
    NamedSharding.__name__: ocp.metadata.NamedShardingMetadata,
    SingleDeviceSharding.__name__: ocp.metadata.SingleDeviceShardingMetadata,
}
"""What describes a sharding without devices, by the name in its own string."""


def shardings_metadata(arrays: Sequence[jax.Array]) -> dict[str, str]:
    """What to keep of the arrays' shardings.

    Args:
        arrays: of the state, in tree order.
    """
    if not arrays:
        return {}
    numbers: dict[Any, int] = {}
    order = []
    for array in arrays:
        known = _worth_keeping(array)
        order.append(numbers.setdefault(known, len(numbers)))
    table = [None if sharding is None else _text(sharding) for sharding in numbers]
    runs = [[number, len(list(run))] for number, run in groupby(order)]
    return {SHARDINGS_KEY: json.dumps([table, runs], separators=(",", ":"))}


def _worth_keeping(array: jax.Array) -> Any:
    sharding = array.sharding
    if type(sharding).__name__ not in _CLASSES:
        return None
    # Local to one process of several: every process has its own, on devices of its own.
    return None if array.is_fully_addressable and jax.process_count() > 1 else sharding


def _text(sharding: Any) -> str:
    text: str = _CLASSES[type(sharding).__name__].from_jax_sharding(sharding).to_serialized_string()
    return text


def saved_shardings(metadata: Mapping[str, str]) -> Iterator[str | None]:
    """The strings of the arrays in tree order; endless Nones behind the last, and if there are none at all."""
    try:
        table, runs = json.loads(metadata.get(SHARDINGS_KEY, "[[],[]]"))
        texts = [(None if table[number] is None else str(table[number]), int(count)) for number, count in runs]
    except (ValueError, TypeError, IndexError, KeyError, RecursionError):
        texts = []
    return chain(chain.from_iterable(repeat(text, count) for text, count in texts), repeat(None))


class Shardings:
    """Saved shardings on the devices of this job; each string is looked at once."""

    def __init__(self) -> None:
        self._metadata: dict[str, Any] = {}
        self._here: dict[str, Any] = {}

    def metadata(self, text: str | None) -> Any:
        """Orbax's description of a sharding, None if there is none or this software does not know it."""
        if text is None:
            return None
        if text not in self._metadata:
            try:
                members = json.loads(text)
                self._metadata[text] = _CLASSES[members["sharding_type"]].from_deserialized_dict(members)
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                self._metadata[text] = None
        return self._metadata[text]

    def here(self, text: str | None) -> jax.sharding.Sharding | None:
        """The sharding.

        Raises:
            ValueError: its devices are not here.
        """
        known = self.metadata(text)
        if known is None or text is None:
            return None
        if text not in self._here:
            self._here[text] = known.to_jax_sharding()
        found: jax.sharding.Sharding = self._here[text]
        return found
