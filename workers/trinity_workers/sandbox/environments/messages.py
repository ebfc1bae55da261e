"""Messages between an explorer and the process of an environment: frames of MessagePack."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from ...tasks.base import Message, Question
from ..processes.frames import framed


class ReplyRequest(Struct, frozen=True):
    """Question, and the messages of an episode whose last one is the policy's."""

    question: Question
    messages: list[Message]


class Replied(Struct, frozen=True, tag="replied"):
    """Value that the environment returned."""

    value: Any


class Raised(Struct, frozen=True, tag="raised"):
    """Error that the environment raised, or that kept it from being loaded."""

    error: str


class Ready(Struct, frozen=True, tag="ready"):
    """The environment is loaded."""


Reply = Replied | Raised | Ready


_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def encoded(message: Struct) -> bytes:
    """Return the frame of a message."""
    return framed(msgspec.msgpack.encode(message))


def decoded(payload: bytes) -> Reply:
    """Return the reply of a payload. Raises msgspec.DecodeError if it is none."""
    return _replies.decode(payload)
