"""Choice of the steps whose folders may be removed (invariant 6)."""

from __future__ import annotations

from collections.abc import Mapping

from .evaluations import open_versions
from .state import MonitorState


def removable_steps(state: MonitorState, made: Mapping[int, int | None], keep: int) -> list[int]:
    """Return the steps whose folders may be removed, among the folders that the reducer made.

    A checkpoint may go once a newer one is ready, but the last ``keep`` stay. A folder with only a
    state dict may go once a newer state dict or checkpoint is ready. Folders that a pointer names
    stay. So do those of versions under evaluation, and folders of epochs that the current epoch
    does not continue.

    Args:
        state: The run's state.
        made: Steps that have a folder, each with the epoch that made it, or None if unknown.
        keep: Number of checkpoints that stay; zero keeps everything.
    """
    if keep == 0:
        return []
    pointers = {kind: one.at for kind, one in state.ready.items() if kind != "weights"}
    # A pointer of an older epoch keeps its own folder and allows no removal.
    steps = {kind: at.step for kind, at in pointers.items() if at.epoch == state.epoch}
    newest = max(steps.values(), default=0)
    newest_checkpoint = steps.get("checkpoint", 0)
    whole = sorted(step for step in state.complete_checkpoints if step <= newest_checkpoint)
    evaluated = {one.step for one in open_versions(state) if one.epoch == state.epoch}
    kept = {*whole[-keep:], *(at.step for at in pointers.values()), *evaluated}
    checkpoints = set(whole)
    return sorted(
        step
        for step, epoch in made.items()
        if step not in kept
        and step < (newest_checkpoint if step in checkpoints else newest)
        and is_of_this_line(state, epoch, step)
    )


def is_of_this_line(state: MonitorState, epoch: int | None, step: int) -> bool:
    """Return True for a folder of the current epoch, or of the epochs and steps it continues."""
    if epoch is None:
        return step in state.complete_checkpoints or state.epoch <= 1
    return epoch == state.epoch or any(
        one.epoch == epoch and step <= one.step for one in state.lineage
    )
