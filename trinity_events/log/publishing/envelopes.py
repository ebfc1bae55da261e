"""Envelopes of a producer's events, numbered in order."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable

from trinity_schemas import (
    REPORT_TYPES,
    REPORTER_ROLE,
    ContractError,
    Envelope,
    Event,
    Producer,
    decode_envelope,
    encode,
    event_tag,
    reporter_incarnation,
)
from trinity_schemas.envelope import FIRST_VERSION, MEANING_SINCE
from trinity_schemas.trace_context import trace_of


def new_producer(role: str, rank: int = 0) -> Producer:
    """Return a producer on this host with a new, random incarnation."""
    incarnation = secrets.token_hex(8)
    if role == REPORTER_ROLE:
        incarnation = reporter_incarnation(rank, incarnation)
    return Producer(role=role, rank=rank, node=socket.gethostname(), incarnation=incarnation)


class EnvelopeFactory:
    """Factory of one producer's envelopes, numbered from 1."""

    def __init__(self, run_id: str, epoch: int, producer: Producer) -> None:
        self.run_id = run_id
        self.epoch = epoch
        self.producer = producer
        self._sequence = 0

    def next(self, event: Event) -> bytes:
        """Return the encoded event with the next number. A ContractError uses up no number.

        An event that no explorer may report is refused here, before the reducer would do so.
        """
        if self.producer.role == REPORTER_ROLE and type(event) not in REPORT_TYPES:
            raise ContractError(
                f"{event_tag(event)} is not an event of the role {REPORTER_ROLE}: publish it with "
                "a producer of another role"
            )
        envelope = Envelope(
            run_id=self.run_id,
            epoch=self.epoch,
            producer=self.producer,
            sequence=self._sequence + 1,
            occurred_at=time.time(),
            event=event,
            schema_version=MEANING_SINCE.get(type(event), FIRST_VERSION),
            trace=trace_of(self.run_id, self.epoch, self.producer.incarnation, event),
        )
        payload = encode(envelope)
        # Decoding checks the constraints: once here, before every reader does.
        decode_envelope(payload)
        self._sequence += 1
        return payload

    def undo(self) -> None:
        """Take the last number back: its event was certainly not sent and must leave no gap."""
        self._sequence -= 1


def opening_envelope(run_id: str, event: Event) -> Callable[[int], bytes]:
    """Return a function that encodes the first event of an epoch, given the epoch."""

    def payload(epoch: int) -> bytes:
        # A new producer for each attempt: a lost race for the epoch must leave no gap.
        return EnvelopeFactory(run_id, epoch, new_producer("trainer")).next(event)

    return payload
