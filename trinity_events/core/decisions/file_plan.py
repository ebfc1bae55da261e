"""Plan of the run's checkpoint directory, derived from the state (invariant 6)."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from trinity_schemas import Kind, StepRef

from ...checkpoints.layout import ITERATION_FILES, is_in_place
from ..lineage import covers
from ..state import MonitorState, SlotState, StepState


class SavedFile(Struct, frozen=True, order=True):
    """File or folder that a save wrote, and its size in the log."""

    path: str
    """Relative to the staged folder, or to the run's directory for saves outside of staging."""
    bytes: int


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
    epoch: int | None = None
    """Epoch of the saves; None if the state no longer has it."""
    kinds: tuple[Kind, ...] = ()
    """Kinds that are complete in the folder; empty if the state no longer has them."""
    saves: tuple[SavedFile, ...] = ()
    """Saves of the folder whose path and size the state has."""


class InPlace(Struct, frozen=True, order=True):
    """Final folder of a step that saves were written to, without staging."""

    step: int
    epoch: int
    kinds: tuple[Kind, ...]
    """Kinds that are complete in the folder."""
    saves: tuple[SavedFile, ...]
    """Saves whose path and size the state has; none of a step that was compacted meanwhile."""


class IterationFile(Struct, frozen=True):
    """Iteration file, and the newest ready step of its kind.

    The log alone proves no folder. The file names the step once the step's folder has evidence.
    """

    name: str
    kind: Kind
    at: StepRef
    staged: bool = False
    """True if the step's saves were staged, so that the step has a folder to promote."""
    resumed: bool = False
    """True if a resume set the step: an earlier epoch made the folder."""
    kinds: tuple[Kind, ...] = ()
    """Kinds that the log has as complete for the step."""
    saves: tuple[SavedFile, ...] = ()
    """Saves of the step outside of staging, whose path and size the state has."""

    @property
    def has_folder(self) -> bool:
        """Return True if the log says that the step has a folder with its final name."""
        return self.staged or self.resumed


class FilePlan(Struct, frozen=True, kw_only=True):
    """Folders to promote or to check in place first, and iteration files to write afterwards."""

    promotions: tuple[Promotion, ...]
    iterations: tuple[IterationFile, ...]
    in_place: tuple[InPlace, ...] = ()
    epoch: int = 0
    lineage: tuple[StepRef, ...] = ()
    """Earlier epochs that the current one continues, each with its last step that counts."""

    def covers(self, epoch: int, step: int) -> bool:
        """Return True if a step of an epoch belongs to the current lineage."""
        return covers(self.epoch, self.lineage, StepRef(epoch, step))


def plan_files(state: MonitorState) -> FilePlan:
    """Derive the plan from the state alone, so that a restart repeats what a crash left undone."""
    promotions = {promotion.staged: promotion for promotion in _old_promotions(state)}
    planned: list[Promotion] = []
    for step, step_state in state.steps.items():
        complete = _complete_kinds(step_state)
        folders = {kind: step_state.kinds[kind].folder for kind in complete}
        # The checkpoint's folder takes over the files of its state dict's folder.
        chosen = folders.get("checkpoint") or folders.get("state_dict")
        for folder in folders.values():
            # A step that the state has says more of its folder than the pointer alone.
            promotions.pop(folder or "", None)
        if chosen:
            other = folders.get("state_dict")
            adds = other if other and other != chosen else None
            planned.append(
                Promotion(
                    step,
                    chosen,
                    adds=adds,
                    epoch=state.epoch,
                    kinds=complete,
                    saves=_staged_saves(step_state, complete, chosen, adds),
                )
            )
    iterations = tuple(
        IterationFile(
            name,
            kind,
            pointer.at,
            staged=pointer.path is not None,
            resumed=pointer.resumed,
            kinds=complete_kinds(state, pointer.at.step),
            # Saves in a folder were compared before the folder got its name.
            saves=() if pointer.has_folder else _saves_in_place(state, pointer.at),
        )
        for kind, name in ITERATION_FILES.items()
        if (pointer := state.ready.get(kind)) is not None
    )
    return FilePlan(
        promotions=tuple(sorted([*promotions.values(), *planned])),
        iterations=iterations,
        in_place=tuple(_in_place(state)),
        epoch=state.epoch,
        lineage=tuple(state.lineage),
    )


