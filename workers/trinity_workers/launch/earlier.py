"""What a run of this name did before: its checkpoints are not begun over unasked."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import anyio.to_thread

from trinity_events.archive import Archive
from trinity_events.core import MonitorState
from trinity_events.errors import TrinityError
from trinity_events.log import EventLog, Stream
from trinity_events.replay import current_state
from trinity_schemas import StepRef

_FINAL = re.compile(r"global_step_(\d{1,18})")


class CheckpointsReady(TrinityError):
    """A run of this name has checkpoints that are ready, and would begin again at step 1."""


async def earlier_epoch(log: EventLog, folder: Path, *, fresh: bool) -> StepRef | None:
    """Return the last epoch of the run with the step that it had reached; None for a new run.

    Args:
        log: The run's log.
        folder: The run's checkpoint directory.
        fresh: Whether to begin anew all the same where checkpoints are ready.

    Raises:
        CheckpointsReady: when there are some.
    """
    archive = Archive(folder, log.run_id)
    state = await current_state(log, partial(archive.read, Stream.EVENTS))
    if not fresh:
        there = _ready(state) or await anyio.to_thread.run_sync(_on_disk, folder)
        if there is not None:
            raise CheckpointsReady(
                f"run {log.run_id} has a {there}, in {folder}, and would begin again at step 1, "
                "because resuming is not there yet: give it another name with --run, or begin "
                "anew with --fresh, which leaves what is there"
            )
    return StepRef(state.epoch, state.trainer_step) if state.epoch else None


def begins_anew(run_id: str, earlier: StepRef, epoch: int) -> str:
    """Warn that what an earlier epoch learned is not gone on from."""
    return (
        f"warning: run {run_id} begins anew: epoch {earlier.epoch} had reached step "
        f"{earlier.step}, and epoch {epoch} starts at step 1, because resuming is not there yet"
    )


def _ready(state: MonitorState) -> str | None:
    for kind, what in (("checkpoint", "checkpoint"), ("state_dict", "state dict")):
        pointer = state.ready.get(kind)  # type: ignore[call-overload]
        if pointer is not None:
            return f"ready {what} of step {pointer.at.step} (epoch {pointer.at.epoch})"
    return None


def _on_disk(folder: Path) -> str | None:
    """Name the newest checkpoint in a folder whose log is another, or gone."""
    try:
        found = [_FINAL.fullmatch(path.name) for path in folder.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return None
    steps = [int(one[1]) for one in found if one]
    return f"checkpoint of step {max(steps)} that its log does not know" if steps else None
