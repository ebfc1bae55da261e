"""Checks of the reports of explorers, before a reducer copies them into the events.

Explorers may run on hosts that are trusted less than the trainer's, so they may not append to the
log that the fold believes. They append reports. What a report can say is bounded here:

1. A report is an envelope of this run, of at most :data:`MAX_REPORT_BYTES`.
2. Its event is of a type that explorers send: none opens or closes a run, registers, saves,
   commits, publishes, trains or announces.
3. Its producer has the role and the incarnation of an explorer. No report uses up the sequence of
   another role's producer, whose next event the fold would take for a duplicate.
4. It starts and ends only waits that are named after its own incarnation.
5. Its numbers are finite.

Explorers of one run are not told apart: each of them can report in the name of another. A secret
for each would not be in the log, and a replay could not check it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Literal

from msgspec import Struct

from trinity_schemas import (
    MAX_REPORT_BYTES,
    REPORT_TYPES,
    ContractError,
    Envelope,
    ForeignEvent,
    MessageTooLarge,
    Producer,
    decode_envelope,
    event_tag,
    is_reporter,
)


class ReportRefused(ContractError):
    """An event may not be reported by an explorer.

    Attributes:
        fault: ``type`` of the event, ``publisher`` for a type that an explorer's own publisher
            refuses, its ``producer``, its ``wait``, or a ``number`` of it.
        producer: Producer of the event.
        tag: Type of the event.
        wait_id: Id of the wait.
    """

    fault: Literal["type", "publisher", "producer", "wait", "number"]
    producer: Producer
    tag: str
    wait_id: str = ""
    texts: ClassVar = {
        "type": "{tag} is not an event that explorers report",
        "publisher": "{tag} is not an event of the role {producer.role}: publish it with a "
        "producer of another role",
        "producer": "the producer {producer.role}-{producer.rank} with the incarnation "
        "{producer.incarnation} is not an explorer",
        "wait": "the wait {wait_id} is of another process",
        "number": "{tag} has a number that is not finite",
    }


def check_report(
    payload: bytes, run_id: str, decode: Callable[[bytes], Envelope] = decode_envelope
) -> None:
    """Check that a report may be copied into the events of a run.

    Raises:
        ContractError: It may not: it is too large, undecodable or of another run, or it is refused
            (:class:`ReportRefused`).
    """
    # Before it is decoded: a report that is too large costs no more than its bytes.
    if len(payload) > MAX_REPORT_BYTES:
        raise MessageTooLarge(len(payload), MAX_REPORT_BYTES)
    envelope = decode(payload)
    producer, event = envelope.producer, envelope.event
    if envelope.run_id != run_id:
        raise ForeignEvent(envelope.run_id, run_id)
    if type(event) not in REPORT_TYPES:
        raise ReportRefused("type", producer, event_tag(event))
    if not is_reporter(producer):
        raise ReportRefused("producer", producer, event_tag(event))
    # An event that is no wait passes: its own incarnation begins with itself.
    wait_id = getattr(event, "wait_id", producer.incarnation)
    if not wait_id.startswith(producer.incarnation):
        raise ReportRefused("wait", producer, event_tag(event), wait_id)
    if not all(map(math.isfinite, (envelope.occurred_at, *_numbers(event)))):
        raise ReportRefused("number", producer, event_tag(event))


def _numbers(value: Any) -> Iterator[float]:
    """Yield the floating-point numbers of a struct, and of its dictionaries."""
    for name in value.__struct_fields__:
        field = getattr(value, name)
        if isinstance(field, float):
            yield field
        elif isinstance(field, dict):
            yield from (number for number in field.values() if isinstance(number, float))
        elif isinstance(field, Struct):
            yield from _numbers(field)
