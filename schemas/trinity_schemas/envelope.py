"""What every event travels in: who sent it, when, and where it stands in the sender's order."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from .events import Event
from .identity import Epoch, Producer, RunId

SCHEMA_VERSION = 1

Sequence = Annotated[
    int, Meta(ge=1, le=2**53, description="The sender's own count of what it sent, from 1.")
]


class Trace(Struct, frozen=True, kw_only=True):
    """W3C trace context, as text, for those who trace."""

    traceparent: Annotated[str, Meta(max_length=128, description="Of the span that sent it.")]
    tracestate: Annotated[str, Meta(max_length=512, description="Of vendors.")] = ""


class Envelope(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One entry of a run's log.

    ``(producer.incarnation, sequence)`` is the event's identity: sequences count from 1 and are
    sent in order, so one that is not above the last seen is a duplicate and a jump is a gap.
    ``occurred_at`` is seconds since the Unix epoch by the sender's clock; it informs people,
    while the fold takes its time from entry ids.
    """

    run_id: RunId
    epoch: Epoch
    producer: Producer
    sequence: Sequence
    occurred_at: Annotated[float, Meta(description="Unix seconds by the sender's clock.")]
    event: Annotated[Event, Meta(description="What happened.")]
    schema_version: Annotated[
        int, Meta(ge=1, le=2**15, description="Of the contract that the sender knows.")
    ] = SCHEMA_VERSION
    trace: Trace | None = None
