"""Plan of the run's checkpoint directory, derived from the state (invariant 6)."""

from __future__ import annotations

from msgspec import Struct

from ..checkpoint_layout import ITERATION_FILES, final_name
from .completeness import staged_folder
from .state import MonitorState


class Promotion(Struct, frozen=True, order=True):
    """Complete folder of saves, and the step that gives it its final name.

    A folder that has the name already is kept aside, with two exceptions. If it was made from
    ``adds``, the staged folder of the step's state dict, its files are taken over; they are taken
    from there if it has no name yet. With ``only_if_absent`` it is newer, and stays.
    """

    step: int
    staged: str
    adds: str | None = None
    only_if_absent: bool = False


class IterationFile(Struct, frozen=True):
    """Iteration file and the step that it names, once the folder ``needs`` exists."""

    name: str
    step: int
    needs: str | None = None


class FilePlan(Struct, frozen=True, kw_only=True):
    """Folders to promote first, and iteration files to write afterwards."""

    promotions: tuple[Promotion, ...]
    iterations: tuple[IterationFile, ...]


def plan_files(state: MonitorState) -> FilePlan:
    """Derive the plan from the state alone, so that a restart repeats what a crash left undone."""
    promotions = {
        folder: Promotion(step, folder, only_if_absent=True)
        for folder, step in state.pending_promotions.items()
    }
    for kind in ITERATION_FILES:
        pointer = state.ready.get(kind)
        if pointer is not None and pointer.path is not None:
            old = pointer.at.epoch != state.epoch
            promotions[pointer.path] = Promotion(pointer.at.step, pointer.path, only_if_absent=old)
    for step, step_state in state.steps.items():
        kinds = step_state.kinds
        complete = [k for k in ITERATION_FILES if k in kinds and kinds[k].outcome is not None]
        folders = {kind: staged_folder(step_state, kind) for kind in complete}
        # The checkpoint's folder takes over the files of its state dict's folder.
        chosen = folders.get("checkpoint") or folders.get("state_dict")
        for folder in folders.values():
            if folder is not None:
                promotions.pop(folder, None)
        if chosen is not None:
            other = folders.get("state_dict")
            adds = other if other != chosen else None
            promotions[chosen] = Promotion(step, chosen, adds=adds)
    iterations = tuple(
        IterationFile(name, pointer.at.step, final_name(pointer.at.step) if pointer.named else None)
        for kind, name in ITERATION_FILES.items()
        if (pointer := state.ready.get(kind)) is not None
    )
    return FilePlan(promotions=tuple(sorted(promotions.values())), iterations=iterations)
