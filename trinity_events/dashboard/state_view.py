"""State of a run as its pages show it: what holds now, what waits for whom, and what is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trinity_schemas import StepRef, WeightsProof

from ..analysis.causes import MOST_CAUSES, LiveFacts, find_causes, is_lasting
from ..analysis.explain import format_unfinished
from ..analysis.failures import failures
from ..analysis.troubles import find_troubles
from ..core import MonitorState
from ..core.completeness import count_registered
from ..core.fold_state import format_producer, format_slot
from ..core.handlers.waits import chained_waits, remaining_seconds
from ..core.ordinal_ranges import format_ranges
from ..core.refusals import format_refusal, suspects
from ..core.state import KINDS, ExplorerState, KindState, StepState
from ..log import position

# Rows of lists: a page shows some dozens, and a run may have thousands.
_WAITS = 64
_SAVES = 64
_LINES = 32
_NAMED_TENSORS = 4
_STEPS = 12
"""Steps whose kinds are shown, the last ones."""


def build_view(state: MonitorState, now: int, digests: Mapping[StepRef, str]) -> dict[str, Any]:
    """Return a state as plain data, with all moments in milliseconds.

    Args:
        state: The run's state.
        now: Milliseconds to which ages count.
        digests: Digests of ready weight versions, by which explorers' weights are proven.
    """
    return {
        "run": state.run_id,
        "epoch": state.epoch,
        "position": state.position,
        "number": state.entries,
        "at": position(state.position)[0],
        "now": now,
        "opened_at": state.opened_at,
        "closed": state.closed,
        "closed_error": state.closed_error,
        "closed_at": state.closed_at,
        "trainer": state.trainer_status,
        "step": state.trainer_step,
        "learning": _learning(state),
        "troubles": [
            [trouble.count, trouble.words, trouble.serious] for trouble in find_troubles(state)
        ],
        "command": None if state.is_closed_for_good else state.command,
        "transport": None if state.transport is None else state.transport.name,
        "strategy": state.strategy,
        "waits": _waits(state, now),
        "unfinished": format_unfinished(state, now=now)[:_LINES],
        "stacks": list(state.stacks.items())[-_LINES:],
        "failures": [failure.sentence for failure in failures(state)][-_LINES:],
        "steps": _steps(state),
        "saves": _saves(state),
        "ready": {
            kind: {
                "epoch": pointer.at.epoch,
                "step": pointer.at.step,
                "since": position(pointer.entry_id)[0],
                "entry": pointer.entry_id,
                "digest": pointer.digest,
            }
            for kind in KINDS
            if (pointer := state.ready.get(kind)) is not None
        },
        "explorers": _explorers(state, digests),
        "ledger": _ledger(state),
        "announced": state.announced,
        "dead_letters": state.dead_letters,
        "anomaly_counts": state.anomaly_counts,
        "anomalies": [
            [anomaly.entry_id, anomaly.name, anomaly.detail] for anomaly in state.anomalies
        ],
        "refused": state.refused,
        "refusals": [[refusal.at, format_refusal(refusal)] for refusal in state.refusals[-_LINES:]],
        "suspects": suspects(state.refusals),
        "detached": [
            [name, consumer.position, consumer.pending, consumer.idle]
            for name, consumer in state.detached.items()
        ],
    }


def _learning(state: MonitorState) -> dict[str, Any]:
    learning = state.learning
    return {
        "steps": learning.total_steps,
        "pace": learning.seconds_per_step,
        "left": learning.seconds_left(state.trainer_step),
        "trained_at": learning.step_times[-1] if learning.step_times else None,
    }


def _waits(state: MonitorState, now: int) -> list[dict[str, Any]]:
    """Return the open waits, each followed by those of the processes that it names."""
    if state.closed is not None:
        return []
    return [
        {
            "by": wait.by,
            "what": wait.what,
            "for": list(wait.waits_for),
            "unnamed": wait.unnamed,
            "since": wait.since,
            "left": remaining_seconds(wait, now),
            "depth": depth,
        }
        for wait, depth in chained_waits(state, now)[:_WAITS]
    ]


def build_causes(state: MonitorState, facts: LiveFacts) -> list[dict[str, Any]]:
    """Return the lasting causes for which an open run does not continue, the first cause first.

    Waits of a moment, which every step has, are left out before the list is cut to MOST_CAUSES.

    Args:
        state: The run's state.
        facts: Facts about its processes and its server, at the moment of the question.
    """
    if state.closed is not None:
        return []
    # Before the cut: passing waits of thousands of explorers would fill the list.
    lasting = [cause for cause in find_causes(state, facts) if is_lasting(cause, facts.now)]
    return [
        {
            "words": cause.sentence,
            "reason": cause.reason,
            "process": cause.process,
            "pid": cause.pid,
        }
        for cause in lasting[:MOST_CAUSES]
    ]


def _steps(state: MonitorState) -> list[dict[str, Any]]:
    return [
        {
            "step": step,
            "kinds": [_kind(step_state, name, step_state.kinds[name]) for name in step_state.kinds],
        }
        for step, step_state in list(state.steps.items())[-_STEPS:]
    ]


def _kind(step: StepState, name: str, kind: KindState) -> dict[str, Any]:
    # Slots may be more than were registered, before the registration comes.
    have, expected = kind.finished, max(count_registered(kind), len(kind.slots))
    if name == "weights" and step.version is not None:
        have, expected = len(step.version.parts), len(step.version.ranks)
    outcome = kind.outcome or ("failed" if kind.is_failed else "")
    return {
        "kind": name,
        "have": have,
        "expected": expected,
        "committed": kind.committed_at,
        "outcome": outcome,
        "failure": kind.failure if kind.is_failed else None,
        "compacted": kind.compacted,
    }


def _saves(state: MonitorState) -> list[dict[str, Any]]:
    rows = []
    for save_id, attempt in list(state.attempts.items())[:_SAVES]:
        step = state.steps.get(attempt.slot.step)
        kind = None if step is None else step.kinds.get(attempt.slot.kind)
        slots = {} if kind is None else kind.slots
        written = next(
            (slot.progress[save_id] for slot in slots.values() if save_id in slot.progress), None
        )
        rows.append(
            {
                "slot": format_slot(attempt.slot),
                "holder": format_producer(attempt.holder),
                "node": attempt.holder.node,
                "since": attempt.since,
                "started": attempt.started,
                "bytes": written,
            }
        )
    return rows


def _explorers(state: MonitorState, digests: Mapping[StepRef, str]) -> list[list[Any]]:
    """Return one row for each explorer; rows rather than maps, since there may be thousands."""
    newest = state.ready.get("weights")
    if newest is not None and newest.digest is not None:
        # The newest one from the state: the index may be behind it.
        digests = {**digests, newest.at: newest.digest}
    return [
        [
            name,
            explorer.shown_status,
            None if explorer.version is None else explorer.version.epoch,
            None if explorer.version is None else explorer.version.step,
            explorer.digest,
            compare_digests(
                explorer.digest, digests.get(explorer.version) if explorer.version else None
            ),
            _staleness(explorer, None if newest is None else newest.at),
            explorer.applied_at,
            explorer.last_heard_at,
            explorer.requested_at,
            explorer.proof,
        ]
        for name, explorer in state.explorers.items()
    ]


def compare_digests(applied: str | None, announced: str | None) -> str:
    """Return ``proven`` if an applied digest is that of the announced version."""
    # Unknown is not wrong: the announcement may be older than the index.
    if not announced or applied is None:
        return "unknown"
    return "proven" if applied == announced else "differs"


def format_weights_proof(proof: WeightsProof) -> str:
    """Return a proof in words, with the tensors that it leaves out."""
    status = "partly proven" if proof.status == "partly" else proof.status
    words = f"{status} by {', '.join(proof.checks)}"
    if proof.difference is not None:
        words += f"; probes differ by {proof.difference:.2g} nats"
    if proof.unproven_count and proof.unproven:
        words += f"; not compared: {', '.join(proof.unproven[:_NAMED_TENSORS])}"
        more = proof.unproven_count - len(proof.unproven[:_NAMED_TENSORS])
        words += f" and {more} more" if more > 0 else ""
    return words


def _staleness(explorer: ExplorerState, newest: StepRef | None) -> int | None:
    """Return the steps by which an explorer's version is behind the newest; -1 across epochs."""
    if explorer.version is None or newest is None:
        return None
    # Steps of two epochs cannot be subtracted: a resume may have gone back.
    if explorer.version.epoch != newest.epoch:
        return -1 if explorer.version < newest else 0
    return max(0, newest.step - explorer.version.step)


def _ledger(state: MonitorState) -> dict[str, Any] | None:
    ledger = state.ledger
    if ledger is None:
        return None
    return {
        "dispatched": ledger.next,
        "trained": ledger.trained,
        "dropped": ledger.dropped,
        "open": ledger.open_count,
        "mark": ledger.mark,
        "words": ledger.format_sums(),
        "settled": format_ranges(ledger.settled[:64]) if ledger.settled else "",
    }
