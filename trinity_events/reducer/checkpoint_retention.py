"""Checkpoint retention: removes old checkpoints and abandoned saves (invariant 6)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeVar

import anyio
import anyio.to_thread

from ..checkpoints.layout import StagedFolder, format_staged_path
from ..core import MonitorState, plan_files
from ..core.decisions.checkpoint_retention import (
    is_folder_in_lineage,
    passed_leftovers,
    removable_steps,
)
from ..core.decisions.file_plan import complete_kinds
from ..log import EventLog
from .checkpoint_trash import CheckpointTrash
from .live_state import LiveState
from .policy import Policy

logger = logging.getLogger(__name__)

T = TypeVar("T")

ENDED = 30.0
"""Seconds without a change after which a staged folder of an earlier epoch may be removed. A save
that still runs writes all the time, and its events count for nothing any more."""


class CheckpointRetention:
    """Task of the leader that removes old checkpoints and abandoned saves.

    It deletes in two phases, so that no reader finds half a checkpoint. First it marks a step
    without a lease in the log, which refuses new leases of the step. Then it moves the folder to
    the trash and removes it.

    Args:
        log: The run's log.
        trash: The run's folders.
        token: Fencing token of the lead.
        policy: Number of checkpoints to keep, and the periods and graces.
    """

    def __init__(
        self, log: EventLog, trash: CheckpointTrash, token: int, policy: Policy = Policy()
    ) -> None:
        self._log = log
        self._trash = trash
        self._token = token
        self._keep = policy.keep_checkpoints
        self._timeouts = policy.timeouts
        self._faults: list[OSError] = []
        self._failing = False

    async def run(self, live: LiveState) -> None:
        """Check whenever a newer step is ready or a folder got its name, and periodically."""
        state = live.state
        # Marks of a leader that died: this leader decides again.
        await self._log.clear_deleting(self._token)
        while True:
            # Before the clean-up: a step that becomes ready during it starts the next one at once.
            seen = self._progress(state)
            try:
                await self.clean_up(state)
            except OSError as error:
                self._faults.append(error)
            if self._faults and not self._failing:
                [first, *_] = self._faults
                logger.error("old checkpoints of %s cannot be removed: %s", state.run_id, first)
            self._failing = bool(self._faults)
            await anyio.sleep(self._timeouts.retention_pause)
            with anyio.move_on_after(self._timeouts.retention_every):
                await live.wait_until(lambda state, seen=seen: self._progress(state) != seen)  # type: ignore[misc]

    def _progress(self, state: MonitorState) -> list[object]:
        """Return what a check depends on: the newest ready steps, and the folders with a name."""
        pointers = [pointer.at for kind, pointer in state.ready.items() if kind != "weights"]
        return [state.epoch, *pointers, self._trash.promoted]

    async def clean_up(self, state: MonitorState) -> None:
        """Remove what may be removed now.

        A folder that cannot be removed is recorded as a fault, and does not stop the others.
        """
        self._faults.clear()
        made = await anyio.to_thread.run_sync(self._trash.made)
        kinds = {step: complete_kinds(state, step) for step in made}
        evidence = await anyio.to_thread.run_sync(self._trash.evidence, kinds)
        steps = removable_steps(state, evidence, self._keep)
        if steps:
            doomed = await self._log.mark_deleting(self._token, steps)
            try:
                # With the inodes that were judged: a folder made again under the name meanwhile is
                # another.
                await self._remove({step: made[step] for step in sorted(doomed)})
            finally:
                # Also on cancellation: a mark that stays would lock readers out.
                with anyio.move_on_after(1, shield=True):
                    await self._log.clear_deleting(self._token, doomed)
        staged = await anyio.to_thread.run_sync(self._trash.staged)
        leftovers = left_behind(state, staged, made.keys(), self._keep)
        for leftover in passed_leftovers(leftovers, evidence):
            if await anyio.to_thread.run_sync(self._may_go, leftover.name, state):
                grace = self._timeouts.staged_grace
                if leftover.epoch != state.epoch:
                    grace = min(grace, ENDED)
                await self._try(self._trash.move_staged, leftover.name, grace)
        await self._empty()

    def _may_go(self, name: str, state: MonitorState) -> bool:
        """Return True unless the folder is a checkpoint of another line of the run's epochs."""
        origin = self._trash.origin_of_staged(name)
        return origin is None or is_folder_in_lineage(state, origin.epoch, origin.step)

    async def _remove(self, folders: dict[int, int]) -> None:
        for step, identity in folders.items():
            moved = await self._try(self._trash.move, step, identity)
            # Mark again: if this process stopped before the rename, another leader has cleared
            # the mark, and a reader may hold a lease on the step by now.
            if moved is not None and step not in await self._log.mark_deleting(self._token, [step]):
                await anyio.to_thread.run_sync(self._trash.restore, step, moved)
            elif moved is not None:
                logger.info("the checkpoint of step %d of %s is removed", step, self._log.run_id)
        await self._empty()

    async def _empty(self) -> None:
        for name in await self._try(self._trash.listed) or ():
            await self._try(self._trash.remove, name)

    async def _try(self, act: Callable[..., T], *args: Any) -> T | None:
        try:
            return await anyio.to_thread.run_sync(act, *args)
        except OSError as error:
            self._faults.append(error)
            return None


def left_behind(
    state: MonitorState, staged: Iterable[StagedFolder], made: Collection[int], keep: int
) -> list[StagedFolder]:
    """Return the staged folders that will never be promoted, by the log.

    These are folders of an older epoch, folders of a settled step, and replaced folders whose
    replacement is gone. A folder that a running attempt may write to is never among them.
    """
    planned = {promotion.staged for promotion in plan_files(state).promotions}
    abandoned: list[StagedFolder] = []
    for folder in staged:
        if format_staged_path(folder.name) in planned:
            continue
        over = _is_over(state, folder)
        if folder.replaced is not None:
            # Without a limit no checkpoint is removed, and neither are the earlier files of one.
            over = keep > 0 and folder.replaced not in made
        if over:
            abandoned.append(folder)
    return abandoned


def _is_over(state: MonitorState, folder: StagedFolder) -> bool:
    if folder.epoch != state.epoch:
        # A folder of a later epoch is in use: the fold has not come to its opening yet.
        return folder.epoch < state.epoch
    step_state = state.steps.get(folder.step)
    if step_state is None:
        # A step that the state lacks was settled and dropped, or it has no event yet.
        return folder.step <= state.forgotten_through
    if any(attempt.slot.step == folder.step for attempt in state.attempts.values()):
        return False
    return bool(step_state.kinds) and all(
        kind.outcome is not None for kind in step_state.kinds.values()
    )
