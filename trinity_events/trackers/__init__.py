"""Trackers of experiments, which take a run's metrics from its log."""

from .base import TrackedRun, Tracker, TrackerUnusable, tracking_folder
from .follow import track_live, track_recorded
from .loading import find_tracker, open_trackers

__all__ = [
    "TrackedRun",
    "Tracker",
    "TrackerUnusable",
    "find_tracker",
    "open_trackers",
    "track_live",
    "track_recorded",
    "tracking_folder",
]
