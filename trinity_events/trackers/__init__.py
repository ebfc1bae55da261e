"""Trackers of experiments, which take a run's metrics from its log."""

from .base import Tracked, Tracker, TrackerUnusable
from .follow import track_live, track_recorded
from .loading import find_tracker, open_trackers

__all__ = [
    "Tracked",
    "Tracker",
    "TrackerUnusable",
    "find_tracker",
    "open_trackers",
    "track_live",
    "track_recorded",
]
