"""Task groups raise groups of errors; what happened is what one reads for."""

from __future__ import annotations

from trinity_events.errors import TrinityError


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
