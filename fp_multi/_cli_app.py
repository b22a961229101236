"""The commands of ``fp-multi`` and their exit codes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import fp_multi as fp
from fp_multi._cli_bench import bench as run_bench
from fp_multi._cli_bench import run_all as run_all_benchmarks
from fp_multi._cli_convert import convert as run_convert
from fp_multi._cli_formats import FORMATS as CONVERT_FORMATS
from fp_multi._cli_inspect import as_json, as_tree
from fp_multi._cli_text import count, err, leave_broken_pipe, out, progress_bar, rate, say, shown, size
from fp_multi._cli_topology import topology as show_topology
from fp_multi.errors import (
    CorruptCheckpointError,
    FormatVersionError,
    FpMultiError,
    ManifestError,
)

EXIT_CODES = (
    "Exit codes: 0 done; 1 the checkpoint is corrupt; 2 wrong usage, nothing found at the path, or any other error."
)
_CORRUPT, _OTHER = 1, 2


class _Commands(TyperGroup):
    """Turns an error into one line on standard error and an exit code, for every command alike."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            leave_broken_pipe()
        except (FpMultiError, OSError, MemoryError) as error:
            faults = error.faults if isinstance(error, CorruptCheckpointError) else (error,)
            for fault in faults:
                say(err(), f"fp-multi: {shown(_message(fault))}")
            raise typer.Exit(_exit_code(error)) from error


def _message(error: BaseException) -> str:
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"  # without the number that Python puts before it
    return str(error) or type(error).__name__


def _exit_code(error: BaseException) -> int:
    # A format that is newer than this software is no damage.
    if isinstance(error, (CorruptCheckpointError, ManifestError)) and not isinstance(error, FormatVersionError):
        return _CORRUPT
    return _OTHER


app = typer.Typer(
    cls=_Commands,
    help="Look at, check, measure and convert checkpoints.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        say(out(), f"fp_multi {fp.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


@app.command(epilog=EXIT_CODES)
def inspect(
    path: Annotated[Path, typer.Argument(help="A checkpoint directory or a .safetensors file.")],
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what a checkpoint holds: its tree, with shapes, dtypes and bytes. Reads no tensor data."""
    if json:
        typer.echo(as_json(path))
    else:
        say(out(), as_tree(path))


@app.command(epilog=EXIT_CODES)
def verify(
    path: Annotated[Path, typer.Argument(help="A checkpoint directory.")],
) -> None:
    """Read every byte of a checkpoint and compare all checksums; list every fault with its place."""
    try:
        with progress_bar("verify") as update:
            report = fp.verify(path, progress=update)
    except CorruptCheckpointError as error:
        for fault in error.faults:
            say(out(), shown(str(fault)))
        say(err(), f"fp-multi: {shown(str(path))} is corrupt: {count(len(error.faults), 'fault')}")
        raise typer.Exit(_CORRUPT) from error
    say(
        out(),
        f"{shown(str(path))}: intact; {count(report.tensors, 'tensor')} in "
        f"{count(report.shards, 'shard')}, {size(report.nbytes)} read and compared in "
        f"{report.elapsed_s:.2f} s ({rate(report.nbytes, report.elapsed_s)})",
    )


@app.command(epilog=EXIT_CODES)
def bench(
    directory: Annotated[
        Path,
        typer.Argument(help="A directory on the drive; a scratch folder in it is made and removed."),
    ],
    size_mib: Annotated[
        int, typer.Option("--size-mib", min=16, help="Size of the state that is saved, in MiB.")
    ] = 1024,
    full: Annotated[
        bool, typer.Option("--full", help="Run all benchmarks of the source tree there: most of an hour.")
    ] = False,
) -> None:
    """Measure a drive's raw ceiling, then what a save and a load reach on it, and tell how."""
    if full:
        raise typer.Exit(run_all_benchmarks(directory))
    run_bench(directory, size_mib)


@app.command(epilog=EXIT_CODES)
def convert(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SRC",
            help="A checkpoint directory (of ours, of torch.distributed.checkpoint, of Orbax), or a .pt, .pth or "
            ".safetensors file.",
        ),
    ],
    target: Annotated[
        Path,
        typer.Argument(
            metavar="DST",
            help="What to make. Its suffix (.pt, .pth, .safetensors) or --to says what; else a checkpoint of ours.",
        ),
    ],
    to: Annotated[
        str | None, typer.Option("--to", metavar="|".join(CONVERT_FORMATS), help="What DST shall be.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace DST.")] = False,
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="Run the pickles in SRC. Only for files you trust.")
    ] = False,
) -> None:
    """Convert checkpoints of PyTorch, safetensors, torch.distributed.checkpoint and Orbax to ours, and ours to them.

    No code in SRC is run unless --allow-pickle says so. What does not go across is refused, or named.
    """
    run_convert(source, target, overwrite=overwrite, to=to, allow_pickle=allow_pickle)


@app.command(epilog=EXIT_CODES)
def topology(
    directory: Annotated[Path, typer.Argument(help="Where checkpoints would go; it need not exist yet.")],
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show where this process runs, which drive it would write to and how fast that is, and which ranks would write.

    The drive is measured once: a hidden file of at most 256 MiB, for half a second, removed again.
    """
    show_topology(directory, as_json=json)
