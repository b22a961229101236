"""The tensors and values that all ranks have written, in one numbering and one tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fp_multi.errors import CommError
from fp_multi.storage import Tensor

from ._dcp_report import Report
from ._dcp_values import renumber, tensors_in
from ._dtypes import VIEW_ATTR


class Union:
    """All ranks' tensors and values.

    Args:
        directory: where they are, for messages.
        reports: by rank.
    """

    def __init__(self, directory: str, reports: Sequence[Report]) -> None:
        self._directory = directory
        self._reports = reports
        self.heads: list[Tensor] = []
        self.numbers = [[-1] * len(report.heads) for report in reports]
        """For each rank: its number -> index in the manifest."""
        self.tensors: dict[str, int] = {}
        """Indices of tensors by DCP's name."""
        self.values: dict[str, tuple[int, int, Any]] = {}
        """Rank, the number of the first tensor in it, and the node, by DCP's name."""
        self._places: dict[str, list[tuple[int, int]]] = {}
        for rank, report in enumerate(reports):
            for number, fqn in enumerate(report.fqns):
                if fqn is not None:
                    self._places.setdefault(fqn, []).append((rank, number))
            for fqn, (first, node) in report.values.items():
                self.values[fqn] = rank, first, node

    def node(self, nested: Any) -> Any:
        """The node of a nested dict of names."""
        if isinstance(nested, str):
            return self._value(nested) if nested in self.values else self._tensor(nested)
        if nested and type(next(iter(nested))) is int:
            # What DCP leaves out of a list (an empty dict, for instance) it gives back as None.
            return ["list", [self.node(nested[i]) if i in nested else None for i in range(max(nested) + 1)]]
        return ["dict", list(nested), [self.node(child) for child in nested.values()]]

    def _value(self, fqn: str) -> Any:
        rank, first, node = self.values[fqn]
        numbers = self.numbers[rank]
        inside = tensors_in(node)
        for i in inside:
            numbers[first + i] = len(self.heads)
            self.heads.append(self._reports[rank].heads[first + i])
        return renumber(node, {i: numbers[first + i] for i in inside})

    def _tensor(self, fqn: str) -> int:
        places = self._places.get(fqn)
        if not places:
            raise CommError(f"{self._directory}: {fqn} is in the plan, but no rank has written any of it")
        index = self.tensors[fqn] = len(self.heads)
        rank, number = places[0]
        first = self._reports[rank].heads[number]
        for other, at in places:
            head = self._reports[other].heads[at]
            if _spec(head) != _spec(first):
                raise CommError(
                    f"{self._directory}: {fqn} is {first.dtype}{first.shape} on rank {rank}, but "
                    f"{head.dtype}{head.shape} on rank {other}; it must be the same on all ranks"
                )
            self.numbers[other][at] = index
        self.heads.append(first)
        return index


def _spec(head: Tensor) -> tuple[str, list[int], str | None]:
    return head.dtype, head.shape, head.attrs.get(VIEW_ATTR)
