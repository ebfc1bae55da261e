"""Kinds of trouble that a run's state shows, each with its number: the first look at a run."""

from __future__ import annotations

from collections import Counter

from msgspec import Struct

from ..core import MonitorState
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
    saves, groups = len(failures(state)), len(state.detached)
    troubles = [
        Trouble(int(state.closed == "failed"), "run failed", serious=True),
        Trouble(saves, "save failed" if saves == 1 else "saves failed", serious=True),
        Trouble(
            len(failed_sets), f"evaluations failed ({', '.join(failed_sets[:3])})", serious=True
        ),
        Trouble(len(state.alarms), f"alarms ({', '.join(list(state.alarms)[:3])})", serious=True),
        Trouble(len(state.reward_errors), "kinds of reward errors", serious=True),
        *(
            Trouble(dropped[reason], f"prompts dropped ({reason})", serious=True)
            for reason in sorted(dropped.keys() - _CHOSEN)
        ),
        Trouble(len(state.excluded), "explorers excluded", serious=True),
        Trouble(state.refused, "weights refused", serious=True),
        *(
            Trouble(number, f"explorer{'' if number == 1 else 's'} {status}", serious=True)
            for status, number in sorted(ended.items())
        ),
        Trouble(groups, f"consumer group{'' if groups == 1 else 's'} detached", serious=False),
        Trouble(anomalies, "anomaly" if anomalies == 1 else "anomalies", serious=False),
        Trouble(state.dead_letters, "undecodable", serious=False),
    ]
    return [trouble for trouble in troubles if trouble.count]
