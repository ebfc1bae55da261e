"""Expired leases and deadlines, as events that the leader's timekeeper appends to the log."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from trinity_schemas import DeadlineReached, ExpiredAttempt, Kind, LeaseExpired, Producer

from ..limits import EXPIRED_AT_ONCE
from ..state import MonitorState


class LeaseHolder(NamedTuple):
    """Process that sends heartbeats: it has attempts under way, is the trainer or an explorer."""

    producer: Producer
    lease: float
    """Seconds without a heartbeat after which the process is taken for dead."""


class Waiting(NamedTuple):
    """Kind of a step that was committed and is neither complete nor failed."""

    epoch: int
    step: int
    kind: Kind
    committed_at: int
    """Milliseconds of the commit's entry id."""


def lease_holders(state: MonitorState) -> dict[str, LeaseHolder]:
    """Return the processes whose heartbeats are watched, by incarnation, with their shortest lease.

    Explorers are watched while the run is open: one that outlives it may wait for its resume.
    """
    leases = [state.trainer_lease]
    if state.closed is None:
        leases += [explorer.lease for explorer in state.explorers.values()]
    holders = {
        lease.holder.incarnation: LeaseHolder(lease.holder, lease.lease)
        for lease in leases
        if lease is not None and lease.silent_at is None
    }
    for attempt in state.attempts.values():
        if attempt.lease is not None:
            name = attempt.holder.incarnation
            earlier = holders.get(name)
            # Heartbeats of a process hold for its shortest lease (``Heartbeat.active``).
            lease = attempt.lease if earlier is None else min(earlier.lease, attempt.lease)
            holders[name] = LeaseHolder(attempt.holder, lease)
    return holders


def expired(state: MonitorState, silent: Collection[str]) -> list[LeaseExpired]:
    """Return the events for incarnations that were silent for their whole lease.

    An event has at most :data:`EXPIRED_AT_ONCE` attempts.
    """
    holders = lease_holders(state)
    under_way: dict[str, list[ExpiredAttempt]] = {name: [] for name in holders if name in silent}
    for save_id, attempt in state.attempts.items():
        if attempt.lease is not None and attempt.holder.incarnation in under_way:
            under_way[attempt.holder.incarnation].append(
                ExpiredAttempt(save_id=save_id, slot=attempt.slot)
            )
    return [
        LeaseExpired(
            holder=holders[name].producer,
            lease=holders[name].lease,
            attempts=tuple(attempts[first : first + EXPIRED_AT_ONCE]),
        )
        for name, attempts in under_way.items()
        # One event even without attempts: the lease of the trainer or of an explorer is over, too.
        for first in range(0, max(1, len(attempts)), EXPIRED_AT_ONCE)
    ]


def waiting(state: MonitorState) -> list[Waiting]:
    """Return the kinds of steps that have a deadline."""
    return [
        Waiting(state.epoch, step, kind, committed_at)
        for step, step_state in state.steps.items()
        for kind, kind_state in step_state.kinds.items()
        if (committed_at := kind_state.committed_at) is not None and not kind_state.settled
    ]


def overdue(
    state: MonitorState, late: Collection[Waiting], seconds: float
) -> list[DeadlineReached]:
    """Return the events for kinds in ``late`` that still wait, ``seconds`` after their commit."""
    return [
        DeadlineReached(step=commit.step, kind=commit.kind, seconds=seconds)
        for commit in waiting(state)
        if commit in late
    ]
