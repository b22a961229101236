"""``fp-multi topology``: where this process runs, which drive it would write to, and who would write."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import msgspec
import typer
from rich.table import Table

from fp_multi._cli_text import out, say, shown, working
from fp_multi._probe import drive_rate
from fp_multi._topology import HEADINGS, local_place, topology_of
from fp_multi._writers import select
from fp_multi.config import SaveConfig
from fp_multi.errors import ConfigError


def topology(directory: Path, *, as_json: bool) -> None:
    """Look, measure the drive if its rate is not known, and print.

    Args:
        directory: where checkpoints would go.
        as_json: one JSON object in place of a table.

    Raises:
        ConfigError: the launcher's variables make no sense.
    """
    rank, size = _launched()
    config = SaveConfig()
    place = local_place(rank, directory, config)
    with working("measuring the drive"):
        rate = drive_rate(directory, place.device, place.host, config)
    place = replace(place, drive_bytes_per_s=rate.bytes_per_s)
    # Of the others nothing is known: they would have to meet in a process group, which is the training's to make.
    choice = select(topology_of([place]), config) if size == 1 else None
    if as_json:
        found = {
            "directory": str(directory),
            "size": size,
            "place": msgspec.to_builtins(place),
            "drive_rate": rate.how,
            "writers": choice and choice.ranks,
            "reason": choice and choice.reason,
        }
        typer.echo(json.dumps(found, indent=2))
        return
    table = Table(box=None, pad_edge=False)
    for heading in HEADINGS:
        table.add_column(heading)
    table.add_row(*map(shown, place.row()))
    say(out(), table)
    say(out(), shown(f"drive: {rate.how}; host: {place.host}"))
    if choice is None:
        say(out(), f"only rank {rank} of {size}: ranks meet when they save, and choose the writers then")
    else:
        say(out(), f"writers: {', '.join(map(str, choice.ranks))}; {choice.reason}")


def _launched() -> tuple[int, int]:
    """Rank and number of ranks, as torchrun and its like tell."""
    texts = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    try:
        rank, size = map(int, texts)
    except ValueError:
        rank, size = -1, 0
    if not 0 <= rank < size:
        raise ConfigError(f"RANK={texts[0]} WORLD_SIZE={texts[1]} in the environment: not a rank of so many")
    return rank, size
