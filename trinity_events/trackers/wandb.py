"""Tracker of Weights & Biases."""

from __future__ import annotations

import msgspec
import wandb

from ..analysis.metrics import GROUPS, StepMetrics
from .base import TrackedRun, TrackerUnusable


class WeightsAndBiases:
    """Tracker that logs to the run of this id in a project of Weights & Biases.

    Metrics are drawn over ``step``, so that a resumed run may go back. Its own settings, such as
    ``WANDB_MODE=offline``, are taken from the environment.
    """

    def __init__(self, run: TrackedRun) -> None:
        run.folder.mkdir(parents=True, exist_ok=True)
        try:
            self._run = wandb.init(
                project=run.project,
                id=run.run_id,
                name=run.run_id,
                # Goes on with the run of this id, or begins it.
                resume="allow",
                dir=run.folder,
                config=None if run.config is None else msgspec.json.decode(run.config),
                # Else wandb captures the output of the command, which shows the run's progress.
                settings=wandb.Settings(console="off", silent=True),
            )
        except (wandb.Error, OSError) as error:
            way_out = "log in with `wandb login`, or set WANDB_MODE=offline"
            raise TrackerUnusable("Weights & Biases", "server", str(error), way_out) from None
        # An axis of ours: wandb's own step must not go back, and that of a resumed run does.
        self._run.define_metric("step")
        for group in GROUPS:
            self._run.define_metric(f"{group}/*", step_metric="step")

    def log(self, metrics: StepMetrics) -> None:
        """Log a row."""
        self._run.log({**metrics.values, "step": metrics.step, "epoch": metrics.epoch})

    def close(self) -> None:
        """Upload what is left, and finish the run."""
        self._run.finish()
