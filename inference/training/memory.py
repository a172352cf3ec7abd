"""A setting of glibc that keeps the memory freed by one step for the next step.

glibc returns large blocks to the system as soon as they are freed. A step that allocates and frees
hundreds of MiB of activations must then fault every page in again. This costs tens of thousands of
page faults and about a seventh of the step's time on the CPU (`benchmarks/part_whole_step.py`).
"""

import ctypes
import os

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4  # names of mallopt's options in malloc.h


def keep_memory() -> bool:
    """Configure glibc, for this process, to keep freed memory instead of returning it.

    The peak does not grow, but the process stays near it. Settings of the user (MALLOC_*_,
    GLIBC_TUNABLES) are respected.

    Returns:
        True on success; False without glibc.
    """
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return False
    try:
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version  # noqa: B018 - only glibc has it
        options = {_MMAP_MAX: 0, _TRIM_THRESHOLD: 2**31 - 1, _TOP_PAD: 64 * 2**20}
        return all([library.mallopt(option, value) for option, value in options.items()])
    except (OSError, AttributeError, TypeError):
        return False
