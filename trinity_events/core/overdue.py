"""What the passing of time makes true: asked by the leader's timekeeper, told to the log."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

from trinity_schemas import DeadlineReached, ExpiredAttempt, Kind, LeaseExpired, Producer

from .state import KindState, MonitorState


class Holder(NamedTuple):
    """A process that has saves under way and sends heartbeats."""

    producer: Producer
    lease: float
    """Seconds of silence after which it is taken for dead."""


def holders(state: MonitorState) -> dict[str, Holder]:
    """Who must be heard of, by incarnation."""
    found: dict[str, Holder] = {}
    for attempt in state.attempts.values():
        if attempt.lease is not None:
            name = attempt.holder.incarnation
            known = found.get(name)
            lease = attempt.lease if known is None else max(known.lease, attempt.lease)
            found[name] = Holder(attempt.holder, lease)
    return found


def expired(state: MonitorState, silent: Collection[str]) -> list[LeaseExpired]:
    """What to say of the incarnations that were silent for their whole lease."""
    under_way: dict[str, list[ExpiredAttempt]] = {}
    for save_id, attempt in state.attempts.items():
        if attempt.lease is not None and attempt.holder.incarnation in silent:
            under_way.setdefault(attempt.holder.incarnation, []).append(
                ExpiredAttempt(save_id=save_id, slot=attempt.slot)
            )
    known = holders(state)
    return [
        LeaseExpired(holder=known[name].producer, lease=known[name].lease, attempts=tuple(attempts))
        for name, attempts in under_way.items()
    ]


def overdue(state: MonitorState, now: int, seconds: float) -> list[DeadlineReached]:
    """The kinds of steps that are still incomplete ``seconds`` after their commit.

    ``now`` is milliseconds of the server's clock.
    """
    return [
        DeadlineReached(step=step, kind=kind, seconds=seconds)
        for step, kind, committed_at in _incomplete(state)
        if committed_at + seconds * 1000 <= now
    ]


def next_deadline(state: MonitorState, seconds: float) -> int | None:
    """Milliseconds of the server's clock at which the next kind is overdue, if any can be."""
    return min(
        (int(committed_at + seconds * 1000) for _, _, committed_at in _incomplete(state)),
        default=None,
    )


def _incomplete(state: MonitorState) -> Iterator[tuple[int, Kind, int]]:
    for step, step_state in state.steps.items():
        for kind, kind_state in step_state.kinds.items():
            committed_at = _waits_since(kind_state)
            if committed_at is not None:
                yield step, kind, committed_at


def _waits_since(kind: KindState) -> int | None:
    return None if kind.settled else kind.committed_at
