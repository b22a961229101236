"""Memory that has no name in any file system, for other processes to map."""

from __future__ import annotations

import errno
import os

NAME = "fp_multi"
"""What such memory is called in /proc."""
_MFD_NOEXEC_SEAL = 0x8
"""Python has no name for it."""


def memfd() -> int:
    """Make memory without a name, of no size yet, that can be sealed and that nobody can execute.

    Returns:
        Its descriptor.

    Raises:
        OSError: there is none on this system, or for this Python.
    """
    if not hasattr(os, "memfd_create"):  # built for a C library that is older than the call
        raise OSError(errno.ENOSYS, "this Python has no os.memfd_create")
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create(NAME, flags | _MFD_NOEXEC_SEAL)  # some systems give no other
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return os.memfd_create(NAME, flags)  # Linux before 6.3
