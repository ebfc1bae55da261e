"""What every event travels in: who sent it, when, and where it stands in the sender's order."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from .events import Event
from .identity import Epoch, Name, Rank, RunId, Slug

SCHEMA_VERSION = 1


Sequence = Annotated[int, Meta(ge=1, le=2**53)]


class Producer(Struct, frozen=True, kw_only=True):
    """A sender of events. ``incarnation`` is new whenever the sender starts anew."""

    role: Slug
    rank: Rank
    node: Name
    incarnation: Slug


class Trace(Struct, frozen=True, kw_only=True):
    """W3C trace context, as text, for those who trace."""

    traceparent: Annotated[str, Meta(max_length=128)]
    tracestate: Annotated[str, Meta(max_length=512)] = ""


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
    occurred_at: float
    event: Event
    schema_version: Annotated[int, Meta(ge=1, le=2**15)] = SCHEMA_VERSION
    trace: Trace | None = None
