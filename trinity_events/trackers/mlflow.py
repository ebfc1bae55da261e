"""Tracker of MLflow."""

from __future__ import annotations

import msgspec
from mlflow.entities import Metric, Run
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from ..core.metrics import StepMetrics
from .base import TrackedRun, TrackerUnusable

_LONGEST_PARAMETER = 500
"""Characters of a parameter that every version of MLflow takes."""


class MLflow:
    """Tracker that logs to a run of an MLflow experiment; its tag ``trinity.run`` is the run's id.

    A resumed run goes on with the run of this tag. The server is that of MLFLOW_TRACKING_URI.
    """

    def __init__(self, run: TrackedRun) -> None:
        try:
            self._client = MlflowClient()
            found = self._found(run)
        except MlflowException as error:
            reason = str(error).splitlines()[0]
            raise TrackerUnusable(
                f"MLflow cannot be used: {reason}: set MLFLOW_TRACKING_URI to your server"
            ) from None
        self._id: str = found.info.run_id

    def _found(self, run: TrackedRun) -> Run:
        experiment = self._client.get_experiment_by_name(run.project)
        name = (
            self._client.create_experiment(run.project)
            if experiment is None
            else experiment.experiment_id
        )
        if run.resumed_after is not None:
            earlier = self._client.search_runs([name], f"tags.`trinity.run` = '{run.run_id}'")
            if earlier:
                return earlier[0]
        tags = {"trinity.run": run.run_id}
        made = self._client.create_run(name, run_name=run.run_id, tags=tags)
        sections = {} if run.config is None else msgspec.json.decode(run.config)
        for key, value in sections.items():
            text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
            self._client.log_param(made.info.run_id, key, text[:_LONGEST_PARAMETER])
        return made

    def log(self, metrics: StepMetrics) -> None:
        """Log metrics of one step in one call."""
        moment = int(metrics.occurred_at * 1000)
        values = [
            Metric(name, value, moment, metrics.step) for name, value in metrics.values.items()
        ]
        self._client.log_batch(self._id, metrics=values)

    def close(self) -> None:
        """End the run."""
        self._client.set_terminated(self._id)
