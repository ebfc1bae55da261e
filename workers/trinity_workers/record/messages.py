"""Messages between a recorder and its writer: msgpack, each after its length in eight bytes."""

from __future__ import annotations

import struct
from typing import BinaryIO, TypeVar

import msgspec
from msgspec import Struct

T = TypeVar("T")
# Eight bytes, since the samples of a step may have more than 4 GiB.
_LENGTH = struct.Struct("<Q")


class WriterSettings(Struct, frozen=True, kw_only=True):
    """First message to the writer."""

    run_id: str
    epoch: int
    resumed_step: int
    folder: str
    """Folder of the record."""
    model_folder: str
    """Hugging Face folder with the tokenizer."""
    rank: int | None
    """None for discarded answers."""
    ranks: int
    max_bytes: int
    """Bytes of the files of this writer."""
    max_steps: int
    redact: str | None = None


class DiscardedRows(Struct, frozen=True, kw_only=True):
    """Answer that no step trained on."""

    fate: str
    samples: list[bytes]
    """Encoded experiences, or references to the samples of the payload."""
    payload: bytes | None = None
    """Payload of the turns; None if the samples have them."""


class StepRows(Struct, frozen=True, kw_only=True):
    """Samples of a step."""

    step: int
    experiences: list[bytes]
    """Encoded experiences, with their prompts."""
    width: int = 0
    """Response columns of the arrays."""
    advantages: bytes | None = None
    """[samples, width] float32; None if they are not known."""
    logprobs: bytes | None = None
    """[samples, width] float32, of the trainer before the step's update; None if not known."""
    discarded: list[DiscardedRows] = []
    """Answers that no step trained on, in the place of the experiences."""


class Written(Struct, frozen=True, kw_only=True):
    """Answer of the writer to each message."""

    samples: int = 0
    removed: tuple[int, ...] = ()
    """Steps that were removed, as the record is full."""
    error: str = ""
    """Sentence about an error, after which the writer ends."""


def write_message(file: BinaryIO, message: Struct) -> None:
    """Write a message and flush it."""
    payload = msgspec.msgpack.encode(message)
    file.write(_LENGTH.pack(len(payload)))
    file.write(payload)
    file.flush()


def read_message(file: BinaryIO, kind: type[T]) -> T | None:
    """Return the next message; None at the end of the file, also in the middle of a message."""
    header = file.read(_LENGTH.size)
    if len(header) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(header)
    # Trusted, as the pipe's other end is this process's own child or parent.
    payload = file.read(length)
    # Its sender was killed while it wrote.
    if len(payload) < length:
        return None
    return msgspec.msgpack.decode(payload, type=kind)
