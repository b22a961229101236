"""What a conversion's source is and what its target shall be: formats, and how they are recognized."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from fp_multi._cli_text import shown
from fp_multi._format import FORMAT
from fp_multi._hidden import MANIFEST
from fp_multi.errors import CheckpointExistsError, CheckpointNotFoundError, ConfigError

OURS, SAFETENSORS, PT, DCP, ORBAX = "fp_multi", "safetensors", "pt", "dcp", "orbax"
FORMATS = (OURS, SAFETENSORS, PT, DCP, ORBAX)

_SUFFIXES = {".pt": PT, ".pth": PT, ".safetensors": SAFETENSORS}
_FILES = (PT, SAFETENSORS)
_DCP_METADATA = ".metadata"
_ORBAX_METADATA = "_METADATA"
_ITEMS = ("default", "state")
"""Where Orbax's managers put the one item that they are given."""
_HEAD_NBYTES = 64
_MAX_NAMED = 5


class Found(NamedTuple):
    """What a source turned out to be."""

    form: str
    path: Path
    """Where it is: the source itself, or the item in an Orbax step."""


def recognize(source: Path) -> Found:
    """Look what is at a path.

    Args:
        source: a file or a directory.

    Raises:
        CheckpointNotFoundError: a directory without a checkpoint.
        ConfigError: a file whose suffix says nothing, or a directory of several checkpoints.
    """
    if not source.is_dir():
        return Found(_suffix_format(source, "SRC, if it is a file,"), source)
    found = look(source)
    if found is not None:
        return found
    items = [path for path in sorted(source.iterdir()) if path.is_dir() and _look_at(path)]
    if len(items) > 1:
        names = ", ".join(shown(path.name) for path in items[:_MAX_NAMED])
        raise ConfigError(f"{source} holds several checkpoints ({names}); name one of them")
    if any(source.glob("__*.metadata")):
        raise ConfigError(
            f"{source}: each rank saved its own metadata (use_collectives=False), which says only a part; "
            "load it with torch.distributed.checkpoint and save it again"
        )
    if items:
        return _look_at(items[0]) or Found(OURS, source)
    raise CheckpointNotFoundError(
        f"{source}: no checkpoint here: it has neither {MANIFEST} (fp_multi), nor {_DCP_METADATA} (DCP), "
        f"nor {_ORBAX_METADATA} (Orbax)"
    )


def look(directory: Path) -> Found | None:
    """The checkpoint that a directory is, or has as its one item; None without one."""
    for path in (directory, *(directory / item for item in _ITEMS)):
        found = _look_at(path)
        if found is not None:
            return found
    return None


def _look_at(directory: Path) -> Found | None:
    # Ours first: a checkpoint that Orbax or DCP wrote through our adapters has their marks beside its manifest.
    if _is_ours(directory / MANIFEST):
        return Found(OURS, directory)
    if (directory / _DCP_METADATA).is_file():
        return Found(DCP, directory)
    if (directory / _ORBAX_METADATA).is_file():
        return Found(ORBAX, directory)
    # A manifest too damaged to be recognized is still best reported by who reads it.
    return Found(OURS, directory) if (directory / MANIFEST).is_file() else None


def _is_ours(manifest: Path) -> bool:
    try:
        with open(manifest, "rb") as file:
            return f'"{FORMAT}"'.encode() in file.read(_HEAD_NBYTES)
    except FileNotFoundError:
        return False


def _suffix_format(path: Path, role: str) -> str:
    form = _SUFFIXES.get(path.suffix)
    if form is None:
        raise ConfigError(f"{role} must end with .pt, .pth or .safetensors, found {path.name!r}")
    return form


def direction(source: Path, form: str, target: Path, to: str | None) -> str:
    """The target's format.

    Args:
        source: where the source is.
        form: what it is.
        target: what shall be made.
        to: its format; None goes by its suffix.

    Raises:
        ConfigError: none of the two is a checkpoint of ours, or both are.
        CheckpointExistsError: a directory would become a file.
    """
    if to is not None and to not in FORMATS:
        raise ConfigError(f"--to must be one of {', '.join(FORMATS)}, found {to!r}")
    wanted = to or _SUFFIXES.get(target.suffix)
    if form == OURS:
        if wanted is None:
            raise ConfigError(
                f"DST, if SRC is a checkpoint of ours, must end with .pt, .pth or .safetensors, found {target.name!r}; "
                "or pass --to dcp or --to orbax"
            )
        if wanted == OURS:
            raise ConfigError(f"{source} is a checkpoint of ours already; copy the directory")
        if wanted in _FILES and target.is_dir():
            raise CheckpointExistsError(f"{target} is a directory and would become a file; remove it")
        return wanted
    if wanted in (None, OURS):
        return OURS
    if form in _FILES and wanted in _FILES:
        raise ConfigError(f"{source} and {target} are both files; one of the two must be a checkpoint directory")
    raise ConfigError(
        f"one of the two must be a checkpoint of ours: {source} is {form} and {target} would be {wanted}; "
        "convert to a checkpoint directory first, and that one then"
    )
