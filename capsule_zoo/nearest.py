"""Messages for an unknown name, with the nearest known names or all of them."""

import difflib
from collections.abc import Sequence


def unknown(kind: str, name: str, known: Sequence[str]) -> str:
    """Return a message for an unknown name, with the nearest known names.

    Args:
        kind: kind of the named object, such as "entry".
        name: the given name.
        known: the allowed names.
    """
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"there are {list(known)}"
    return f"unknown {kind} {name!r}; {hint}"
