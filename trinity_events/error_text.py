"""Text of exceptions for events and logs."""

from __future__ import annotations

from .errors import TrinityError

_LONGEST_CAUSE = 2000
"""Characters of an error's text that an event holds."""


def first_error(error: BaseException) -> BaseException:
    """Return the first error of nested groups, preferring a TrinityError."""
    leaves = [error]
    while any(isinstance(leaf, BaseExceptionGroup) for leaf in leaves):
        leaves = [
            one
            for leaf in leaves
            for one in (leaf.exceptions if isinstance(leaf, BaseExceptionGroup) else (leaf,))
        ]
    return next((leaf for leaf in leaves if isinstance(leaf, TrinityError)), leaves[0])


def message_of(error: BaseException) -> str:
    """Return an error's message as valid Unicode; a file name in it may have other bytes."""
    return str(error).encode(errors="backslashreplace").decode()


def cause_of(error: BaseException) -> str:
    """Return the type and message of an error, or of the first error of a group."""
    first = first_error(error)
    return f"{type(first).__name__}: {message_of(first)}"[:_LONGEST_CAUSE]
