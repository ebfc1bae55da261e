"""Trackers by name."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import EntryPoint, entry_points

from ..errors import PackageMissing
from .base import OpenTracker, TrackedRun, Tracker, TrackerUnusable

ENTRY_POINTS = "trinity_events.trackers"
"""Group of entry points, each of which is a function from `TrackedRun` to a `Tracker`."""
_OWN = {
    "jsonl": (".jsonl:JsonLines", None),
    "tensorboard": (".tensorboard:TensorBoard", "tensorboardX"),
    "wandb": (".wandb:WeightsAndBiases", "wandb"),
    "mlflow": (".mlflow:MLflow", "mlflow-skinny"),
}
"""Trackers that come with the package, and the library that each needs."""


@contextmanager
def open_trackers(names: Sequence[str], run: TrackedRun) -> Iterator[dict[str, Tracker]]:
    """Open trackers by name, and close them after the block.

    Raises:
        TrackerUnusable: A name is unknown, or a tracker lacks its library or its server.
    """
    openers = {name: find_tracker(name) for name in names}
    with ExitStack() as exits:
        opened: dict[str, Tracker] = {}
        for name, opener in openers.items():
            opened[name] = tracker = opener(run)
            # One by one: those that are open are closed where the next cannot be opened.
            exits.callback(tracker.close)
        yield opened


def find_tracker(name: str) -> OpenTracker:
    """Return the function that opens a tracker: ours, an entry point, or ``module:attribute``.

    Raises:
        TrackerUnusable: There is none of this name, or its library is not installed.
    """
    target, library = _OWN.get(name, (None, None))
    if target is not None:
        point = EntryPoint(name, f"{__package__}{target}", ENTRY_POINTS)
    # The form of an entry point's value, so that one way loads all three.
    elif ":" in name:
        point = EntryPoint(name, name, ENTRY_POINTS)
    else:
        point = _installed(name)
    try:
        opener: OpenTracker = point.load()
    except (ImportError, AttributeError) as error:
        if library is not None:
            raise PackageMissing(f"tracker {name}", library, library) from None
        raise TrackerUnusable(name, "loading", str(error)) from None
    return opener


def _installed(name: str) -> EntryPoint:
    points = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if name in points:
        return points[name]
    names = [*_OWN, *points]
    near = difflib.get_close_matches(name, names, 1)
    meant = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(sorted(names))}"
    raise TrackerUnusable(name, "unknown", meant)
