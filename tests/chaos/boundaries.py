"""Where a process is killed: at commands that carry an event, and at a few that carry none."""

from __future__ import annotations

from collections import Counter

from tests.support.faulty_proxy import Command
from trinity_schemas import (
    ContractError,
    Envelope,
    Producer,
    StepCommitted,
    decode_envelope,
    event_tag,
)

from .plan import STEPS

COMMANDS = ("acknowledged", "heartbeat", "lead")
"""Boundaries that are no events: a group's acknowledgement, a worker's beat, a reducer's lead."""


def envelopes(given: Command) -> list[Envelope]:
    """The events that a command carries, whichever command it is."""
    decoded = []
    for word in given[2:]:
        try:
            decoded.append(decode_envelope(word))
        except ContractError:
            continue
    return decoded


def boundaries(given: Command) -> Counter[str]:
    """The boundaries that a command is, and how often: a batch carries several events."""
    counts = Counter(event_tag(envelope.event) for envelope in envelopes(given))
    if given[0].upper() == b"XACK":
        counts["acknowledged"] += 1
    if given[0].upper() == b"SET" and b":alive:" in given[1]:
        counts["heartbeat"] += 1
    if given[0].upper() == b"EVALSHA" and given[2] == b"2" and given[3].endswith(b":leader"):
        counts["lead"] += 1
    return counts


def sender(given: Command, name: str) -> Producer | None:
    """Who says the event by which a boundary has its name."""
    return next(
        (envelope.producer for envelope in envelopes(given) if event_tag(envelope.event) == name),
        None,
    )


class Tally:
    """Counts the boundaries of a run as they pass."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def __call__(self, given: Command) -> bool:
        """Matches nothing: it only looks."""
        self.counts += boundaries(given)
        return False


class Nth:
    """Matches the command with which a boundary is met for the nth time."""

    def __init__(self, name: str, nth: int) -> None:
        self._name = name
        self._remaining = nth

    def __call__(self, given: Command) -> bool:
        """Whether it is met for the nth time now."""
        before, self._remaining = self._remaining, self._remaining - boundaries(given)[self._name]
        return before > 0 >= self._remaining


def last_step_is_committed(given: Command) -> bool:
    """The trainer commits the last step: by now an earlier one has its checkpoint."""
    return any(
        isinstance(envelope.event, StepCommitted) and envelope.event.step == STEPS
        for envelope in envelopes(given)
    )


def save_is_under_way(given: Command) -> bool:
    """A worker has begun a save, and has not ended it in the same batch."""
    counts = boundaries(given)
    return counts["save-started"] > counts["save-finished"] + counts["save-failed"]
