"""Index of a run's log: kept states, summaries of blocks, counts by lane and time, and figures."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from msgspec import Struct

from trinity_schemas import (
    Envelope,
    EnvelopeReader,
    Event,
    RunClosed,
    RunOpened,
    RunResumed,
    StepFailed,
    event_tag,
)

from ..core import MonitorState
from ..core.fold import Monitor
from ..core.fold_state import format_producer
from ..log import Entry, position
from ..replay import fold_one
from .activity import Activity
from .blocks import BLOCK, Blocks, EntryBlock
from .categories import FAILURE, TYPE_BIT, find_category, find_step
from .series import Figures
from .states import CompressedStates

LANES = 2048
"""Maximum lanes; the events of further producers share the last one."""
MARKS = 400
"""Failures and openings of epochs that are kept with their words, the last ones."""
REDUCER = 0
"""Lane of the reducer, whose announcements follow from the fold."""
OTHERS = "others"
"""Lane that such producers share."""


class Lane(Struct, frozen=True):
    """Lane of a timeline: one process by role and rank, whichever start of it."""

    name: str
    role: str
    rank: int
    node: str


class Mark(Struct, frozen=True):
    """Entry that stands out: a failure, or the begin or end of an epoch."""

    milliseconds: int
    number: int
    entry: str
    name: str
    text: str


class History:
    """Index of the entries folded so far, in memory that is bounded whatever the log's length.

    Args:
        state: State at which the index begins; it is folded on.
        begin: Milliseconds of the first entry.
        end: Milliseconds of the last entry that is known yet.
        lanes: Maximum lanes; further producers share the last one.
    """

    def __init__(self, state: MonitorState, begin: int, end: int, *, lanes: int = LANES) -> None:
        self._most_lanes = lanes
        self.monitor = Monitor(state)
        self.states = CompressedStates()
        self.blocks = Blocks()
        self.activity = Activity(begin, max(end, begin + 1000))
        self.figures = Figures()
        self.lanes: list[Lane] = [Lane("reducer-0", "reducer", 0, "")]
        self.marks: deque[Mark] = deque(maxlen=MARKS)
        self.begin = begin
        self.first = state.entries
        """Number of the entries before the first one of the index."""
        self.last = begin
        """Milliseconds of the newest entry, by the clock that never went back."""
        self._lane_of: dict[tuple[str, int], int] = {("reducer", 0): REDUCER}
        self._decode = EnvelopeReader().decode
        self._block: EntryBlock | None = None
        self.states.add(state.entries, state)

    @property
    def state(self) -> MonitorState:
        """State after the newest folded entry."""
        return self.monitor.state

    @property
    def number(self) -> int:
        """Number of entries folded so far."""
        return self.monitor.state.entries

    def feed(self, entries: Sequence[Entry]) -> None:
        """Fold entries, in the order of the log."""
        state = self.monitor.state
        for entry in entries:
            milliseconds = position(entry.id)[0]
            # A server's clock may have gone back; the order of the ids has not.
            self.last = max(self.last, milliseconds)
            # Before the fold, which counts the entry: a block begins at the number before it.
            block = self._find_block(entry.id, milliseconds)
            folded = fold_one(self.monitor, entry, self._decode)
            if folded.envelope is None:
                self._count(block, REDUCER, FAILURE, milliseconds)
                self._mark(entry.id, milliseconds, "dead letter", str(folded.problem))
            else:
                self._add(entry.id, milliseconds, block, folded.envelope)
            for announcement in folded.announcements:
                self._add_announcement(entry.id, milliseconds, block, announcement)
            if self.states.is_due(state.entries):
                self.states.add(state.entries, state)

    def find_lane(self, role: str, rank: int, node: str = "") -> int:
        """Return the number of a producer's lane."""
        lane = self._lane_of.get((role, rank))
        if lane is None:
            # The last place is of all further producers together.
            lane = min(len(self.lanes), self._most_lanes - 1)
            if len(self.lanes) < self._most_lanes - 1:
                self.lanes.append(Lane(f"{role}-{rank}", role, rank, node))
                self._lane_of[role, rank] = lane
            elif len(self.lanes) < self._most_lanes:
                self.lanes.append(Lane(OTHERS, OTHERS, 0, ""))
        return lane

    def _find_block(self, entry_id: str, milliseconds: int) -> EntryBlock:
        if self._block is None or self._block.entries >= BLOCK:
            self._block = self.blocks.open(self.number, entry_id, milliseconds)
        self._block.entries += 1
        return self._block

    def _add(self, entry_id: str, milliseconds: int, block: EntryBlock, envelope: Envelope) -> None:
        event, producer = envelope.event, envelope.producer
        category = find_category(event)
        lane = self._lane_of.get((producer.role, producer.rank))
        if lane is None:
            lane = self.find_lane(producer.role, producer.rank, producer.node)
        self._count(block, lane, category, milliseconds)
        # Bits, so that a search skips a block by one operation.
        block.types |= TYPE_BIT[type(event)]
        step = find_step(event)
        if step is not None:
            if block.least_step < 0 or step < block.least_step:
                block.least_step = step
            block.greatest_step = max(block.greatest_step, step)
        self.figures.add(milliseconds / 1000, envelope)
        if category == FAILURE or isinstance(event, (RunOpened, RunResumed, RunClosed)):
            who = format_producer(producer)
            self._mark(entry_id, milliseconds, event_tag(event), f"{who}: {_format_mark(event)}")

    def _add_announcement(
        self, entry_id: str, milliseconds: int, block: EntryBlock, announcement: Envelope
    ) -> None:
        event = announcement.event
        self._count(block, REDUCER, find_category(event), milliseconds)
        block.types |= TYPE_BIT[type(event)]
        self.figures.add(milliseconds / 1000, announcement)
        if isinstance(event, StepFailed):
            # Cut: the marks of a run are all sent to each viewer.
            text = f"step {event.step} {event.kind}: {event.reason[:200]}"
            self._mark(entry_id, milliseconds, "step-failed", text)

    def _count(self, block: EntryBlock, lane: int, category: int, milliseconds: int) -> None:
        block.lanes |= 1 << lane
        self.activity.add(lane, category, milliseconds)

    def _mark(self, entry_id: str, milliseconds: int, name: str, text: str) -> None:
        self.marks.append(Mark(milliseconds, self.number, entry_id, name, text[:240]))


def _format_mark(event: Event) -> str:
    """Return the words of a failure, or of the begin or end of an epoch."""
    for name in ("error", "message", "reason", "error_type"):
        text = getattr(event, name, None)
        if text:
            return str(text)
    step = find_step(event)
    return "" if step is None else f"step {step}"
