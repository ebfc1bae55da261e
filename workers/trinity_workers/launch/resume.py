"""Resuming of a run: the checkpoint that a trainer goes on from when its run is started again."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Collection
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import ClassVar, Literal

import anyio.to_thread
from msgspec import Struct, field

from trinity_events.archive import Archive
from trinity_events.checkpoints.layout import (
    TRAINER_STATE,
    VERIFIED,
    final_name,
    parse_final_name,
)
from trinity_events.checkpoints.verification import CheckpointDamaged, VerifyMode
from trinity_events.client.checkpoint_lease import hold_checkpoint
from trinity_events.core import MonitorState
from trinity_events.core.lineage import EpochSpan, is_in_lineage, lineage_spans
from trinity_events.core.saved_ledgers import LedgerDifference, find_ledger_difference
from trinity_events.errors import CheckpointHeld, DeadlineExceeded, TrinityError
from trinity_events.log import RedisEventLog, Stream
from trinity_events.reducer.checkpoint_evidence import NotVerified, load_evidence
from trinity_events.replay import current_state
from trinity_events.system.open_folder import OpenFolder, UnsafePath
from trinity_schemas import Kind, SkippedCheckpoint, StepRef

from ..config.sections.checkpoints import OnDamage
from ..config.train_config import RunConfig
from ..storage.load_verification import verify_whole
from ..storage.object_store import CopyDamaged
from ..trainer.state import UnusableTrainerState, read_trainer_state
from .logged_training import LoggedTraining, read_logged_training
from .mirror import fetch_checkpoint, restore

_CHECKPOINT: tuple[Kind, ...] = ("checkpoint",)
"""Kinds by which a folder of version 0.1, whose step the log has as complete, gets its mark."""
_LONGEST_REASON = 2000
"""Characters of a reason in an event: it has a path, and what is wrong with it."""
_NAMED = 8
"""Checkpoints that an error names, the newest ones: a run that keeps all has any number."""


class CannotResume(TrinityError):
    """A run was trained before, and cannot continue from there."""

    is_lasting = True


class NothingToTrain(CannotResume):
    """A run has trained all steps that are asked for.

    Attributes:
        run_id: The run.
        trained: Steps that it has trained.
        steps: Steps that are asked for.
    """

    run_id: str
    trained: int
    steps: int
    text = (
        "run {run_id} has trained {trained} steps, and {steps} are asked for: ask for more steps "
        "to extend it, give another name with --run, or begin anew with --fresh"
    )


class OtherCheckpoints(CannotResume):
    """A run has files of steps that are no checkpoints of its log.

    Attributes:
        run_id: The run.
        step: Newest step of the files.
        folder: Folder of the run.
        fault: ``unknown`` if the log does not have the step, ``not whole`` if it was announced
            without a whole checkpoint, ``earlier`` if the run was begun again after it.
    """

    run_id: str
    step: int
    folder: Path
    fault: Literal["unknown", "not whole", "earlier"]
    _way_out: ClassVar = (
        ", in {folder}, and would begin again at step 1: give it another name with --run, or begin "
        "anew with --fresh, which leaves what is there"
    )
    texts: ClassVar = {
        "unknown": "run {run_id} has a checkpoint of step {step} that its log does not know"
        + _way_out,
        "not whole": "run {run_id} has ready files of step {step} that are no whole checkpoint"
        + _way_out,
        "earlier": "run {run_id} has a checkpoint of step {step} from before it was begun anew"
        + _way_out,
    }


class NoSuchCheckpoint(CannotResume):
    """Raised if a run has no checkpoint of the step that the user named.

    Attributes:
        run_id: The run.
        step: The step.
        steps: Steps of the checkpoints that the run can resume from, oldest first.
        folder: Folder of the run.
    """

    run_id: str
    step: int
    steps: tuple[int, ...]
    folder: Path
    text = "run {run_id} has no checkpoint of step {step} in {folder}: {_others} (--from-step)"

    @property
    def _others(self) -> str:
        if not self.steps:
            return "it has none to resume from"
        return f"it has those of the steps {', '.join(map(str, self.steps[-_NAMED:]))}"


class CheckpointUnusable(CannotResume):
    """Raised if the checkpoint to resume from is damaged, or differs from the log.

    Attributes:
        run_id: The run.
        step: Step of the checkpoint.
        reason: Fault of the checkpoint, with the file that has it.
        older: Newest older checkpoint that is whole; None without one.
    """

    hint = ""

    run_id: str
    step: int
    reason: str
    older: int | None = None
    text = (
        "run {run_id} cannot resume from its checkpoint of step {step}: {reason} ({hint}{_way_out})"
    )

    @property
    def _way_out(self) -> str:
        if self.older is None:
            return "--fresh begins anew"
        return f"--from-step {self.older} continues from the newest older one that is whole"


class CheckpointMissing(CheckpointUnusable):
    """Raised if the checkpoint to resume from is not there, or cannot be held."""

    hint = "the checkpoint root is --checkpoint-root; "


class LedgerChanged(CheckpointUnusable):
    """Raised if the ledger in a checkpoint has other fates than the log.

    Attributes:
        path: File with the ledger.
        difference: First number that differs.
    """

    reason: str = dataclasses.field(init=False)
    path: Path = dataclasses.field(kw_only=True)
    difference: LedgerDifference = dataclasses.field(kw_only=True)

    def __post_init__(self) -> None:
        name, saved, logged = self.difference
        self.reason = f"{self.path} has {saved} as {name} of its ledger, and the log has {logged}"


class EarlierRun(Struct, frozen=True, kw_only=True):
    """Earlier training of a run, as its log tells it."""

    reached: StepRef
    """Last epoch, and the step that it had reached."""
    checkpoint: StepRef | None
    """Checkpoint to resume from, by the epoch that wrote it; None begins at step 1."""
    older: tuple[StepRef, ...] = ()
    """Older checkpoints whose folders have evidence, newest first."""
    logged: LoggedTraining = field(default_factory=LoggedTraining)
    """Configurations and ledgers that the log has for these checkpoints."""

    def notice(self, run_id: str, epoch: int, checkpoint: StepRef | None) -> str:
        """Return the sentence that tells what becomes of the earlier epochs' training.

        Args:
            run_id: The run.
            epoch: The new epoch.
            checkpoint: Checkpoint that it resumes from.
        """
        had = f"epoch {self.reached.epoch} had reached step {self.reached.step}"
        if checkpoint is None:
            return f"warning: run {run_id} begins anew: {had}, and epoch {epoch} starts at step 1"
        return (
            f"run {run_id} resumes from the checkpoint of step {checkpoint.step}: {had}, and "
            f"epoch {epoch} goes on with step {checkpoint.step + 1}"
        )


async def earlier_run(
    log: RedisEventLog, folder: Path, steps: int, *, fresh: bool, from_step: int | None = None
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
    # The fold needs what was trimmed: the reducer's snapshot may be of before it.
    archive = Archive(folder, log.run_id)
    state = await current_state(log, partial(archive.read, Stream.EVENTS))
    checkpoint = None if fresh else _ready_checkpoint(state)
    by_step = await anyio.to_thread.run_sync(_checkpoints_on_disk, state, folder)
    if from_step is not None:
        if from_step not in by_step:
            raise NoSuchCheckpoint(log.run_id, from_step, tuple(sorted(by_step)), folder)
        checkpoint = by_step[from_step]
    # Files that nothing resumes from: a run that begins at step 1 would mix its own with them.
    if checkpoint is None and not fresh:
        await _refuse_other_files(state, log.run_id, folder)
    reached = StepRef(state.epoch, state.trainer_step)
    if checkpoint is None:
        return EarlierRun(reached=reached, checkpoint=None) if state.epoch else None
    older = [by_step[step] for step in sorted(by_step, reverse=True) if step < checkpoint.step]
    if checkpoint.step in by_step or not older:
        # Without files, the step may be an invented one: an older checkpoint then counts.
        check_steps_remain(log.run_id, checkpoint.step, steps)
    logged = await read_logged_training(log, archive, [checkpoint, *older])
    return EarlierRun(reached=reached, checkpoint=checkpoint, older=tuple(older), logged=logged)


def check_steps_remain(run_id: str, trained: int, steps: int) -> None:
    """Raise NothingToTrain if a checkpoint has all steps that are asked for."""
    if trained >= steps:
        raise NothingToTrain(run_id, trained, steps)


class CheckpointSource(Struct, frozen=True, kw_only=True):
    """Places that a run's checkpoints are read from."""

    run_id: str
    root: Path
    """Folder with one checkpoint directory for each run."""
    redis_url: str
    mirror: str | None = None
    """URL of object storage with copies."""
    verify: VerifyMode = "full"
    """Extent of the comparison of files with their manifest."""
    has_reducer: bool = False
    """True if the launcher runs the reducer: it then gives a folder no name because it refuses it.
    Else no reducer may run, which is no fault of the checkpoint."""


