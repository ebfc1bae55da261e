"""Decoder for readers of many envelopes from a few senders."""

from __future__ import annotations

from msgspec import Raw, Struct, msgpack

from .codec import MAX_EVENT_BYTES, UNREADABLE, decode_envelope
from .envelope import Envelope, Sequence
from .events import Event
from .identity import Epoch, Producer


class _Six(Struct, gc=False, forbid_unknown_fields=True):
    """Envelope with its required fields alone; its sender and its run are not checked yet."""

    run_id: str
    epoch: Epoch
    producer: Raw
    sequence: Sequence
    occurred_at: float
    event: Event


_SIX = 0x86
"""First byte of a MessagePack map of six items: each field is there once."""

# A longer sender is not refused: it is decoded again each time.
_LONGEST = 4096
"""Bytes of the longest sender that is remembered; known fields take less."""

_decode = msgpack.Decoder(_Six).decode


class EnvelopeReader:
    """Decoder that does as :func:`decode_envelope`, in two thirds of the time.

    It remembers the bytes of each sender and run that it has checked, and does not check them
    again. Unusual and faulty envelopes go through :func:`decode_envelope`, with the same errors.

    Args:
        most: Number of senders to remember; a full memory is cleared.
    """

    def __init__(self, most: int = 16_384) -> None:
        self._met: dict[bytes, tuple[str, Producer]] = {}
        self._most = most

    def decode(self, payload: bytes) -> Envelope:
        """Decode one log entry. Raises as :func:`decode_envelope` does."""
        if len(payload) > MAX_EVENT_BYTES:
            return decode_envelope(payload)  # which raises the error of its size
        try:
            six = _decode(payload)
        except UNREADABLE:
            return decode_envelope(payload)
        # Another header: a field comes twice, or the map has an unusual encoding.
        if payload[0] != _SIX:
            return decode_envelope(payload)
        met = self._met.get(bytes(six.producer))
        # The run was checked with the sender: another one is to be checked, too.
        if met is None or met[0] != six.run_id:
            return self._meet(payload, six.producer)
        return Envelope(
            run_id=six.run_id,
            epoch=six.epoch,
            producer=met[1],
            sequence=six.sequence,
            occurred_at=six.occurred_at,
            event=six.event,
        )

    def _meet(self, payload: bytes, sender: Raw) -> Envelope:
        envelope = decode_envelope(payload)
        if len(bytes(sender)) > _LONGEST:
            return envelope  # Fields of a later version must not fill the memory.
        # Cleared whole: a run has far fewer senders, and an order of use would cost each entry.
        if len(self._met) >= self._most:
            self._met.clear()
        self._met[bytes(sender)] = (envelope.run_id, envelope.producer)
        return envelope
