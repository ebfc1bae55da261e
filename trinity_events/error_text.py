"""What an error is told as, where it has ended something."""

from __future__ import annotations

from .errors import TrinityError

_LONGEST_CAUSE = 2000


def first_error(error: BaseException) -> BaseException:
    """The first error of a group of groups, preferring those that are meant for people."""
    leaves = [error]
    while any(isinstance(leaf, BaseExceptionGroup) for leaf in leaves):
        leaves = [
            one
            for leaf in leaves
            for one in (leaf.exceptions if isinstance(leaf, BaseExceptionGroup) else (leaf,))
        ]
    return next((leaf for leaf in leaves if isinstance(leaf, TrinityError)), leaves[0])


def message_of(error: BaseException) -> str:
    """Its message, as text that an event can hold: a file's name in it may be none."""
    return str(error).encode(errors="backslashreplace").decode()


def cause_of(error: BaseException) -> str:
    """The type and message of an error, or of a group's first, for the end of a run."""
    first = first_error(error)
    return f"{type(first).__name__}: {message_of(first)}"[:_LONGEST_CAUSE]
