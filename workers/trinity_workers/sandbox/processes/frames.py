"""Frames on the pipes to a process of a user's code: a length, then as many bytes."""

from __future__ import annotations

import os
import sys
from typing import BinaryIO

from trinity_events.system.error_text import shorten

from .stacks import enable_stack_dumps

LENGTH_BYTES = 4
"""Bytes of the length before each payload."""
LARGEST = 64 * 1024 * 1024
"""Bytes of a payload; the run refuses a larger one."""

_LONGEST_SHOWN = 80
"""Characters of a value that an error shows."""


def framed(payload: bytes) -> bytes:
    """Return a payload with its length before it. Raises OverflowError above 4 GiB."""
    return len(payload).to_bytes(LENGTH_BYTES, "big") + payload


def read_frame(stream: BinaryIO) -> bytes | None:
    """Return the next payload; None at the end of the stream."""
    head = stream.read(LENGTH_BYTES)
    if len(head) < LENGTH_BYTES:
        return None
    return stream.read(int.from_bytes(head, "big"))


def open_frame_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Take standard input and output for frames, in the process of a user's code.

    What the code prints goes to standard error, so it never mixes with frames. What it reads is at
    its end. From now on the process writes its stacks when its parent asks for them.
    """
    enable_stack_dumps()
    # Copies first: 0 and 1 become other files, which the user's code may use.
    received, sent = os.dup(0), os.dup(1)
    os.dup2(2, 1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    # By lines: what is buffered in a process that is killed is lost.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    return os.fdopen(received, "rb"), os.fdopen(sent, "wb")


def format_value(value: object) -> str:
    """Return a value in one short line, for an error."""
    return shorten(" ".join(repr(value).split()), _LONGEST_SHOWN)
