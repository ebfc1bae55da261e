"""Kinds of trouble that a run's state shows, each with its number: the first look at a run."""

from __future__ import annotations

from collections import Counter

from msgspec import Struct

from ..core import MonitorState
from ..system.counts import pluralize
from .failures import failures

_CHOSEN = frozenset({"filtered", "task-set"})
"""Reasons for which prompts are dropped that the configuration asked for."""


class Trouble(Struct, frozen=True):
    """Things of one kind that are not as they should be."""

    count: int
    words: str
    """Words for them, such as ``prompts dropped (timeout)``."""
    serious: bool
    """True if a person must look: something failed, was lost, or has ended too early."""


def find_troubles(state: MonitorState) -> list[Trouble]:
    """Return the kinds of trouble of a run, those first at which a person must look."""
    ended = Counter(
        explorer.shown_status
        for explorer in state.explorers.values()
        # A run that is over has stopped its explorers.
        if state.closed is None and not explorer.runs
    )
    failed_sets = [
        name
        for name, evaluated in state.evaluations.items()
        if evaluated.last is not None and evaluated.last.failure is not None
    ]
    dropped = {} if state.ledger is None else state.ledger.dropped
    anomalies = sum(state.anomaly_counts.values())
    troubles = [
        Trouble(int(state.closed == "failed"), "run failed", serious=True),
        _make_trouble(len(failures(state)), "save", " failed"),
        _make_trouble(len(failed_sets), "evaluation", f" failed ({', '.join(failed_sets[:3])})"),
        _make_trouble(len(state.alarms), "alarm", f" ({', '.join(list(state.alarms)[:3])})"),
        _make_trouble(len(state.reward_errors), "kind", " of reward errors"),
        *(
            _make_trouble(dropped[reason], "prompt", f" dropped ({reason})")
            for reason in sorted(dropped.keys() - _CHOSEN)
        ),
        _make_trouble(len(state.excluded), "explorer", " excluded"),
        Trouble(state.refused, "weights refused", serious=True),
        *(_make_trouble(ended[status], "explorer", f" {status}") for status in sorted(ended)),
        _make_trouble(len(state.detached), "consumer group", " detached", serious=False),
        Trouble(anomalies, pluralize(anomalies, "anomaly", "anomalies"), serious=False),
        Trouble(state.dead_letters, "undecodable", serious=False),
    ]
    return [trouble for trouble in troubles if trouble.count]


def _make_trouble(count: int, noun: str, rest: str, *, serious: bool = True) -> Trouble:
    return Trouble(count, f"{pluralize(count, noun)}{rest}", serious)
