"""Resuming of a run: the checkpoint that a trainer goes on from when its run is started again."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import anyio.to_thread
from msgspec import Struct

from trinity_events.archive import Archive
from trinity_events.checkpoint_layout import VERIFIED, final_name, parse_final_name
from trinity_events.client.checkpoint_lease import hold_checkpoint
from trinity_events.core import MonitorState
from trinity_events.core.lineage import Span, lineage_of, stands
from trinity_events.errors import CheckpointHeld, DeadlineExceeded, TrinityError
from trinity_events.log import EventLog, Stream
from trinity_events.replay import current_state
from trinity_schemas import StepRef

from ..config.train_config import RunConfig
from .mirror import restore

_NAMED = 8
"""Checkpoints that an error names, the newest ones: a run that keeps all has any number."""


class CannotResume(TrinityError):
    """Raised if a run was trained before, and cannot go on from there."""


class NoSuchCheckpoint(CannotResume):
    """Raised if a run has no checkpoint of the step that the user named.

    Attributes:
        run_id: The run.
        step: The step.
        steps: Steps of the checkpoints that the run can resume from, oldest first.
    """

    def __init__(self, run_id: str, step: int, steps: Sequence[int], folder: Path) -> None:
        named = ", ".join(map(str, steps[-_NAMED:]))
        others = f"it has those of the steps {named}" if steps else "it has none to resume from"
        super().__init__(
            f"run {run_id} has no checkpoint of step {step} in {folder}: {others} (--from-step)"
        )
        self.run_id = run_id
        self.step = step
        self.steps = tuple(steps)


class CheckpointMissing(CannotResume):
    """Raised if the checkpoint to resume from is not there, or cannot be held.

    Attributes:
        run_id: The run.
        step: Step of the checkpoint.
        older: Newest older checkpoint that is there; None without one.
    """

    def __init__(self, run_id: str, step: int, reason: str, older: int | None) -> None:
        way_out = (
            "--fresh begins anew"
            if older is None
            else f"--from-step {older} continues from the newest older one that is there"
        )
        super().__init__(
            f"run {run_id} cannot resume from its checkpoint of step {step}: {reason} "
            f"(the checkpoint root is --checkpoint-root; {way_out})"
        )
        self.run_id = run_id
        self.step = step
        self.older = older


class EarlierRun(Struct, frozen=True, kw_only=True):
    """Earlier training of a run, as its log tells it."""

    reached: StepRef
    """Last epoch, and the step that it had reached."""
    checkpoint: StepRef | None
    """Checkpoint to resume from, by the epoch that wrote it; None begins at step 1."""

    def notice(self, run_id: str, epoch: int) -> str:
        """Return the sentence that tells what becomes of the earlier epochs' training."""
        had = f"epoch {self.reached.epoch} had reached step {self.reached.step}"
        if self.checkpoint is None:
            return f"warning: run {run_id} begins anew: {had}, and epoch {epoch} starts at step 1"
        return (
            f"run {run_id} resumes from the checkpoint of step {self.checkpoint.step}: {had}, and "
            f"epoch {epoch} goes on with step {self.checkpoint.step + 1}"
        )


async def earlier_run(
    log: EventLog, folder: Path, steps: int, *, fresh: bool, from_step: int | None = None
) -> EarlierRun | None:
    """Return what was trained before, and the checkpoint to resume from; None for a new run.

    Args:
        log: The run's log.
        folder: The run's checkpoint directory.
        steps: Steps that the run is to have in all.
        fresh: True to begin at step 1, and to leave what is there.
        from_step: Step of the checkpoint to resume from; None takes the newest one.

    Raises:
        NoSuchCheckpoint: if the run has no checkpoint of ``from_step``, in its log and folder.
        CannotResume: if the run has all of its steps, or has files that nothing resumes from.
    """
    archive = Archive(folder, log.run_id)
    state = await current_state(log, partial(archive.read, Stream.EVENTS))
    checkpoint = None if fresh else _ready_checkpoint(state)
    if from_step is not None:
        checkpoints = await anyio.to_thread.run_sync(_checkpoints_on_disk, state, folder)
        if from_step not in checkpoints:
            raise NoSuchCheckpoint(log.run_id, from_step, sorted(checkpoints), folder)
        checkpoint = checkpoints[from_step]
    if checkpoint is None and not fresh:
        await _refuse_other_files(state, log.run_id, folder)
    if checkpoint is not None and checkpoint.step >= steps:
        raise CannotResume(
            f"run {log.run_id} has trained {checkpoint.step} steps, and {steps} are asked for: ask "
            "for more steps to extend it, give another name with --run, or begin anew with --fresh"
        )
    if not state.epoch:
        return None
    reached = StepRef(state.epoch, state.trainer_step)
    return EarlierRun(reached=reached, checkpoint=checkpoint)


