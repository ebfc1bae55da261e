"""Choice of the folders that may be removed: they go on evidence from the disk, not on events.

1. A step counts as a newer checkpoint, or as one of those that stay, if the log has it as complete
   and its folder has evidence. Events alone make no folder, and no evidence.
2. Nothing goes before the current epoch has made a folder with evidence: an invented epoch, and an
   invented resume of another lineage, remove nothing.
3. A folder without evidence is never removed, and lets none be removed.
4. A folder that may be a checkpoint goes as a checkpoint, also if its evidence has a state dict
   alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct

from trinity_schemas import Kind, StepRef

from ...checkpoints.layout import StagedFolder
from ..best_checkpoint import best_checkpoint
from ..evaluations import open_versions
from ..lineage import covers
from ..state import MonitorState

LEFTOVERS_KEPT = 2
"""Staged folders that stay although the log gave them up, if no newer folder has evidence.

Two, as for checkpoints. A run that fails in each of its saves leaves no more than these behind.
"""


class Evidence(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Mark of the reducer in a folder whose files it checked when it gave the folder its name."""

    epoch: int
    """Epoch of the saves, by the name of the folder that they were written to."""
    step: int
    """Step of the saves, by the same name."""
    kinds: tuple[Kind, ...] = ()
    """Kinds that were complete; empty if the log no longer had them."""
    saves: int = 0
    """Saves whose path and size were compared with the log."""
    manifest: str | None = None
    """Digest of the manifest of the folder; None for saves that listed no files."""

    @property
    def at(self) -> StepRef:
        """Return the step, with the epoch that made it."""
        return StepRef(self.epoch, self.step)

    @property
    def may_be_checkpoint(self) -> bool:
        """Return False for a folder with a state dict alone."""
        return not self.kinds or "checkpoint" in self.kinds


def removable_steps(
    state: MonitorState, made: Mapping[int, Evidence | None], keep: int
) -> list[int]:
    """Return the steps whose folders may be removed, among the folders that the reducer made.

    A checkpoint may go once a newer one is ready, but the last ``keep`` stay. A folder with only a
    state dict may go once a newer state dict or checkpoint is ready. Folders that a pointer names
    stay. So do the best checkpoint, those of versions under evaluation, those of steps that a save
    writes to, and folders of epochs that the current epoch does not continue.

    Args:
        state: The run's state.
        made: Steps that have a folder, each with its evidence; None without any.
        keep: Number of checkpoints that stay; zero keeps everything.
    """
    pointers = {kind: pointer.at for kind, pointer in state.ready.items() if kind != "weights"}
    # A pointer of an older epoch keeps its own folder and allows no removal.
    reached = max((at.step for at in pointers.values() if at.epoch == state.epoch), default=-1)
    proven = {
        step: evidence
        for step, evidence in made.items()
        if evidence is not None and covers(state.epoch, state.lineage, evidence.at)
    }
    ready = sorted(step for step in proven if step <= reached)
    # Nothing goes before this epoch has evidence of its own (2).
    if keep == 0 or not any(proven[step].epoch == state.epoch for step in ready):
        return []
    complete = set(state.complete_checkpoints)
    counted = [step for step in ready if step in complete and "checkpoint" in proven[step].kinds]
    newest_checkpoint = counted[-1] if counted else -1
    evaluated = {version.step for version in open_versions(state) if version.epoch == state.epoch}
    # A save that is not staged may write into a folder that counts already.
    writing = {attempt.slot.step for attempt in state.attempts.values()}
    best = best_checkpoint(state)
    retained = {
        *counted[-keep:],
        *(at.step for at in pointers.values()),
        *evaluated,
        *writing,
        *(() if best is None else (best.at.step,)),
    }

    def is_passed(step: int) -> bool:
        # The log may have a checkpoint although the evidence has the state dict alone (4).
        alone = proven[step].kinds == ("state_dict",) and step not in complete
        return step < (ready[-1] if alone else newest_checkpoint)

    return [step for step in ready if step not in retained and is_passed(step)]


def is_folder_in_lineage(state: MonitorState, epoch: int | None, step: int) -> bool:
    """Return True for a folder of the current epoch, or of the epochs and steps it continues."""
    if epoch is None:
        # The name says no epoch: the log must have the step, or no other epoch can have made it.
        return step in state.complete_checkpoints or state.epoch <= 1
    return covers(state.epoch, state.lineage, StepRef(epoch, step))


def passed_leftovers(
    leftovers: Iterable[StagedFolder], made: Mapping[int, Evidence | None]
) -> list[StagedFolder]:
    """Return the staged folders to remove, among those that the log gave up.

    The log alone removes no save: a folder goes once one of its step, or a newer one, has evidence.
    Without a newer folder, the newest :data:`LEFTOVERS_KEPT` stay.
    """
    proven = max((mark.at for mark in made.values() if mark is not None), default=StepRef(0, 0))
    newest_first = sorted(
        leftovers, key=lambda folder: (folder.epoch, folder.step, folder.name), reverse=True
    )
    unpassed = [folder for folder in newest_first if proven < StepRef(folder.epoch, folder.step)]
    spared = set(unpassed[:LEFTOVERS_KEPT])
    return [folder for folder in newest_first if folder not in spared]
