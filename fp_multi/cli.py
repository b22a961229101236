"""The ``fp-multi`` command; needs the extra ``cli`` (typer and rich). The commands themselves are in ``_cli_app``."""

from __future__ import annotations

import importlib
import sys

_EXTRA = ("typer", "rich")


def main() -> None:
    """Run the command line in ``sys.argv`` and exit with its code.

    Raises:
        SystemExit: always; the codes are listed by ``fp-multi --help``.

    Example:
        >>> main()  # doctest: +SKIP
    """
    try:
        for name in _EXTRA:
            importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in _EXTRA:
            raise
        sys.stderr.write(
            f"fp-multi: {error.name} is not installed; the command line needs: pip install 'fp_multi[cli]'\n"
        )
        raise SystemExit(2) from None
    from fp_multi._cli_app import app

    app(prog_name="fp-multi")
