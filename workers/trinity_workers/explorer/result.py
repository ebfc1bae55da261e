"""Result of an explorer, which its command prints; the build imports it without torch."""

from __future__ import annotations

from msgspec import Struct


class ExplorationResult(Struct, frozen=True, kw_only=True):
    """Result of one explorer."""

    rank: int
    applied: int
    groups: int
    discarded: int = 0
    """Groups that came after another attempt had taken their place."""
    evaluated: int = 0
    """Requests of evaluations that it claimed."""
