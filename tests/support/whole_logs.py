"""Both streams of a run as one log, and the fates of its prompts by two independent counts."""

from __future__ import annotations

from collections.abc import Iterable

from tests.support.rollout_histories import count_raw
from trinity_events.analysis.audit import Auditor
from trinity_events.log import Entry, position
from trinity_events.server import connect_sync
from trinity_schemas import Envelope, RunKeys, decode_envelope


def in_order(announcements: Iterable[Entry], events: Iterable[Entry]) -> list[Envelope]:
    """Return the entries of both streams in the order of their ids.

    Of one millisecond, announcements come first.
    """
    ordered = [
        ((position(entry.id)[0], order, position(entry.id)), entry.payload)
        for order, stream in enumerate((announcements, events))
        for entry in stream
    ]
    return [decode_envelope(payload) for _, payload in sorted(ordered)]


def whole_log(redis_url: str, run_id: str) -> list[Envelope]:
    """Return a run's events and announcements as one log."""
    keys = RunKeys.of(run_id)
    return in_order(_entries(redis_url, keys.announcements), _entries(redis_url, keys.events))


def ledger_faults(redis_url: str, run_id: str, *, steps: int, prompts: int) -> list[str]:
    """Return what is wrong with the fates of a run's prompts, by two counts of the raw log.

    Args:
        redis_url: Server of the log.
        run_id: The run.
        steps: Training steps that it must have.
        prompts: Prompts that each step must have trained on.
    """
    entries = [entry.payload for entry in _entries(redis_url, RunKeys.of(run_id).events)]
    [*_, count] = count_raw(entries)
    auditor = Auditor(run_id)
    for payload in entries:
        auditor.add(decode_envelope(payload))
    [*_, books] = auditor.audit().lineages
    faults = [*count.wrong, *(str(contradiction) for contradiction in books.contradictions)]
    for name, actual, expected in (
        ("trained, by the counter", count.trained, steps * prompts),
        ("trained, by the audit", books.trained, steps * prompts),
        ("steps", books.steps, steps),
        ("dispatched", books.dispatched, count.next),
        ("open", books.open, len(count.open)),
    ):
        if actual != expected:
            faults.append(f"{name}: {actual}, not {expected}")
    return faults


def _entries(redis_url: str, key: str) -> list[Entry]:
    with connect_sync(redis_url) as client:
        return [Entry(at.decode(), fields[b"e"]) for at, fields in client.xrange(key)]