@asynccontextmanager
async def held_checkpoint(config: RunConfig, root: Path) -> AsyncIterator[None]:
    """Hold the checkpoint that the run resumes from, so that it stays until the ranks have it.

    Raises:
        CannotResume: if it does not get its final name in time, or is of another host.
    """
    if config.resumed_step is None:
        yield
        return
    await restore(config)
    step, url = config.resumed_step, config.redis_url
    async with AsyncExitStack() as exits:
        held = hold_checkpoint(config.run_id, step, redis_url=url, checkpoint_root=root)
        try:
            await exits.enter_async_context(held)
        except (CheckpointHeld, DeadlineExceeded) as error:
            older = await anyio.to_thread.run_sync(_newest_before, root / config.run_id, step)
            raise CheckpointMissing(config.run_id, step, str(error), older) from None
        yield


def _ready_checkpoint(state: MonitorState) -> StepRef | None:
    pointer = state.ready.get("checkpoint")
    if pointer is None or not pointer.named or not stands(state, pointer.at):
        return None
    return pointer.at


def _checkpoints_on_disk(state: MonitorState, folder: Path) -> dict[int, StepRef]:
    """Return the checkpoints of the lineage whose folders are there, by their steps."""
    there = _steps_on_disk(folder)
    newest = _ready_checkpoint(state)
    whole = {*state.complete_checkpoints, *([] if newest is None else [newest.step])}
    spans = lineage_of(state)
    return {
        step: StepRef(next(span.epoch for span in spans if _ends_after(span, step)), step)
        for step in sorted(whole & there)
    }


def _ends_after(span: Span, step: int) -> bool:
    return span.last is None or step <= span.last


def _steps_on_disk(folder: Path) -> set[int]:
    """Return the steps whose folders are in a run's directory and have files."""
    try:
        paths = [path for path in folder.iterdir() if path.is_dir() and any(path.iterdir())]
    except (FileNotFoundError, NotADirectoryError):
        return set()
    return {step for path in paths if (step := parse_final_name(path.name)) is not None}


def _newest_before(folder: Path, step: int) -> int | None:
    """Return the newest checkpoint before a step that a reducer has verified; None without one."""
    verified = [
        older
        for older in _steps_on_disk(folder)
        if older < step and (folder / final_name(older) / VERIFIED).is_file()
    ]
    return max(verified, default=None)


async def _refuse_other_files(state: MonitorState, run_id: str, folder: Path) -> None:
    """Raise CannotResume if the run has ready files that are no checkpoint of its log."""
    pointer = state.ready.get("checkpoint") or state.ready.get("state_dict")
    found: str | None = None
    if pointer is None:
        found = await anyio.to_thread.run_sync(_unknown_on_disk, folder)
    elif stands(state, pointer.at):
        found = f"ready files of step {pointer.at.step} that are no whole checkpoint"
    else:
        found = f"a checkpoint of step {pointer.at.step} from before it was begun anew"
    if found is not None:
        raise CannotResume(
            f"run {run_id} has {found}, in {folder}, and would begin again at step 1: give it "
            "another name with --run, or begin anew with --fresh, which leaves what is there"
        )


def _unknown_on_disk(folder: Path) -> str | None:
    """Name the newest checkpoint in a folder whose log is another, or gone."""
    try:
        steps = [parse_final_name(path.name) for path in folder.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return None
    known = [step for step in steps if step is not None]
    return f"a checkpoint of step {max(known)} that its log does not know" if known else None
