"""Envelopes of a producer's events, numbered in order."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable

from trinity_schemas import Envelope, Event, Producer, decode_envelope, encode
from trinity_schemas.trace_context import trace_of


def new_producer(role: str, rank: int = 0) -> Producer:
    """Return a producer on this host with a new, random incarnation."""
    return Producer(
        role=role, rank=rank, node=socket.gethostname(), incarnation=secrets.token_hex(8)
    )


class EnvelopeFactory:
    """Factory of one producer's envelopes, numbered from 1."""

    def __init__(self, run_id: str, epoch: int, producer: Producer) -> None:
        self.run_id = run_id
        self.epoch = epoch
        self.producer = producer
        self._sequence = 0

    def next(self, event: Event) -> bytes:
        """Return the encoded event with the next number. A ContractError uses up no number."""
        envelope = Envelope(
            run_id=self.run_id,
            epoch=self.epoch,
            producer=self.producer,
            sequence=self._sequence + 1,
            occurred_at=time.time(),
            event=event,
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