class UsableCheckpoint(Struct, frozen=True, kw_only=True):
    """Checkpoint that was checked, and those that were passed over for it."""

    checkpoint: StepRef
    skipped: tuple[SkippedCheckpoint, ...] = ()


async def find_usable_checkpoint(
    source: CheckpointSource, earlier: EarlierRun, *, on_damage: OnDamage
) -> UsableCheckpoint:
    """Check the checkpoint to resume from, and older ones if it is not usable.

    The reducer may still have to give the folder of a ready step its name, so it has to run.

    Args:
        source: Places of the checkpoints.
        earlier: Earlier training, with a checkpoint to resume from.
        on_damage: ``previous`` takes the newest older checkpoint that is usable; ``stop`` names it.

    Raises:
        CheckpointUnusable: The checkpoint is not usable, and no other is to be taken.
    """
    assert earlier.checkpoint is not None
    run_id = source.run_id
    unusable: list[CheckpointUnusable] = []
    # From the newest on: each older one costs its steps.
    for candidate in (earlier.checkpoint, *earlier.older):
        try:
            await _check_checkpoint(source, candidate.step, earlier.logged)
        except CheckpointUnusable as error:
            unusable.append(error)
            continue
        except DeadlineExceeded as error:
            missing = CheckpointMissing(run_id, candidate.step, str(error))
            if not source.has_reducer:
                # Not checked: without a reducer its folder may lack its final name too.
                missing.older = earlier.older[0].step if earlier.older else None
                raise missing from None
            unusable.append(missing)
            continue
        if unusable and on_damage == "stop":
            # The older one was checked for the way out that the error names.
            unusable[0].older = candidate.step
            break
        return UsableCheckpoint(checkpoint=candidate, skipped=tuple(map(_skip, unusable)))
    raise unusable[0]


