"""What the run's checkpoint directory should look like, given the state (invariant 6)."""

from __future__ import annotations

from msgspec import Struct

from trinity_schemas import Kind

from .fold import staged_folder
from .state import MonitorState

# Trinity-RFT and veRL read these names, with a decimal step and no newline.
ITERATION_FILES: dict[Kind, str] = {
    "state_dict": "latest_state_dict_iteration.txt",
    "checkpoint": "latest_checkpointed_iteration.txt",
}


class Promotion(Struct, frozen=True, order=True):
    """A folder of saves that is complete and gets its final name."""

    step: int
    staged: str

    @property
    def target(self) -> str:
        """Its name from then on, below the run's checkpoint directory."""
        return f"global_step_{self.step}"


class FilePlan(Struct, frozen=True, kw_only=True):
    """Folders to promote, then iteration files to hold the given text."""

    promotions: tuple[Promotion, ...]
    iterations: tuple[tuple[str, str], ...]


def plan_files(state: MonitorState) -> FilePlan:
    """Derive the plan from the state alone, so that a restart repeats what a crash left undone."""
    promotions: dict[str, Promotion] = {}
    for kind in ITERATION_FILES:
        pointer = state.ready.get(kind)
        if pointer is not None and pointer.path is not None:
            promotions[pointer.path] = Promotion(pointer.at.step, pointer.path)
    for step, step_state in state.steps.items():
        complete = [k for k in ITERATION_FILES if _has_outcome(step_state.kinds.get(k))]
        folders = {kind: staged_folder(step_state, kind) for kind in complete}
        # A checkpoint holds all that the state dict of its step holds, and takes its place.
        chosen = folders.get("checkpoint") or folders.get("state_dict")
        for folder in folders.values():
            if folder is not None:
                promotions.pop(folder, None)
        if chosen is not None:
            promotions[chosen] = Promotion(step, chosen)
    iterations = tuple(
        (name, str(state.ready[kind].at.step))
        for kind, name in ITERATION_FILES.items()
        if kind in state.ready
    )
    return FilePlan(promotions=tuple(sorted(promotions.values())), iterations=iterations)


def _has_outcome(kind: object) -> bool:
    return getattr(kind, "outcome", None) is not None
