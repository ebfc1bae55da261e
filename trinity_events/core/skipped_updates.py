"""Optimizer updates that a training step skipped, because a number was not finite."""

from __future__ import annotations

from collections.abc import Mapping

from ..system.counts import format_count
from .state import Anomaly, MonitorState

SKIPPED_UPDATES = {"policy": "skipped_updates", "critic": "critic/skipped_updates"}
"""Model to the metric of a training step that counts its skipped updates."""

ANOMALY = "update-skipped"


def format_skipped_updates(step: int, metrics: Mapping[str, float]) -> list[str]:
    """Return a sentence for each model of which a training step skipped updates."""
    counts = {model: metrics.get(name, 0.0) for model, name in SKIPPED_UPDATES.items()}
    return [
        f"{_prefix(step)}skipped {format_count(count, 'update')} of the {model}, "
        "because a loss or a gradient norm is not finite"
        for model, count in counts.items()
        if count > 0
    ]


def find_skipped_updates(state: MonitorState, step: int) -> list[Anomaly]:
    """Return the last anomalies that are skipped updates of a step."""
    # The state keeps the sentence alone: its beginning names the step.
    begin = _prefix(step)
    return [
        anomaly
        for anomaly in state.anomalies
        if anomaly.name == ANOMALY and anomaly.detail.startswith(begin)
    ]


def _prefix(step: int) -> str:
    return f"step {step}: "
