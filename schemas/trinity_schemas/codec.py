"""MessagePack on the wire, decoded with hard limits. Decoding never executes code."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items
from functools import lru_cache
from typing import Annotated, Any, TypeVar

import msgspec

from .envelope import Envelope, Sequence
from .errors import (
    ContractError,
    MessageTooLarge,
    MessageUndecodable,
    MessageUnencodable,
    StructuredError,
)
from .events import EVENT_TYPES, RewardErrorReported, event_tag
from .identity import Epoch, Name, Producer, RunId
from .manifest import CheckedEntries, EncodedManifest, TensorEntry, WeightManifest
from .rollouts import (
    NO_PROMPT,
    Attempts,
    Experience,
    ExperienceReference,
    Ordinal,
    RolloutRequest,
    Turn,
)

MAX_EVENT_BYTES = 4 << 20
"""Bytes of an envelope, a request or an experience; larger ones are refused."""
MAX_REPORT_BYTES = 256 << 10
"""Bytes of an explorer's report; the largest has a few stacks and the names of some processes."""
MAX_MANIFEST_BYTES = 64 << 20
"""Bytes of a weight manifest; larger ones are refused."""
_SHARED_ENTRIES = 64
"""Decoded lists of entries that are kept: one for each rank of a version."""


class Sender(msgspec.Struct, frozen=True, kw_only=True):
    """Sender of an envelope, which is decodable although the event is unknown."""

    run_id: RunId
    producer: Producer
    sequence: Sequence


class ExperienceSender(msgspec.Struct, frozen=True, kw_only=True):
    """Sender of an experience and its request, decodable although other fields are not."""

    run_id: RunId
    epoch: Epoch
    ordinal: Ordinal
    attempt: Attempts
    explorer: Name


class _Tag(msgspec.Struct, gc=False):
    type: str


class _Tagged(msgspec.Struct, gc=False):
    """Tag of an envelope's event; the decoder builds no other field."""

    event: _Tag


class UnknownEventType(ContractError):
    """Envelope of an event that this version does not know.

    Attributes:
        tag: Type of the event.
        sender: Its sender, if that much is readable.
    """

    tag: str
    sender: Sender | None = None
    text = "event type {tag!r} is not known to this version"


class ExperienceUnreadable(ContractError):
    """Bytes that are no experience.

    Attributes:
        reason: Error of the decoder.
        sender: Their sender, if that much is readable.
    """

    reason: str
    sender: ExperienceSender | None = None
    text = "{reason}"


