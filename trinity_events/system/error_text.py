"""Errors out of their groups, and texts of bounded length for events and logs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import TrinityError

_LONGEST_CAUSE = 2000
"""Characters of an error's text that an event holds."""


def shorten(text: str, length: int) -> str:
    """Return a text of at most so many characters; three dots end one that was cut."""
    return text if len(text) <= length else f"{text[: length - 3]}..."


def leaf_errors(error: BaseException) -> list[BaseException]:
    """Return the errors of nested groups in order, or the error itself."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in leaf_errors(inner)]
    return [error]


def first_error(error: BaseException) -> BaseException:
    """Return the first error of nested groups, preferring a TrinityError."""
    leaves = [checkpoint_cause(leaf) for leaf in leaf_errors(error)]
    # A cancelled neighbour may come first, and says less than a sentence of ours.
    return next((leaf for leaf in leaves if isinstance(leaf, TrinityError)), leaves[0])


def checkpoint_cause(error: BaseException) -> BaseException:
    """Return the error of the lowest rank that torch's CheckpointException holds, or the error.

    torch.distributed.checkpoint wraps the failures of all ranks, with their stacks as its text.
    """
    failures = getattr(error, "failures", None)
    # By name, because the base install has no torch.
    if type(error).__name__ != "CheckpointException" or not isinstance(failures, dict):
        return error
    # Later ranks often fail because of an earlier one.
    return failures[min(failures)][0] if failures else error


@contextmanager
def ungrouped() -> Iterator[None]:
    """Raise the first error of a group in its place, so that callers need not know task groups."""
    try:
        yield
    except BaseExceptionGroup as group:
        raise first_error(group) from None


def format_message(error: BaseException) -> str:
    """Return an error's message as valid Unicode; a file name in it may have other bytes."""
    return str(error).encode(errors="backslashreplace").decode()


def format_cause(error: BaseException) -> str:
    """Return the type and message of an error, or of the first error of a group."""
    first = first_error(error)
    return f"{type(first).__name__}: {format_message(first)}"[:_LONGEST_CAUSE]
