"""Trinity Events: checkpoints and weight versions of RL post-training, as an event log."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trinity_schemas import (
        StepFailed,
        StepReady,
        StepSuperseded,
        VersionRetired,
        WeightsApplied,
    )

    from .client import blocking
    from .client.checkpoint_lease import hold_checkpoint
    from .client.ready_steps import newest_checkpoint, wait_ready
    from .client.training_run import publishing, training_run
    from .coordinator import CheckpointCoordinator
    from .subscriptions import Delivered, Subscription, subscribe
    from .training_loop import TrainingLoop
    from .weights import Synchronizer

__all__ = [
    "CheckpointCoordinator",
    "Delivered",
    "StepFailed",
    "StepReady",
    "StepSuperseded",
    "Subscription",
    "Synchronizer",
    "TrainingLoop",
    "VersionRetired",
    "WeightsApplied",
    "blocking",
    "hold_checkpoint",
    "newest_checkpoint",
    "publishing",
    "subscribe",
    "training_run",
    "wait_ready",
]

_HOMES = {
    "CheckpointCoordinator": ".coordinator",
    "Delivered": ".subscriptions",
    "StepFailed": "trinity_schemas",
    "StepReady": "trinity_schemas",
    "StepSuperseded": "trinity_schemas",
    "Subscription": ".subscriptions",
    "Synchronizer": ".weights",
    "TrainingLoop": ".training_loop",
    "VersionRetired": "trinity_schemas",
    "WeightsApplied": "trinity_schemas",
    "hold_checkpoint": ".client.checkpoint_lease",
    "newest_checkpoint": ".client.ready_steps",
    "publishing": ".client.training_run",
    "subscribe": ".subscriptions",
    "training_run": ".client.training_run",
    "wait_ready": ".client.ready_steps",
}


def __getattr__(name: str) -> Any:
    # Import on first use: a consumer of events does not import torch, and the command line can be
    # interrupted while it loads.
    if name == "blocking":
        return import_module(".client.blocking", __name__)
    if name in _HOMES:
        try:
            return getattr(import_module(_HOMES[name], __name__), name)
        except ModuleNotFoundError as error:
            if error.name is None or error.name.startswith("trinity_"):
                raise
            raise ModuleNotFoundError(
                f"{name} needs {error.name}: pip install 'trinity-events[workers]'", name=error.name
            ) from None
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
