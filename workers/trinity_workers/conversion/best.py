"""Folder of a run's best checkpoint, proven to be of the step that was evaluated."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

import anyio.to_thread

from trinity_events.checkpoints.layout import final_name
from trinity_events.cli.options import open_log
from trinity_events.core.best_checkpoint import best_checkpoint
from trinity_events.core.lineage import covers
from trinity_events.errors import TrinityError
from trinity_events.reducer.checkpoint_evidence import NotVerified, load_evidence
from trinity_events.replay import current_state
from trinity_events.system.open_folder import OpenFolder


class BestCheckpointMissing(TrinityError):
    """A run has no best checkpoint that can be proven.

    Attributes:
        run_id: The run.
        fault: ``none`` if no complete checkpoint was evaluated, ``folder`` if its folder does not
            prove that it is of the step that was evaluated.
        step: The step.
        reason: Fault of the folder.
    """

    run_id: str
    fault: Literal["none", "folder"]
    step: int = 0
    reason: str = ""
    texts: ClassVar = {
        "none": "run {run_id} has no best checkpoint: name an evaluation set in "
        "checkpoints.keep_best.set, and evaluate steps that are saved",
        "folder": "the best checkpoint of run {run_id} is that of step {step}, and its folder does "
        "not prove it: {reason}; name the folder in place of --best to use it all the same",
    }


async def find_best_folder(redis_url: str | None, run: str, root: Path) -> Path:
    """Return the folder of the best checkpoint of a run.

    Args:
        redis_url: URL of the log; None takes the embedded server.
        run: The run.
        root: Folder with one checkpoint directory per run.

    Raises:
        BestCheckpointMissing: There is none, or its folder is not proven to be of that step.
    """
    async with open_log(redis_url, run) as log:
        state = await current_state(log)
    if (best := best_checkpoint(state)) is None:
        raise BestCheckpointMissing(run, "none")
    step, folder = best.at.step, root / run

    def check() -> None:
        with OpenFolder.open_run(folder) as opened:
            evidence = load_evidence(opened, step)
        if evidence is None or not covers(best.at.epoch, state.lineage, evidence.at):
            raise NotVerified(step, folder, "was made by an epoch whose weights were not evaluated")

    try:
        await anyio.to_thread.run_sync(check)
    except OSError as error:
        raise BestCheckpointMissing(run, "folder", step, str(error)) from None
    return folder / final_name(step)
