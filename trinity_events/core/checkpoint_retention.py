"""Which steps' folders may go (invariant 6)."""

from __future__ import annotations

from collections.abc import Mapping

from .state import MonitorState


def removable_steps(state: MonitorState, made: Mapping[int, int | None], keep: int) -> list[int]:
    """Return the steps, of those that have a folder which the reducer made, that may go.

    A checkpoint goes only once a newer one is ready, and never one of the last ``keep``; a folder
    with a state dict alone goes once a newer one of either is ready. What a pointer names stays,
    and so does what an epoch made that the present one does not go on from.

    Args:
        state: The run's state.
        made: The steps that have a folder, each with the epoch that it was made in; None where
            its name does not tell.
        keep: How many checkpoints stay; zero keeps everything.
    """
    if keep == 0:
        return []
    pointers = {kind: one.at for kind, one in state.ready.items() if kind != "weights"}
    # A pointer of an older epoch keeps its own, and lets nothing else go.
    steps = {kind: at.step for kind, at in pointers.items() if at.epoch == state.epoch}
    newest = max(steps.values(), default=0)
    newest_checkpoint = steps.get("checkpoint", 0)
    whole = sorted(step for step in state.complete_checkpoints if step <= newest_checkpoint)
    kept = {*whole[-keep:], *(at.step for at in pointers.values())}
    checkpoints = set(whole)
    return sorted(
        step
        for step, epoch in made.items()
        if step not in kept
        and step < (newest_checkpoint if step in checkpoints else newest)
        and is_of_this_line(state, epoch, step)
    )


def is_of_this_line(state: MonitorState, epoch: int | None, step: int) -> bool:
    """Return True for a folder of the present epoch, or of one up to where the present goes on."""
    if epoch is None:
        return step in state.complete_checkpoints or state.epoch <= 1
    return epoch == state.epoch or any(
        one.epoch == epoch and step <= one.step for one in state.lineage
    )
