"""The part of the fold that tells what became true: ready, superseded, retired, forgotten."""

from __future__ import annotations

from bisect import insort

from trinity_schemas import (
    Kind,
    PublishedPart,
    SaveProof,
    StepReady,
    StepRef,
    StepSuperseded,
    VersionRetired,
    version_digest,
)

from ..checkpoint_layout import staged_in
from .completeness import StagedPlace, complete_places, is_complete, proof_in, registered
from .fold_state import FoldState
from .limits import (
    KEPT_BASES,
    KEPT_COMPLETE_CHECKPOINTS,
    KEPT_STEPS,
    KEPT_STEPS_AT_MOST,
    KEPT_VERSIONS,
    MOST_PROOFS,
)
from .state import DeltaBases, KindState, ReadyPointer, SlotState, StepState


class AnnouncementFold(FoldState):
    """What becomes true of steps."""

    def _settle(self, step: int, kind: Kind) -> None:
        """Announce the kind of the step, and what rests on it, if it is complete now."""
        step_state = self.state.steps[step]
        if kind == "weights":
            self._announce_if_complete(step, step_state, "weights")
        else:
            # The state dict goes first: who sees the checkpoint ready finds both ready.
            self._announce_if_complete(step, step_state, "state_dict")
            self._announce_if_complete(step, step_state, "checkpoint")

    def _announce_if_complete(self, step: int, step_state: StepState, kind: Kind) -> None:
        kind_state = step_state.kinds.get(kind)
        if kind_state is None or kind_state.outcome is not None:
            return
        if kind == "weights":
            if not is_complete(step_state, kind):
                return
        elif places := complete_places(step_state, kind):
            self._decide_folder(step, step_state, kind, places[0])
        else:
            return
        state = self.state
        at = StepRef(state.epoch, step)
        pointer = state.ready.get(kind)
        if pointer is not None and pointer.at > at:
            kind_state.outcome = "superseded"
            self._supersede(state.epoch, step, kind, pointer.at)
            if kind == "checkpoint":
                self._keep_whole(step)
            self._compact(step)
        else:
            kind_state.outcome = "ready"
            self._announce_ready(at, step_state, kind)
            if pointer is not None and pointer.at.epoch == at.epoch:
                self._compact(pointer.at.step)

    def _decide_folder(
        self, step: int, step_state: StepState, kind: Kind, place: StagedPlace
    ) -> None:
        """Settle which folder the kind is in, and say so if not all of its saves were counted."""
        kind_state = step_state.kinds[kind]
        if place is None and not kind_state.slots and kind_state.with_state_dict:
            place = staged_folder(step_state, "state_dict")
        kind_state.folder = place or ""
        expected = registered(kind_state)
        if kind_state.finished > expected:
            self._anomaly(
                "unregistered",
                f"{kind_state.finished} saves of {kind} step {step} were made, and {expected} "
                "registered",
            )

    def _announce_ready(self, at: StepRef, step_state: StepState, kind: Kind) -> None:
        path: str | None = None
        saves: tuple[SaveProof, ...] = ()
        save_count = 0
        parts: tuple[PublishedPart, ...] = ()
        digest: str | None = None
        transport: str | None = None
        if kind == "weights":
            assert step_state.version is not None
            version = step_state.version
            parts = tuple([version.parts[rank] for rank in sorted(version.ranks)])
            digest = version_digest([(part.rank, part.manifest_digest) for part in parts])
            transport = version.transport
        else:
            path = staged_folder(step_state, kind)
            saves = proof(step_state, kind, path)
            save_count = step_state.kinds[kind].finished
            if step_state.kinds[kind].with_state_dict:
                save_count += step_state.kinds["state_dict"].finished
        self.state.ready[kind] = ReadyPointer(
            at=at, entry_id=self._entry_id, path=path, digest=digest
        )
        self._out.append(
            StepReady(
                epoch=at.epoch,
                step=at.step,
                kind=kind,
                caused_by=self._entry_id,
                saves=saves[:MOST_PROOFS],
                save_count=save_count,
                path=path,
                parts=parts,
                version_digest=digest,
                transport=transport,
            )
        )
        if kind == "weights":
            self.state.versions.append(at)
            bases = {part.base for part in parts if part.base is not None}
            if bases:
                kept = tuple(sorted(bases)[:KEPT_BASES])
                self.state.delta_bases.append(DeltaBases(version=at, bases=kept))
            self._retire()
        elif kind == "checkpoint":
            self._keep_whole(at.step)

    def _keep_whole(self, step: int) -> None:
        """Note a checkpoint that is whole, which counts as one of those that stay."""
        insort(self.state.complete_checkpoints, step)
        del self.state.complete_checkpoints[:-KEPT_COMPLETE_CHECKPOINTS]

    def _supersede(self, epoch: int, step: int, kind: Kind, by: StepRef) -> None:
        self._out.append(
            StepSuperseded(epoch=epoch, step=step, kind=kind, caused_by=self._entry_id, by=by)
        )
        if kind == "weights":
            self._out.append(VersionRetired(epoch=epoch, step=step))

    def _retire(self) -> None:
        """Keep the newest versions and what they rest on; the others are retired."""
        state = self.state
        kept = set(state.versions[-KEPT_VERSIONS:])
        if state.delta_bases:
            state.delta_bases = [one for one in state.delta_bases if one.version in kept]
            kept.update(base for one in state.delta_bases for base in one.bases)
        for version in state.versions:
            if version not in kept:
                self._out.append(VersionRetired(epoch=version.epoch, step=version.step))
        state.versions = [version for version in state.versions if version in kept]

    def _compact(self, step: int) -> None:
        """Drop what a step's saves were, once all its kinds are over and none is the newest.

        What is kept answers for it: that it was ready, with how many saves, in which folder.
        """
        found = self.state.steps.get(step)
        if found is None:
            return
        at = StepRef(self.state.epoch, step)
        for name, kind in found.kinds.items():
            pointer = self.state.ready.get(name)
            if kind.outcome is None or pointer is None or pointer.at <= at:
                return
        folders = {
            name: None if name == "weights" else staged_folder(found, name) for name in found.kinds
        }
        for name, kind in found.kinds.items():
            if not kind.compacted:
                kind.folder = folders[name]
                kind.compacted = True
                kind.registrations, kind.slots, kind.ranks = {}, {}, {}
        found.version = None

    def _forget(self) -> None:
        """Drop the oldest steps of which nothing more can come, so that the state stays small."""
        steps = self.state.steps
        while len(steps) > KEPT_STEPS:
            oldest = next(iter(steps))
            if len(steps) <= KEPT_STEPS_AT_MOST and not self._is_over(oldest):
                return
            del steps[oldest]
            self.state.forgotten_through = max(self.state.forgotten_through, oldest)

    def _is_over(self, step: int) -> bool:
        at = StepRef(self.state.epoch, step)
        for kind, kind_state in self.state.steps[step].kinds.items():
            pointer = self.state.ready.get(kind)
            if not kind_state.settled and (pointer is None or pointer.at < at):
                return False
        return True


def proof(step: StepState, kind: Kind, place: StagedPlace) -> tuple[SaveProof, ...]:
    """Return the finished slots that a kind rests on; a checkpoint rests on its state dict's too.

    Of a slot that was saved to several folders, the attempt in ``place`` counts.
    """
    kinds: list[Kind] = [kind, "state_dict"] if step.kinds[kind].with_state_dict else [kind]
    return tuple(
        found
        for one in kinds
        for slot in _finished(step.kinds[one])
        if (found := proof_in(slot, place)) is not None
    )


def staged_folder(step: StepState, kind: Kind) -> str | None:
    """The folder below the staging folder that all saves of the kind were written to, if any.

    Saves that named no path, or one of their caller's own, have none: nothing is to be moved.
    """
    state = step.kinds[kind]
    if state.compacted or state.folder is not None:
        return state.folder or None
    own = _finished(state)
    if not own and state.with_state_dict:
        return staged_folder(step, "state_dict")
    folders = {staged_in(slot.path) for slot in own}
    return folders.pop() if len(folders) == 1 else None


def _finished(kind: KindState) -> list[SlotState]:
    return [slot for _, slot in sorted(kind.slots.items()) if slot.proof is not None]
