"""Waits that processes report: the handlers of their events, and the chain of open ones."""

from __future__ import annotations

from collections.abc import Iterator

from trinity_schemas import Envelope, WaitEnded, WaitStarted

from .fold_state import FoldState, describe_producer, keep_last
from .limits import KEPT_WAIT_NAMES, KEPT_WAITS, LONGEST_WAIT
from .state import MonitorState, OpenWait

_TOLD = 16
"""Waits that are told in words; the others are counted."""
_OVERDUE = 60_000
"""Milliseconds after its deadline from which a wait is shown no more: its process is dead."""


def wait_started(fold: FoldState, event: WaitStarted, envelope: Envelope) -> None:
    """Note an open wait; waits of an earlier start of the same process are over."""
    state = fold.state
    by, incarnation = describe_producer(envelope.producer), envelope.producer.incarnation
    waits = {
        wait_id: one
        for wait_id, one in state.waits.items()
        if one.by != by or one.incarnation == incarnation
    }
    waits.pop(event.wait_id, None)
    waits[event.wait_id] = OpenWait(
        by=by,
        incarnation=incarnation,
        what=event.what[:LONGEST_WAIT],
        waits_for=event.waits_for[:KEPT_WAIT_NAMES],
        unnamed=max(0, len(event.waits_for) - KEPT_WAIT_NAMES),
        since=fold.now - int(min(event.seconds * 1000, fold.now)),
        deadline=event.deadline,
    )
    keep_last(waits, KEPT_WAITS)
    state.waits = waits


def wait_ended(fold: FoldState, event: WaitEnded, _: Envelope) -> None:
    """Forget a wait that is over; it may have been forgotten before."""
    fold.state.waits.pop(event.wait_id, None)


def open_waits(state: MonitorState, now: int) -> list[OpenWait]:
    """Return the open waits at a moment, oldest first, without those of dead processes."""
    waits = [
        one
        for one in state.waits.values()
        if one.deadline is None or now <= one.since + one.deadline * 1000 + _OVERDUE
    ]
    return sorted(waits, key=lambda one: one.since)


def chains_of_waits(state: MonitorState, now: int) -> list[str]:
    """Return one sentence for each open wait, followed by those of the processes it names.

    The latter are indented. Waits beyond the first few are counted.
    """
    waits = open_waits(state, now)
    named = {name for one in waits for name in one.waits_for if name != one.by}
    told: set[int] = set()
    # Roots first; a circle of waits has none, and is told from its oldest wait.
    ordered = sorted(waits, key=lambda one: one.by in named)
    lines = [line for one in ordered for line in _chain(one, waits, now, told, 0)]
    more = [f"{len(lines) - _TOLD} more waits are open."] if len(lines) > _TOLD else []
    return [*lines[:_TOLD], *more]


def _chain(
    wait: OpenWait, waits: list[OpenWait], now: int, told: set[int], depth: int
) -> Iterator[str]:
    if id(wait) in told:
        return
    told.add(id(wait))
    yield "  " * depth + _sentence(wait, now)
    for one in waits:
        if one.by in wait.waits_for:
            yield from _chain(one, waits, now, told, depth + 1)


def _sentence(wait: OpenWait, now: int) -> str:
    more = f" and {wait.unnamed} more" if wait.unnamed else ""
    named = f" from {', '.join(wait.waits_for)}{more}" if wait.waits_for else ""
    deadline = "" if wait.deadline is None else f", and gives up after {wait.deadline:g} s"
    age = max(0, now - wait.since) / 1000
    return f"{wait.by} waits for {wait.what}{named} for {age:.1f} s{deadline}."
