"""Error of settings that cannot be used."""

from __future__ import annotations

from trinity_events.errors import TrinityError


class BadSettings(TrinityError):
    """Raised if a run's settings, from the user or from the log, are invalid."""

    is_lasting = True
