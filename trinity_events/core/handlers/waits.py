"""Waits that processes report: the handlers of their events, and the chain of open ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from trinity_schemas import Envelope, StacksTaken, WaitEnded, WaitStarted

from ...system.counts import format_count, pluralize
from ..fold_state import FoldState, format_producer, trim_oldest
from ..limits import KEPT_WAIT_NAMES, KEPT_WAITS, LONGEST_WAIT
from ..state import MonitorState, OpenWait

_MOST_LISTED = 16
"""Waits that are listed; the others are counted."""
_OVERDUE = 60_000
"""Milliseconds after its deadline from which a wait is shown no more: its process is dead."""
# More than three renewals: a report may be late, or wait for a server that is away.
_SILENT = 200_000
"""Milliseconds after its last report from which a wait is shown no more: its process is dead.

A process reports its wait again every 60 s (``trinity_events.diagnostics.waits.RENEWAL``).
"""


def wait_started(fold: FoldState, event: WaitStarted, envelope: Envelope) -> None:
    """Record an open wait, or its new object and processes.

    An explorer that has started again waits no more as it did before. Other processes start again
    in a new epoch, which forgets all waits.
    """
    state = fold.state
    by, incarnation = format_producer(envelope.producer), envelope.producer.incarnation
    if envelope.producer.role == "explorer":
        forget_waits(fold, by, but=incarnation)
    # Reports have durations, as the clocks of hosts differ. No event can put `since` below 0.
    since = fold.now - int(min(event.seconds * 1000, fold.now))
    # Removed and inserted again: the wait that was reported longest ago is dropped first.
    earlier_wait = state.waits.pop(event.wait_id, None)
    state.waits[event.wait_id] = OpenWait(
        by=by,
        incarnation=incarnation,
        what=event.what[:LONGEST_WAIT],
        waits_for=event.waits_for[:KEPT_WAIT_NAMES],
        unnamed=max(0, len(event.waits_for) - KEPT_WAIT_NAMES),
        # A renewal that was long on its way must not move the beginning.
        since=since if earlier_wait is None else min(since, earlier_wait.since),
        deadline=event.deadline,
        heard_at=fold.now,
        step=event.step,
        is_outage=event.is_outage,
    )
    trim_oldest(state.waits, KEPT_WAITS)


def wait_ended(fold: FoldState, event: WaitEnded, _: Envelope) -> None:
    """Forget a wait that is over; it may have been forgotten before."""
    fold.state.waits.pop(event.wait_id, None)


def stacks_taken(fold: FoldState, event: StacksTaken, _: Envelope) -> None:
    """Record the entry that has the stacks of a process."""
    entries = fold.state.stacks
    entries.pop(event.process, None)
    entries[event.process] = fold.entry_id
    trim_oldest(entries, KEPT_WAITS)


def format_stacks(entry_id: str, event: StacksTaken) -> list[str]:
    """Return lines with the stacks of a process, indented below a sentence that names it."""
    process = f"{event.process} (process {event.pid} on {event.node})"
    if not event.stacks:
        return [f"{process} wrote no stacks at the deadline of a wait for it: it is stopped."]
    head = f"Stacks of {process} at the deadline of a wait for it, entry {entry_id}:"
    return [head, *(f"  {line}" for line in event.stacks.splitlines())]


def forget_waits(fold: FoldState, by: str, *, but: str | None = None) -> None:
    """Forget the waits of a process that has ended, but those of one start of it."""
    state = fold.state
    gone = [name for name, wait in state.waits.items() if wait.by == by and wait.incarnation != but]
    for name in gone:
        del state.waits[name]


def open_waits(state: MonitorState, now: int) -> list[OpenWait]:
    """Return the open waits at a moment, oldest first, without those of dead processes."""
    waits = [wait for wait in state.waits.values() if now <= _expires_at(wait)]
    return sorted(waits, key=lambda wait: wait.since)


def remaining_seconds(wait: OpenWait, now: int) -> float | None:
    """Return the seconds until a wait gives up; None if it has no deadline."""
    if wait.deadline is None:
        return None
    return max(0.0, wait.deadline - (now - wait.since) / 1000)


def _expires_at(wait: OpenWait) -> float:
    heard = (wait.since if wait.heard_at is None else wait.heard_at) + _SILENT
    if wait.deadline is None:
        return heard
    return min(heard, wait.since + wait.deadline * 1000 + _OVERDUE)


class ChainedWait(NamedTuple):
    """Open wait in its chain."""

    wait: OpenWait
    depth: int
    """Number of waits above it: each names the process of the next one."""


def chained_waits(state: MonitorState, now: int) -> list[ChainedWait]:
    """Return the open waits, each followed by those of the processes it names."""
    waits = open_waits(state, now)
    named = {name for wait in waits for name in wait.waits_for if name != wait.by}
    # By identity, as two waits may be equal. The list keeps them alive, so that no id is reused.
    chained_ids: set[int] = set()
    # Roots first; a circle of waits has none, and begins with its oldest wait.
    ordered = sorted(waits, key=lambda wait: wait.by in named)
    return [link for wait in ordered for link in _chain(wait, waits, chained_ids, 0)]


def find_wait_chains(state: MonitorState, now: int) -> list[str]:
    """Return one sentence for each open wait, followed by those of the processes it names.

    The latter are indented. Waits beyond the first few are counted.
    """
    links = chained_waits(state, now)
    lines = ["  " * link.depth + format_wait(link.wait, now) for link in links[:_MOST_LISTED]]
    more = len(links) - _MOST_LISTED
    if more > 0:
        lines.append(f"{format_count(more, 'more wait')} {pluralize(more, 'is', 'are')} open.")
    return lines


def _chain(
    wait: OpenWait, waits: list[OpenWait], chained_ids: set[int], depth: int
) -> Iterator[ChainedWait]:
    if id(wait) in chained_ids:
        return
    chained_ids.add(id(wait))
    yield ChainedWait(wait, depth)
    for other in waits:
        if other.by in wait.waits_for:
            yield from _chain(other, waits, chained_ids, depth + 1)


def format_awaited(wait: OpenWait) -> str:
    """Return the processes that a wait is for, as text; empty if it names none."""
    more = f" and {wait.unnamed} more" if wait.unnamed else ""
    return f"{', '.join(wait.waits_for)}{more}"


def format_wait(wait: OpenWait, now: int) -> str:
    """Return a wait in one sentence."""
    named = f" from {format_awaited(wait)}" if wait.waits_for else ""
    remaining = remaining_seconds(wait, now)
    deadline = "" if remaining is None else f", and gives up in {remaining:.0f} s"
    age = max(0, now - wait.since) / 1000
    return f"{wait.by} waits for {wait.what}{named} for {age:.1f} s{deadline}."