def complete_kinds(state: MonitorState, step: int) -> tuple[Kind, ...]:
    """Return the kinds of files that the log has as complete for a step; empty if unknown."""
    step_state = state.steps.get(step)
    complete = set() if step_state is None else set(_complete_kinds(step_state))
    complete.update(
        kind
        for kind in ITERATION_FILES
        if (pointer := state.ready.get(kind)) is not None and pointer.at.step == step
    )
    if step in state.complete_checkpoints:
        complete.add("checkpoint")
    return tuple(kind for kind in ITERATION_FILES if kind in complete)


def _old_promotions(state: MonitorState) -> Iterator[Promotion]:
    """Yield the promotions of folders that the steps of the state no longer have."""
    for folder, step in state.pending_promotions.items():
        # The current epoch may have made the step again, and its folder stays.
        yield Promotion(step, folder, only_if_absent=True)
    for kind in ITERATION_FILES:
        pointer = state.ready.get(kind)
        if pointer is not None and pointer.path is not None:
            kinds: list[Kind] = [
                other
                # One folder may hold both kinds, if both pointers name it.
                for other in ITERATION_FILES
                if (newest := state.ready.get(other)) is not None and newest.path == pointer.path
            ]
            yield Promotion(
                pointer.at.step,
                pointer.path,
                only_if_absent=pointer.at.epoch != state.epoch,
                kinds=tuple(kinds),
            )


def _complete_kinds(step: StepState) -> tuple[Kind, ...]:
    return tuple(
        kind
        for kind in ITERATION_FILES
        if kind in step.kinds and step.kinds[kind].outcome is not None
    )


def _staged_saves(
    step: StepState, kinds: tuple[Kind, ...], folder: str, adds: str | None
) -> tuple[SavedFile, ...]:
    """Return the saves that a folder has once the files of ``adds`` are in it."""
    return tuple(
        SavedFile(path[len(slot.folder) + 1 :], slot.nbytes)
        for slot, path in _finished(step, kinds)
        # A slot that was saved to the folder too is there by a path that the state lacks.
        if slot.folder == folder or (slot.folder == adds and folder not in slot.others)
    )


def _saves_in_place(state: MonitorState, at: StepRef) -> tuple[SavedFile, ...]:
    """Return the saves of a step outside of staging."""
    step = state.steps.get(at.step) if at.epoch == state.epoch else None
    if step is None:
        return ()
    return tuple(
        SavedFile(path, slot.nbytes)
        for slot, path in _finished(step, _complete_kinds(step))
        if not slot.folder
    )


def _in_place(state: MonitorState) -> Iterator[InPlace]:
    """Yield the steps that are complete in their final folders, and that no save writes to now."""
    writing = {attempt.slot.step for attempt in state.attempts.values()}
    for number, step in state.steps.items():
        kinds = _complete_kinds(step)
        if not kinds or number in writing or any(step.kinds[kind].folder for kind in kinds):
            continue
        saves = tuple(sorted(SavedFile(path, slot.nbytes) for slot, path in _finished(step, kinds)))
        if all(is_in_place(save.path, number) for save in saves):
            yield InPlace(number, state.epoch, kinds, saves)


def _finished(step: StepState, kinds: tuple[Kind, ...]) -> Iterator[tuple[SlotState, str]]:
    """Yield the finished slots that name a path, with the path."""
    for kind in kinds:
        for slot in step.kinds[kind].slots.values():
            if slot.proof is not None and slot.path is not None:
                yield slot, slot.path
