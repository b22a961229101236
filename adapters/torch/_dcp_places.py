"""Where the values of a DCP load belong in the caller's state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

from ._dcp_values import Path


class Places:
    """Puts values where the caller's state has them.

    DCP's planner turns all keys into strings, so that it puts a value that belongs under the integer 0 under "0",
    beside it. Where the state has such a key that is no string, the value is moved to it.

    Args:
        planner: of the load.
        items: the values that it is going to be given.
    """

    def __init__(self, planner: LoadPlanner, items: Sequence[ReadItem]) -> None:
        self._moves: list[tuple[Path, Path]] = []
        self._strays: dict[tuple[int, Any], Any] = {}
        if not isinstance(planner, DefaultLoadPlanner) or not planner.flatten_state_dict:
            return
        self._state = planner.original_state_dict
        for item in items:
            path = planner.mappings.get(item.dest_index.fqn)
            if path is not None:
                self._look_up(tuple(path))

    def _look_up(self, path: Path) -> None:
        at: Any = self._state
        place: list[Any] = []
        for key in path:
            own = _own_key(at, key)
            if own != key and place == list(path[: len(place)]):
                self._strays[id(at), key] = at
            place.append(own)
            try:
                at = at[own]
            except (KeyError, IndexError, TypeError):
                return
        if place != list(path):
            self._moves.append((path, tuple(place)))

    def correct(self) -> None:
        """After the values have been loaded."""
        for path, place in self._moves:
            value: Any = self._state
            for key in path:
                value = value[key]
            at: Any = self._state
            for key in place[:-1]:
                at = at[key]
            at[place[-1]] = value
        for (_, key), container in self._strays.items():
            container.pop(key, None)


def _own_key(container: Any, key: str | int) -> Any:
    """The caller's own key for one element of DCP's paths."""
    if not isinstance(container, dict) or key in container:
        return key
    own = [other for other in container if str(other) == key]
    return own[0] if len(own) == 1 else key
