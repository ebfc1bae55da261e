"""Errors of a run's reward function: the first one of each cause, and what became of the prompts.

The state keeps a sentence about the error and the entry that reports it. Traceback, prompt and
response stay in that entry: snapshots, which the reducer writes all the time, stay small.
"""

from __future__ import annotations

from collections.abc import Iterator

from trinity_schemas import Envelope, RewardErrorReported

from .fold_state import FoldState
from .limits import KEPT_REWARD_ERRORS, LONGEST_REFUSAL
from .state import MonitorState, RewardError

REWARD_FAILED = "reward-failed"
"""Reason for which an ordinal is dropped whose reward failed."""
REWARD_ERRORS = "reward_errors"
"""Metric of a step or an evaluation: samples whose reward failed."""


def reward_error_reported(fold: FoldState, event: RewardErrorReported, _: Envelope) -> None:
    """Store the first error of a cause, until the next epoch.

    The trainer reports the error that ends a run once more: its explorer's report may come later.
    """
    state = fold.state
    if event.epoch != state.epoch:
        return  # of an explorer that has not noticed the new epoch yet
    cause = _name_cause(event)
    if cause in state.reward_errors:
        return
    if len(state.reward_errors) >= KEPT_REWARD_ERRORS:
        fold.add_anomaly("reward-error-not-kept", format_reward_error(event)[:LONGEST_REFUSAL])
        return
    state.reward_errors[cause] = RewardError(
        at=fold.now, entry_id=fold.entry_id, sentence=format_reward_error(event)[:LONGEST_REFUSAL]
    )


def is_first_of_cause(state: MonitorState, entry_id: str, event: RewardErrorReported) -> bool:
    """Return True if an entry that was folded reports the first error of its cause."""
    first = state.reward_errors.get(_name_cause(event))
    return first is not None and first.entry_id == entry_id


def format_reward_error(event: RewardErrorReported) -> str:
    """Return the error as a sentence without its full stop."""
    questions = "held-out question" if event.held_out else "question"
    return (
        f"{event.explorer} could not judge answer {event.sample} to {questions} {event.ordinal}: "
        f"{event.message}"
    )


def format_evidence(event: RewardErrorReported) -> Iterator[str]:
    """Yield lines with the traceback, the prompt and the response of an error, indented."""
    for name, text in (
        ("traceback", event.traceback),
        ("prompt", event.prompt),
        ("response", event.response),
    ):
        if text:
            yield f"  {name}:"
            yield from (f"    {line}" for line in text.splitlines())


def count_failed_prompts(state: MonitorState) -> int:
    """Return the number of prompts that were dropped since their reward failed."""
    return 0 if state.ledger is None else state.ledger.dropped.get(REWARD_FAILED, 0)


def _name_cause(event: RewardErrorReported) -> str:
    return f"{event.error_type} {event.place}"
