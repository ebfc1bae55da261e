"""Port of trackers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, Literal, Protocol

from msgspec import Struct

from ..analysis.metrics import StepMetrics
from ..errors import TrinityError
from ..server import trinity_home


class TrackerUnusable(TrinityError):
    """A tracker that was asked for cannot be used.

    Attributes:
        tracker: Its name.
        fault: ``unknown`` if there is none of this name, ``loading`` if it cannot be loaded,
            ``server`` if its server or account cannot be used.
        reason: Error, or the nearest names.
        way_out: Advice for a server.
    """

    tracker: str
    fault: Literal["unknown", "loading", "server"]
    reason: str
    way_out: str = ""
    texts: ClassVar = {
        "unknown": "there is no tracker {tracker}: {reason}",
        "loading": "tracker {tracker} cannot be loaded: {reason}",
        "server": "{tracker} cannot be used: {reason}: {way_out}",
    }


class TrackedRun(Struct, frozen=True, kw_only=True):
    """Run that a tracker is opened for."""

    run_id: str
    folder: Path
    """Folder for the files of trackers; each has a file or folder of its own in it."""
    project: str
    """Project of Weights & Biases, or experiment of MLflow."""
    config: str | None = None
    """Configuration of the run as JSON; None where the log tells none."""
    resumed_after: int | None = None
    """Last step of earlier epochs that stands; None for the metrics of the whole run."""


class Tracker(Protocol):
    """Receiver of a run's metrics; one thread at a time calls it."""

    def log(self, metrics: StepMetrics) -> None:
        """Take metrics of one step; later metrics may be of an earlier step."""

    def close(self) -> None:
        """Write out everything that was taken."""


def tracking_folder(given: Path | str | None) -> Path:
    """Return the folder of the trackers' files: the given one, or that of ``TRINITY_HOME``."""
    return trinity_home() / "metrics" if given is None else Path(given)


OpenTracker = Callable[[TrackedRun], Tracker]
"""Function that opens a tracker. Raises TrackerUnusable with a way out."""
