"""Methods of weight sync: their announcements."""

from __future__ import annotations

from trinity_events.core.file_versions import weights_save
from trinity_schemas import StepReady

from .sections.sync import SyncMethod


def is_version(event: StepReady, method: SyncMethod) -> bool:
    """Return True if a run of this sync method announces a weight version by the event."""
    if method == "checkpoint":
        return weights_save(event) is not None
    return event.kind == "weights"
