"""Words for a name that is not known: the nearest ones that are, or all of them."""

from __future__ import annotations

import difflib
from collections.abc import Sequence


def unknown(kind: str, name: str, known: Sequence[str]) -> str:
    """Return words for a name that is not known, with the nearest ones that are.

    Args:
        kind: what the name should have named, such as "entry".
        name: what was given.
        known: what is allowed.
    """
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"there are {list(known)}"
    return f"unknown {kind} {name!r}; {hint}"
