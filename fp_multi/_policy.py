"""Which of several ranks write: the policies that ``SaveConfig.writers`` takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from fp_multi.errors import ConfigError


@dataclass(frozen=True, slots=True)
class PerNode:
    """So many writers on each host; made by :func:`per_node`."""

    n: int
    """At least 1. A host with fewer ranks has as many writers as ranks."""

    def __post_init__(self) -> None:
        """Reject what cannot work.

        Raises:
            ConfigError: not a positive whole number.
        """
        if not _is_whole(self.n) or self.n < 1:
            raise ConfigError(f"per_node(n) needs a whole number of at least 1, found {self.n!r}")


def per_node(n: int) -> PerNode:
    """A value for ``SaveConfig.writers``: ``n`` writers on each host, spread over its drives and sockets.

    Args:
        n: writers on each host, at least 1.

    Returns:
        The policy.

    Raises:
        ConfigError: ``n`` is not a positive whole number.

    Example:
        >>> from fp_multi.config import SaveConfig, per_node
        >>> SaveConfig(writers=per_node(2)).writers
        PerNode(n=2)
    """
    return PerNode(n)


Writers: TypeAlias = Literal["all", "per_socket", "auto"] | PerNode | tuple[int, ...]
"""Which ranks write: see docs/settings.md."""


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def check_writers(writers: object) -> None:
    """Reject what is no policy.

    Raises:
        ConfigError: it is none.
    """
    if isinstance(writers, PerNode) or (isinstance(writers, str) and writers in ("all", "per_socket", "auto")):
        return
    if not isinstance(writers, tuple):
        raise ConfigError(
            f'writers must be "all", "per_socket", "auto", per_node(n) or a tuple of ranks, found {writers!r}'
        )
    if not writers or not all(_is_whole(rank) and rank >= 0 for rank in writers) or len({*writers}) < len(writers):
        raise ConfigError(f"writers as ranks must be different whole numbers, none below 0, found {writers!r}")
