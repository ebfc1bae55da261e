"""Which steps' folders may go (invariant 6)."""

from __future__ import annotations

from collections.abc import Collection

from .state import MonitorState


def removable(state: MonitorState, present: Collection[int], keep: int) -> list[int]:
    """The steps, of those that have a folder which the reducer made, that nobody needs.

    A checkpoint goes only once a newer one is ready, and never one of the last ``keep``; a folder
    with a state dict alone goes once a newer one of either is ready. What a pointer names stays,
    and so does what is newer than the pointers: after a resume, that is still to be made again.
    Zero keeps everything.
    """
    if keep == 0:
        return []
    pointers = {kind: one.at for kind, one in state.ready.items() if kind != "weights"}
    # A pointer of an older epoch keeps its own, and lets nothing else go.
    steps = {kind: at.step for kind, at in pointers.items() if at.epoch == state.epoch}
    newest = max(steps.values(), default=0)
    newest_checkpoint = steps.get("checkpoint", 0)
    whole = sorted(step for step in state.whole if step <= newest_checkpoint)
    kept = {*whole[-keep:], *(at.step for at in pointers.values())}
    checkpoints = set(whole)
    return sorted(
        step
        for step in present
        if step not in kept and step < (newest_checkpoint if step in checkpoints else newest)
    )
