"""Section `tracking`: trackers of experiments."""

from __future__ import annotations

from ...section import Section


class TrackingConfig(Section, frozen=True, kw_only=True):
    """Trackers of experiments, which get the run's metrics."""

    trackers: tuple[str, ...] = ()
    """Trackers: jsonl, tensorboard, wandb, mlflow, an entry point or `module:attribute`."""
    folder: str | None = None
    """Folder for the trackers' files. Null is `metrics` below TRINITY_HOME."""
    project: str = "trinity-events"
    """Project of Weights & Biases, and experiment of MLflow."""
