"""Envelopes: what a producer puts around its events, and how it numbers them."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable

from trinity_schemas import Envelope, Event, Producer, decode_envelope, encode


def new_producer(role: str, rank: int = 0) -> Producer:
    """A producer on this host, with an incarnation that was never used before."""
    return Producer(
        role=role, rank=rank, node=socket.gethostname(), incarnation=secrets.token_hex(8)
    )


class EnvelopeFactory:
    """Puts one producer's events into envelopes, numbered from 1."""

    def __init__(self, run_id: str, epoch: int, producer: Producer) -> None:
        self.run_id = run_id
        self.epoch = epoch
        self.producer = producer
        self._sequence = 0

    def next(self, event: Event) -> bytes:
        """The event with the next number. Raises ContractError, which uses up no number."""
        envelope = Envelope(
            run_id=self.run_id,
            epoch=self.epoch,
            producer=self.producer,
            sequence=self._sequence + 1,
            occurred_at=time.time(),
            event=event,
        )
        payload = encode(envelope)
        # Constraints are checked where bytes are read: better here, once, than by every reader.
        decode_envelope(payload)
        self._sequence += 1
        return payload

    def undo(self) -> None:
        """Give the last number back: its event was certainly not sent, and is to leave no gap."""
        self._sequence -= 1


def opening_envelope(run_id: str, event: Event) -> Callable[[int], bytes]:
    """What opens a run: the event in its envelope, for the epoch that will be taken."""

    def payload(epoch: int) -> bytes:
        # A producer of its own for each attempt: an epoch that was taken meanwhile is no gap.
        return EnvelopeFactory(run_id, epoch, new_producer("trainer")).next(event)

    return payload
