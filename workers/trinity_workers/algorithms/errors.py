"""The error of settings and batches that an algorithm cannot work with."""

from __future__ import annotations

from trinity_events.errors import TrinityError


class AlgorithmError(TrinityError):
    """Raised if an algorithm's settings contradict each other, or its batch lacks a field."""
