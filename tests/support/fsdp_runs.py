"""Settings of FSDP ranks in one run, and the wait for its announcements."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import anyio

from tests.support.pipeline import announced
from tests.support.waits import PATIENCE
from trinity_schemas import StepReady

DIVIDED = {
    "epochs": 2,
    "mini_batches": 2,
    "importance_sampling": {"ratio_to": "proximal", "weights": "token"},
    "kl": {"estimator": "k1", "where": "reward", "coefficient": 0.1},
    "entropy_coefficient": 0.01,
}
"""Algorithm of several updates a step, with all that is computed before the first one."""


@dataclass(frozen=True)
class Where:
    """What every rank is told."""

    run_id: str
    epoch: int
    redis_url: str
    weights_url: str
    model_folder: Path
    run_folder: Path


async def ready(log, kind: str, step: int) -> StepReady:
    with anyio.fail_after(PATIENCE):
        while True:
            for event in await announced(log, 1):
                if isinstance(event, StepReady) and (event.kind, event.step) == (kind, step):
                    return event
            await anyio.sleep(0.01)
