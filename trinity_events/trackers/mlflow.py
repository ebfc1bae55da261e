"""Tracker of MLflow."""

from __future__ import annotations

import re

import msgspec
from mlflow.entities import Metric, Run
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from ..analysis.metrics import StepMetrics
from .base import TrackedRun, TrackerUnusable
from .metric_names import MetricNames

_LONGEST_PARAMETER = 500
"""Characters of a parameter that every version of MLflow takes."""
_MOST_METRICS = 1000
"""Metrics of one call; MLflow refuses more."""
_REFUSED_CHARACTERS = re.compile(r"[^\w\-. :/]")
_ONE_METRIC = (NotADirectoryError, IsADirectoryError, FileExistsError)
"""Errors of MLflow's file store for a metric whose name is the folder of another: `a` and `a/b`."""


class MLflow:
    """Tracker that logs to a run of an MLflow experiment; its tag ``trinity.run`` is the run's id.

    A resumed run goes on with the run of this tag. The server is that of MLFLOW_TRACKING_URI.

    Names that MLflow refuses are changed: ``acc@8`` is ``acc_at_8``. A metric that is refused all
    the same is left out with a warning, and costs no other one.

    Args:
        run: The run.
        most_metrics: Metrics of one call.
    """

    def __init__(self, run: TrackedRun, most_metrics: int = _MOST_METRICS) -> None:
        self._most_metrics = most_metrics
        try:
            self._client = MlflowClient()
            tracked = self._get_or_create_run(run)
        except MlflowException as error:
            reason = str(error).splitlines()[0]
            way_out = "set MLFLOW_TRACKING_URI to your server"
            raise TrackerUnusable("MLflow", "server", reason, way_out) from None
        self._id: str = tracked.info.run_id
        self._names = MetricNames("MLflow", _REFUSED_CHARACTERS)

    def _get_or_create_run(self, run: TrackedRun) -> Run:
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
        """Log metrics of one step, most often in one call."""
        # MLflow counts in milliseconds.
        moment = int(metrics.occurred_at * 1000)
        values = [
            (name, Metric(accepted, value, moment, metrics.step))
            for name, value in metrics.values.items()
            if (accepted := self._names.get(name)) is not None
        ]
        for first in range(0, len(values), self._most_metrics):
            batch = values[first : first + self._most_metrics]
            try:
                self._client.log_batch(self._id, metrics=[metric for _, metric in batch])
            except Exception as error:
                # A server that is away would fail for each metric again.
                if not _is_invalid_metric(error):
                    raise
                self._log_singly(batch)

    def _log_singly(self, batch: list[tuple[str, Metric]]) -> None:
        for name, metric in batch:
            try:
                self._client.log_batch(self._id, metrics=[metric])
            except Exception as error:
                if not _is_invalid_metric(error):
                    raise
                self._names.leave_out(name, str(error).splitlines()[0])

    def close(self) -> None:
        """End the run."""
        self._client.set_terminated(self._id)


def _is_invalid_metric(error: Exception) -> bool:
    """Return True if a call failed by the name or value of a metric, and not by its server."""
    invalid = isinstance(error, MlflowException) and error.error_code == "INVALID_PARAMETER_VALUE"
    return invalid or isinstance(error.__context__, _ONE_METRIC)