def _skip(error: CheckpointUnusable) -> SkippedCheckpoint:
    # A path of other bytes than UTF-8 is no text that an event can have.
    reason = error.reason.encode(errors="backslashreplace").decode()
    return SkippedCheckpoint(step=error.step, reason=reason[:_LONGEST_REASON])


async def _check_checkpoint(source: CheckpointSource, step: int, logged: LoggedTraining) -> None:
    """Raise CheckpointUnusable unless a checkpoint is there, whole, and as the log has it.

    Raises DeadlineExceeded if its folder gets no final name in time.
    """
    run_id, run_folder = source.run_id, source.root / source.run_id
    try:
        # First: the checks need a folder, and a host that is new has none.
        await fetch_checkpoint(source.mirror, run_id, step, run_folder)
    except CopyDamaged as error:
        raise CheckpointUnusable(run_id, step, str(error)) from None
    hold = hold_checkpoint(run_id, step, redis_url=source.redis_url, checkpoint_root=source.root)
    try:
        async with hold as folder:
            await anyio.to_thread.run_sync(_check_evidence, run_folder, step)
            await anyio.to_thread.run_sync(verify_whole, folder, source.verify)
            state = await anyio.to_thread.run_sync(read_trainer_state, folder, step)
    except (CheckpointHeld, NotVerified, UnsafePath, PermissionError) as error:
        raise CheckpointMissing(run_id, step, str(error)) from None
    except CheckpointDamaged as error:
        raise CheckpointUnusable(run_id, step, f"{error.path} {error.reason}") from None
    except UnusableTrainerState as error:
        raise CheckpointUnusable(run_id, step, error.reason) from None
    # Without the log's entries there is nothing to compare with; the launcher warns of it.
    if logged.missing is not None:
        return
    ledger = logged.ledgers.get(step)
    if ledger is None:
        reason = f"the log does not have the prompts that step {step} was trained on"
        raise CheckpointUnusable(run_id, step, reason)
    difference = find_ledger_difference(state.ledger, ledger)
    if difference is not None:
        raise LedgerChanged(run_id, step, path=folder / TRAINER_STATE, difference=difference)


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
        hold = hold_checkpoint(config.run_id, step, redis_url=url, checkpoint_root=root)
        try:
            await exits.enter_async_context(hold)
        except (CheckpointHeld, DeadlineExceeded) as error:
            verified = await anyio.to_thread.run_sync(_steps_with_evidence, root / config.run_id)
            # What has evidence is offered; it is checked when it is asked for.
            older = max((other for other in verified if other < step), default=None)
            raise CheckpointMissing(config.run_id, step, str(error), older) from None
        yield


