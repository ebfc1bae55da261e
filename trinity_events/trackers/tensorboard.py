"""Tracker that writes event files of TensorBoard."""

from __future__ import annotations

import re

import msgspec
from tensorboardX import SummaryWriter

from ..analysis.metrics import StepMetrics
from .base import TrackedRun
from .metric_names import MetricNames

_REFUSED_CHARACTERS = re.compile(r"[^-/\w.]")
"""Characters that tensorboardX replaces itself, where two metrics may then have one name."""


class TensorBoard:
    """Tracker that writes event files in ``FOLDER/tensorboard/RUN``.

    Steps of earlier epochs that do not stand any more are purged, as TensorBoard calls it.
    """

    def __init__(self, run: TrackedRun) -> None:
        folder = run.folder / "tensorboard" / run.run_id
        first = 0 if run.resumed_after is None else run.resumed_after + 1
        self._writer = SummaryWriter(
            str(folder),
            # Hides the steps of earlier epochs that this one trains again.
            purge_step=first if folder.exists() else None,
            filename_suffix=f".{first}",  # files are named by seconds, and an epoch may be short
        )
        self._names = MetricNames("TensorBoard", _REFUSED_CHARACTERS)
        if run.config is not None:
            indented = msgspec.json.format(run.config, indent=2)
            self._writer.add_text("config", f"```json\n{indented}\n```")

    def log(self, metrics: StepMetrics) -> None:
        """Write scalars."""
        for name, value in metrics.values.items():
            if (tag := self._names.get(name)) is not None:
                self._writer.add_scalar(tag, value, metrics.step, walltime=metrics.occurred_at)
        # At once: TensorBoard reads the file while the run goes on.
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()
