"""Envelope of every event: its sender, its time, and its place in the sender's order."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from .events import (
    Event,
    RunClosed,
    RunOpened,
    RunResumed,
    TrainerStatusChanged,
    VersionOpened,
    VersionPartPublished,
)
from .identity import Epoch, HostId, Producer, RunId

SCHEMA_VERSION = 2
"""Newest version of the contract that this package writes and reads."""
# Left out on the wire where it is 1, as ``omit_defaults`` does: old logs stay as they are.
FIRST_VERSION = 1
MEANING_SINCE: dict[type[Struct], int] = dict.fromkeys(
    (
        *(RunOpened, RunResumed, RunClosed, TrainerStatusChanged),
        *(VersionOpened, VersionPartPublished),
    ),
    2,
)
"""Event type to the version of the contract that gave it its present meaning; 1 for the others.

Since version 2, these events have announcements, so that explorers need not read the events. An
envelope without a version is of version 1, and folds as it did then.
"""

Sequence = Annotated[
    int, Meta(ge=1, le=2**53, description="Number of the event among its sender's, from 1.")
]


class Trace(Struct, frozen=True, kw_only=True):
    """W3C trace context, as text."""

    traceparent: Annotated[str, Meta(max_length=128, description="Span that sent the event.")]
    tracestate: Annotated[
        str, Meta(max_length=512, description="State of the tracing vendors.")
    ] = ""


class Envelope(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Entry of a run's log: an event and its sender.

    ``(producer.incarnation, sequence)`` identifies the event. Sequences count from 1 and are sent
    in order: a sequence that is not above the last one is a duplicate, and a jump is a gap.
    ``occurred_at`` is for readers; the fold takes its time from entry ids.
    """

    run_id: RunId
    epoch: Epoch
    producer: Producer
    sequence: Sequence
    occurred_at: Annotated[float, Meta(description="Unix seconds by the sender's clock.")]
    event: Annotated[Event, Meta(description="The event.")]
    schema_version: Annotated[
        int,
        Meta(ge=1, le=2**15, description="Version of the contract by which the event is folded."),
    ] = FIRST_VERSION
    trace: Trace | None = None
    host_id: HostId | None = None
    """Identity of the sender's host, in the first event of a sender."""
