"""The version, in one place beside pyproject.toml."""

from __future__ import annotations

VERSION = "0.1.0"
WRITER = f"fp_multi {VERSION}"
