"""Versions of a run that are ready, as a publisher learns from the announcements."""

from __future__ import annotations

from collections.abc import Iterator

from trinity_schemas import ContractError, StepReady, StepRef, VersionRetired, decode_envelope

from ...log import ORIGIN, SyncEventLog
from ...replay import announced


class ReadyVersions:
    """Versions that were announced ready and are not retired, as of the last read."""

    def __init__(self) -> None:
        self._read_through = ORIGIN
        self._ready: set[StepRef] = set()

    def __contains__(self, version: StepRef) -> bool:
        return version in self._ready

    def retired(self, log: SyncEventLog) -> Iterator[StepRef]:
        """Read the announcements since the last call, and yield the versions that were retired."""
        for entry in announced(log, self._read_through):
            event = _event(entry.payload)
            if isinstance(event, VersionRetired):
                version = StepRef(event.epoch, event.step)
                yield version
                self._ready.discard(version)
            elif isinstance(event, StepReady) and event.kind == "weights":
                self._ready.add(StepRef(event.epoch, event.step))
            self._read_through = entry.id


def _event(payload: bytes) -> object:
    """Return the event of an entry; None for an event of a later contract."""
    try:
        return decode_envelope(payload).event
    except ContractError:
        return None
