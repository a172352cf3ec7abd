"""Messages for an unknown name, with the nearest known names or all of them."""

import difflib
from collections.abc import Collection


def check_known(kind: str, name: str, known: Collection[str]) -> None:
    """Raise ValueError with the nearest known names unless a name is known; see `unknown`."""
    if name not in known:
        raise ValueError(unknown(kind, name, known))


def unknown(kind: str, name: str, known: Collection[str]) -> str:
    """Return a message for an unknown name, with the nearest known names.

    Args:
        kind: kind of the named object, such as "entry".
        name: the given name.
        known: the allowed names.
    """
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    all_names = f"there are {list(known) or 'none'}"
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else all_names
    return f"unknown {kind} {name!r}; {hint}"
