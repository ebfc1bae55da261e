"""Comparison of a run's settings with those of the epoch that wrote a checkpoint."""

from __future__ import annotations

import anyio.to_thread

from trinity_schemas import SettingChange, StepRef

from ..config.resumable_settings import check_questions, compare_settings
from ..config.train_config import TrainConfig
from ..rollouts.user_task import task_of
from .resume import EarlierRun


async def check_settings(
    run_id: str, settings: TrainConfig, earlier: EarlierRun | None, checkpoint: StepRef | None
) -> tuple[SettingChange, ...]:
    """Return the settings that changed since the epoch that wrote a checkpoint.

    Nothing is compared without a checkpoint, or with an epoch of a version that did not log its
    configuration.

    Raises:
        SettingsNotResumable: if one of them may not change.
        TaskError: if the questions cannot be read.
    """
    if earlier is None or checkpoint is None:
        return ()
    logged = earlier.logged
    config = logged.configs.get(checkpoint.epoch)
    changes = () if config is None else compare_settings(run_id, config, settings)
    ledger = logged.ledgers.get(checkpoint.step)
    # Questions are compared by content: a file of the same name may have been changed.
    if ledger is not None and ledger.fingerprint is not None:
        task = await anyio.to_thread.run_sync(task_of, settings)
        fingerprint = await anyio.to_thread.run_sync(lambda: task.fingerprint)
        check_questions(run_id, ledger.fingerprint, fingerprint, changes)
    return changes