def _ready_checkpoint(state: MonitorState) -> StepRef | None:
    pointer = state.ready.get("checkpoint")
    if pointer is None or not pointer.has_folder or not is_in_lineage(state, pointer.at):
        return None
    return pointer.at


def _checkpoints_on_disk(state: MonitorState, folder: Path) -> dict[int, StepRef]:
    """Return the checkpoints of the lineage whose folders have evidence, by their steps."""
    newest = _ready_checkpoint(state)
    # Evidence on disk and the log must both say so (decision 35).
    whole = {*state.complete_checkpoints, *([] if newest is None else [newest.step])}
    spans = lineage_spans(state)
    return {
        step: StepRef(next(span.epoch for span in spans if _ends_after(span, step)), step)
        for step in sorted(whole & _steps_with_evidence(folder, whole))
    }


def _ends_after(span: EpochSpan, step: int) -> bool:
    return span.last is None or step <= span.last


def _steps_with_evidence(folder: Path, complete: Collection[int] = ()) -> set[int]:
    """Return the steps whose folders the reducer has verified as checkpoints.

    Args:
        folder: The run's checkpoint directory.
        complete: Steps that the log has as complete. Their folders of version 0.1 get a mark.
    """
    steps: set[int] = set()
    # A new run has no folder yet.
    with suppress(FileNotFoundError, NotADirectoryError), OpenFolder.open_run(folder) as run:
        for name in run.names():
            step = parse_final_name(name)
            if step is not None and _is_verified(run, step, is_complete=step in complete):
                steps.add(step)
    return steps


def _is_verified(run: OpenFolder, step: int, *, is_complete: bool) -> bool:
    try:
        evidence = load_evidence(run, step, _CHECKPOINT if is_complete else None)
    except OSError:
        return False
    # A folder without evidence may be half written: it is no checkpoint (decision 35).
    return evidence is not None and evidence.may_be_checkpoint


def _check_evidence(folder: Path, step: int) -> None:
    """Raise NotVerified unless a step's folder has evidence that it is a checkpoint.

    The log decides which step is the newest. An event can be invented, so that the folder has
    to prove it.
    """
    with OpenFolder.open_run(folder) as run:
        evidence = load_evidence(run, step, _CHECKPOINT)
    path = folder / final_name(step)
    if evidence is None:
        raise NotVerified(step, path, f"has no {VERIFIED}, by which a reducer marks what is whole")
    if not evidence.may_be_checkpoint:
        raise NotVerified(step, path, f"was verified as {' and '.join(evidence.kinds)} alone")


async def _refuse_other_files(state: MonitorState, run_id: str, folder: Path) -> None:
    """Raise OtherCheckpoints if the run has ready files that are no checkpoint of its log."""
    pointer = state.ready.get("checkpoint") or state.ready.get("state_dict")
    if pointer is not None:
        fault: Literal["not whole", "earlier"] = (
            "not whole" if is_in_lineage(state, pointer.at) else "earlier"
        )
        raise OtherCheckpoints(run_id, pointer.at.step, folder, fault)
    step = await anyio.to_thread.run_sync(_find_newest_on_disk, folder)
    if step is not None:
        raise OtherCheckpoints(run_id, step, folder, "unknown")


def _find_newest_on_disk(folder: Path) -> int | None:
    """Return the step of the newest checkpoint in a folder; None without one."""
    try:
        steps = [parse_final_name(path.name) for path in folder.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return None
    return max((step for step in steps if step is not None), default=None)
