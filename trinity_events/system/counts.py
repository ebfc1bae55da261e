"""Numbers of things in sentences."""

from __future__ import annotations


def pluralize(count: float, noun: str, plural: str | None = None) -> str:
    """Return the form of a noun, or of a verb, for a number of things.

    Args:
        count: The number.
        noun: Form for one.
        plural: Form for any other number; by default the noun with an ``s``.
    """
    return noun if count == 1 else plural or f"{noun}s"


def format_count(count: float, noun: str, plural: str | None = None) -> str:
    """Return a number of things as text, such as ``1 step`` or ``1,200 steps``."""
    number = f"{count:,}" if isinstance(count, int) else f"{count:g}"
    return f"{number} {pluralize(count, noun, plural)}"
