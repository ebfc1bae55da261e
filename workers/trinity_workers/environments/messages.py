"""Messages between an explorer and the process of an environment: MessagePack, with a length."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from ..tasks.base import Message, Question

LARGEST = 64 * 1024 * 1024
"""Bytes of a message; a larger one is refused."""
LENGTH_BYTES = 4
"""Bytes of the length before each message."""


class Asked(Struct, frozen=True):
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


def framed(message: Struct) -> bytes:
    """Return a message with its length before it."""
    payload = msgspec.msgpack.encode(message)
    return len(payload).to_bytes(LENGTH_BYTES, "big") + payload
