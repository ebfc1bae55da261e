"""State that one entry of the log is folded into, and access to its steps, kinds and slots."""

from __future__ import annotations

from typing import Any

from trinity_schemas import Announcement, Kind, Producer, Slot

from .completeness import count_registered, rank_group, slot_key
from .limits import KEPT_ANOMALIES
from .state import Anomaly, KindState, MonitorState, SlotState, StepState, VersionState


class FoldState:
    """State of a run, the entry that is folded into it, and the announcements that follow."""

    __slots__ = ("announcements", "entry_id", "state")

    def __init__(self, state: MonitorState) -> None:
        self.state = state
        self.entry_id = state.position
        self.announcements: list[Announcement] = []

    @property
    def now(self) -> int:
        """Return the milliseconds that the server wrote into the entry's id."""
        return int(self.entry_id.partition("-")[0])

    def ensure_step(self, step: int) -> StepState | None:
        """Return a step, added if the state has none; None if the fold has dropped it."""
        state = self.state
        step_state = state.steps.get(step)
        if step_state is None:
            if step <= state.forgotten_through:
                self.add_anomaly("late", f"step {step} was settled long before")
                return None
            late = bool(state.steps) and step < next(reversed(state.steps))
            step_state = state.steps[step] = StepState()
            if late:  # The oldest step comes first: compaction.py drops from the front.
                state.steps = dict(sorted(state.steps.items()))
        return step_state

    def ensure_kind(self, step: int, kind: Kind) -> KindState | None:
        """Return a kind of a step, added if the state has none; None if the step was dropped."""
        step_state = self.ensure_step(step)
        if step_state is None:
            return None
        kind_state = step_state.kinds.get(kind)
        if kind_state is None:
            kind_state = step_state.kinds[kind] = KindState()
        return kind_state

    def ensure_version(self, step: int) -> VersionState | None:
        """Return a step's version, added if the state has none; None if the step was dropped."""
        step_state = self.state.steps.get(step)
        if step_state is not None and step_state.version is not None:
            return step_state.version
        if self.ensure_kind(step, "weights") is None:
            return None
        # A part may come before the event that opens its version.
        version = VersionState(ranks=(), transport="", opened_at=self.now)
        self.state.steps[step].version = version
        return version

    def ensure_slot(self, slot: Slot, ranks: int | None = None) -> SlotState | None:
        """Return a slot, added if the state has none; None if its step or kind was dropped.

        ``ranks`` is the number of ranks that each make one save of the slot's role and name.
        """
        kind = self.ensure_kind(slot.step, slot.kind)
        if kind is None:
            return None
        if kind.compacted:
            self.add_anomaly("late", f"{format_slot(slot)} was settled before")
            return None
        key = slot_key(slot)
        slot_state = kind.slots.get(key)
        if slot_state is None:
            slot_state = kind.slots[key] = SlotState(slot=slot)
            if kind.outcome is not None and len(kind.slots) > count_registered(kind):
                self.add_anomaly(
                    "unregistered",
                    f"{format_slot(slot)} came when the step was {kind.outcome}: no registration "
                    "counts it",
                )
        if ranks is not None:
            group = rank_group(slot)
            # The larger number: with the smaller one the step could become ready before its last
            # save.
            kind.ranks[group] = max(ranks, kind.ranks.get(group, 0))
        return slot_state

    def find_slot(self, slot: Slot) -> SlotState | None:
        """Return a slot, or None if the state has none."""
        step = self.state.steps.get(slot.step)
        kind = None if step is None else step.kinds.get(slot.kind)
        return None if kind is None else kind.slots.get(slot_key(slot))

    def add_anomaly(self, name: str, detail: str) -> None:
        """Count an anomaly, and keep its details among the last few."""
        state = self.state
        state.anomaly_counts[name] = state.anomaly_counts.get(name, 0) + 1
        state.anomalies.append(Anomaly(entry_id=self.entry_id, name=name, detail=detail))
        del state.anomalies[:-KEPT_ANOMALIES]


def trim_oldest(items: dict[Any, Any], most: int) -> None:
    """Remove the oldest item of a dictionary that holds more than ``most``.

    Call it after each insertion: dictionaries keep the order of insertion, which is the log's.
    """
    if len(items) > most:
        del items[next(iter(items))]


def format_producer(producer: Producer) -> str:
    """Return a producer's role and rank, as ``explorer-0``."""
    return f"{producer.role}-{producer.rank}"


def format_slot(slot: Slot) -> str:
    """Return a slot in words."""
    return f"{slot.name} of {slot.role}-{slot.rank} for {slot.kind} step {slot.step}"