# One of each: a decoder builds its table of fields once, and has no state between calls.
_TAGS = frozenset(event_tag(event) for event in EVENT_TYPES)
_encoder = msgspec.msgpack.Encoder()
_envelopes = msgspec.msgpack.Decoder(Envelope)
_tags = msgspec.msgpack.Decoder(_Tagged)
_senders = msgspec.msgpack.Decoder(Sender)
# The entries stay as bytes, so that versions with the same ones decode them once.
_manifests = msgspec.msgpack.Decoder(EncodedManifest)
_entries = msgspec.msgpack.Decoder(tuple[TensorEntry, ...])
_requests = msgspec.msgpack.Decoder(RolloutRequest)
_experiences = msgspec.msgpack.Decoder(Experience)
_references = msgspec.msgpack.Decoder(ExperienceReference)
# At least the prompt, and a turn of the policy.
_turns = msgspec.msgpack.Decoder(list[Annotated[list[Turn], msgspec.Meta(min_length=2)]])
_reward_errors = msgspec.msgpack.Decoder(RewardErrorReported)
_experience_senders = msgspec.msgpack.Decoder(ExperienceSender)
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Errors that decoders raise for bytes that they cannot decode."""
T = TypeVar("T")


def encode(message: msgspec.Struct) -> bytes:
    """Encode an envelope, a manifest, a request or an experience as MessagePack.

    The sender gets the error that each reader would get otherwise.

    Raises:
        ContractError: The message is above its limit of bytes, has text that is not UTF-8 (as
            names of files may be), or holds a tensor in place of a number.
    """
    # Of an envelope the event: its name is what an error is to name.
    payload = _encoded(message, type(getattr(message, "event", message)).__name__)
    # A manifest has an entry for each tensor, and lies in no log.
    manifest = isinstance(message, WeightManifest | EncodedManifest)
    _check_size(payload, MAX_MANIFEST_BYTES if manifest else MAX_EVENT_BYTES)
    return payload


def encode_entries(entries: Iterable[TensorEntry]) -> msgspec.Raw:
    """Encode the entries of an :class:`EncodedManifest`. Raises :class:`ContractError`."""
    return msgspec.Raw(_encoded(tuple(entries), "a list of tensors"))


def decode_envelope(payload: bytes) -> Envelope:
    """Decode one log entry. Unknown fields are ignored.

    The types bound the nesting; the interpreter's recursion limit bounds it in ignored fields.
    Ignored fields are never built.

    Raises:
        UnknownEventType: The event is of a later version; readers set it aside.
        ContractError: The bytes are no envelope.
    """
    try:
        _check_size(payload, MAX_EVENT_BYTES)
        return _envelopes.decode(payload)
    except msgspec.ValidationError as error:
        # After the failure alone: nearly all events are known, and a second decoding costs time.
        tag = _unknown_tag(payload)
        if tag is not None:
            # Cut, as the tag is any text of a sender, and ends in a sentence and a dead letter.
            raise UnknownEventType(tag[:64], _sender(payload)) from None
        raise MessageUndecodable("an event envelope", str(error)) from _contradiction(error)
    except UNREADABLE as error:
        raise MessageUndecodable("MessagePack", str(error)) from None


def decode_manifest(payload: bytes) -> WeightManifest:
    """Decode a weight manifest. Raises :class:`ContractError` if it contradicts itself.

    Manifests with the same entries share them as one object.
    """
    expected = "a weight manifest"
    decoded = _decode(_manifests, payload, MAX_MANIFEST_BYTES, expected)
    try:
        # Copied out of the message: the cache must not keep a whole payload alive.
        entries = _decoded_entries(bytes(decoded.tensors), based=decoded.base is not None)
        return WeightManifest(**(msgspec.structs.asdict(decoded) | {"tensors": entries}))
    except (*UNREADABLE, ValueError) as error:
        raise MessageUndecodable(expected, str(error)) from _contradiction(error)


# Identity of the entries is what tells a reader that its plan of copies still fits
# (weights/applying/install.py).
@lru_cache(maxsize=_SHARED_ENTRIES)
def _decoded_entries(payload: bytes, *, based: bool) -> CheckedEntries:
    return CheckedEntries(_entries.decode(payload), based=based)


def decode_request(payload: bytes) -> RolloutRequest:
    """Decode one rollout request. Raises :class:`ContractError`."""
    return _decode(_requests, payload, MAX_EVENT_BYTES, "a rollout request")


def decode_experience(payload: bytes) -> Experience:
    """Decode one sample of a group. Raises :class:`ExperienceUnreadable`."""
    return _decode_sample(_experiences, payload, "an experience")


def decode_reference(payload: bytes) -> ExperienceReference:
    """Decode a reference to one sample of a group. Raises :class:`ExperienceUnreadable`."""
    return _decode_sample(_references, payload, "a reference to an experience")


def encode_turns(group: Items[Experience]) -> bytes:
    """Encode the turns of all samples of a group as one payload, with a shared prompt once.

    Raises:
        ContractError: A turn holds a tensor in place of a number.
    """
    prompt = group[0].turns[0]
    # Only a prompt that is equal to the first one is left out.
    turns = [
        [NO_PROMPT, *sample.turns[1:]] if index and sample.turns[0] == prompt else sample.turns
        for index, sample in enumerate(group)
    ]
    return _encoded(turns, "turns")


def decode_turns(
    payload: bytes | memoryview, references: Items[ExperienceReference]
) -> list[Experience]:
    """Decode the turns of all samples of a group, and return the samples.

    Raises:
        ContractError: The payload is none, or its turns are not those of the references.
    """
    expected = f"the turns of {len(references)} samples"
    try:
        turns = _turns.decode(payload)
        # An explorer writes references and payload apart: one may be of another group.
        if len(turns) != len(references):
            raise MessageUndecodable(expected, f"they are those of {len(turns)}")
        first = turns[0][:1]
        return [
            reference.with_turns(
                [*first, *of_sample[1:]] if index and not of_sample[0].tokens else of_sample
            )
            for index, (reference, of_sample) in enumerate(zip(references, turns, strict=True))
        ]
    except (*UNREADABLE, ValueError) as error:
        raise MessageUndecodable(expected, str(error)) from _contradiction(error)


def decode_reward_error(payload: bytes) -> RewardErrorReported:
    """Decode the error of a reward with which a request failed. Raises :class:`ContractError`."""
    return _decode(_reward_errors, payload, MAX_REPORT_BYTES, "an error of a reward")


def to_json(message: msgspec.Struct) -> dict[str, Any]:
    """Return the message as plain dictionaries and lists, for ``--json`` and exports."""
    # A struct becomes a dictionary; the type of `to_builtins` cannot say so.
    built = msgspec.to_builtins(message)
    assert isinstance(built, dict)
    return built


def _encoded(message: object, name: str) -> bytes:
    try:
        return _encoder.encode(message)
    except UnicodeEncodeError as error:
        raise MessageUnencodable(name, "text", error.object) from None
    # A tensor of torch in the metrics of a step, for example.
    except TypeError as error:
        raise MessageUnencodable(name, "value", str(error)) from None


def _decode(decoder: msgspec.msgpack.Decoder[T], payload: bytes, limit: int, expected: str) -> T:
    try:
        _check_size(payload, limit)
        return decoder.decode(payload)
    except UNREADABLE as error:
        raise MessageUndecodable(expected, str(error)) from _contradiction(error)


def _decode_sample(decoder: msgspec.msgpack.Decoder[T], payload: bytes, expected: str) -> T:
    try:
        return _decode(decoder, payload, MAX_EVENT_BYTES, expected)
    except ContractError as error:
        sender = _experience_sender(payload)
        raise ExperienceUnreadable(str(error), sender) from _contradiction(error)


def _contradiction(error: BaseException) -> StructuredError | None:
    """Return the error that a message raised about itself while it was decoded, if it did."""
    # msgspec raises its own error from the one of ``__post_init__``.
    cause = error.__cause__ or error
    return cause if isinstance(cause, StructuredError) else None


def _check_size(payload: bytes, limit: int) -> None:
    # Before the decoder sees it, so that no allocation follows a sender's numbers.
    if len(payload) > limit:
        raise MessageTooLarge(len(payload), limit)


def _sender(payload: bytes) -> Sender | None:
    try:
        return _senders.decode(payload)
    except UNREADABLE:
        return None


def _experience_sender(payload: bytes) -> ExperienceSender | None:
    # The sample was refused for its size: nothing of it is decoded for a name either.
    if len(payload) > MAX_EVENT_BYTES:
        return None
    try:
        return _experience_senders.decode(payload)
    except UNREADABLE:
        return None


def _unknown_tag(payload: bytes) -> str | None:
    """Return the event's tag if it is unknown; None otherwise."""
    try:
        tag = _tags.decode(payload).event.type
    except UNREADABLE:
        return None
    return None if tag in _TAGS else tag
