"""``fp-multi convert`` between checkpoints of Orbax and of ours.

The command line imports this module when a conversion calls for it, and hands it an open checkpoint and a place for
notes, so that nothing here knows the command line.
"""

from __future__ import annotations

from ._convert_read import open_orbax as open_orbax
from ._convert_write import plan_orbax as plan_orbax

__all__ = ["open_orbax", "plan_orbax"]
