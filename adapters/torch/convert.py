"""``fp-multi convert`` between PyTorch's forms (``.pt`` files, DCP directories) and checkpoints of ours.

The command line imports this module when a conversion calls for it, and hands it an open checkpoint and a place for
notes, so that nothing here knows the command line.
"""

from __future__ import annotations

from ._convert_dcp import open_dcp as open_dcp
from ._convert_dcp_write import plan_dcp as plan_dcp
from ._convert_pt import open_pt as open_pt
from ._convert_pt import plan_pt as plan_pt

__all__ = ["open_dcp", "open_pt", "plan_dcp", "plan_pt"]
