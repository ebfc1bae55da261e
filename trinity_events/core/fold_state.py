"""What the fold rests on: its state, and finding one's way in it."""

from __future__ import annotations

from typing import Any

from trinity_schemas import Announcement, Kind, Producer, Slot

from .completeness import rank_group, registered, slot_key
from .limits import KEPT_ANOMALIES
from .state import Anomaly, KindState, MonitorState, SlotState, StepState, VersionState


class FoldState:
    """The state that is folded into, at one entry, and what it makes true."""

    def __init__(self, state: MonitorState) -> None:
        self.state = state
        self._entry_id = state.position
        self._out: list[Announcement] = []

    @property
    def _now(self) -> int:
        """Milliseconds, as the server stamped the entry."""
        return int(self._entry_id.partition("-")[0])

    def _step(self, step: int) -> StepState | None:
        state = self.state
        found = state.steps.get(step)
        if found is None:
            if step <= state.forgotten_through:
                self._anomaly("late", f"step {step} was settled long before")
                return None
            late = bool(state.steps) and step < next(reversed(state.steps))
            found = state.steps[step] = StepState()
            if late:  # seldom: they are kept in order, so that the oldest is the first
                state.steps = dict(sorted(state.steps.items()))
        return found

    def _kind(self, step: int, kind: Kind) -> KindState | None:
        step_state = self._step(step)
        if step_state is None:
            return None
        found = step_state.kinds.get(kind)
        if found is None:
            found = step_state.kinds[kind] = KindState()
        return found

    def _version(self, step: int) -> VersionState | None:
        found = self.state.steps.get(step)
        if found is not None and found.version is not None:
            return found.version
        if self._kind(step, "weights") is None:
            return None
        # A part may come before the event that opens its version.
        version = VersionState(ranks=(), transport="", opened_at=self._now)
        self.state.steps[step].version = version
        return version

    def _slot(self, slot: Slot, ranks: int | None = None) -> SlotState | None:
        """Find or make a slot, and note of how many ranks its save is one."""
        kind = self._kind(slot.step, slot.kind)
        if kind is None:
            return None
        if kind.compacted:
            self._anomaly("late", f"{describe_slot(slot)} was settled before")
            return None
        key = slot_key(slot)
        found = kind.slots.get(key)
        if found is None:
            found = kind.slots[key] = SlotState(slot=slot)
            if kind.outcome is not None and len(kind.slots) > registered(kind):
                self._anomaly(
                    "unregistered",
                    f"{describe_slot(slot)} came when the step was {kind.outcome}: no registration "
                    "counts it",
                )
        if ranks is not None:
            group = rank_group(slot)
            kind.ranks[group] = max(ranks, kind.ranks.get(group, 0))
        return found

    def _find_slot(self, slot: Slot) -> SlotState | None:
        """The slot, if anything is known of it."""
        step = self.state.steps.get(slot.step)
        kind = None if step is None else step.kinds.get(slot.kind)
        return None if kind is None else kind.slots.get(slot_key(slot))

    def _anomaly(self, name: str, detail: str) -> None:
        state = self.state
        state.anomaly_counts[name] = state.anomaly_counts.get(name, 0) + 1
        state.anomalies.append(Anomaly(entry_id=self._entry_id, name=name, detail=detail))
        del state.anomalies[:-KEPT_ANOMALIES]


def keep_last(kept: dict[str, Any], most: int) -> None:
    """Bound what grows by one entry at a time; the order of insertion is that of the log."""
    if len(kept) > most:
        del kept[next(iter(kept))]


def describe_producer(producer: Producer) -> str:
    """A process in words."""
    return f"{producer.role}-{producer.rank}"


def describe_slot(slot: Slot) -> str:
    """A slot in words."""
    return f"{slot.name} of {slot.role}-{slot.rank} for {slot.kind} step {slot.step}"
