"""Tracker that writes lines of JSON."""

from __future__ import annotations

import msgspec

from ..analysis.metrics import StepMetrics
from .base import TrackedRun


class JsonLines:
    """Tracker that writes each measurement as a line: epoch, step, time and values.

    Metrics of a resumed epoch are appended. Lines of later steps of an earlier epoch do not stand.
    """

    def __init__(self, run: TrackedRun) -> None:
        run.folder.mkdir(parents=True, exist_ok=True)
        mode = "wb" if run.resumed_after is None else "ab"
        self._file = (run.folder / f"{run.run_id}.metrics.jsonl").open(mode)

    def log(self, metrics: StepMetrics) -> None:
        """Write a line."""
        self._file.write(msgspec.json.encode(metrics) + b"\n")
        # Line by line: readers follow the file, and a run that is killed loses none.
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
