"""Process of one environment: loads it by its name, and replies to one episode after the other.

Usage: python -m trinity_workers.sandbox.environments.child NAME FOLDER
"""

from __future__ import annotations

import asyncio
import inspect
import os
import queue
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from trinity_events.errors import TrinityError

from ...tasks.base import Message, Question
from ...tasks.errors import FunctionUnusable
from ...tasks.objects import load_object, refused_arguments
from ..processes.frames import open_frame_pipes, read_frame
from .messages import Raised, Ready, Replied, ReplyRequest, encoded

LONGEST_ERROR = 500
"""Characters of an error that are told."""

_SIGNATURE = "(question, messages)"
Replier = Callable[[Question, list[Message]], Any]


def main(arguments: list[str]) -> None:
    """Serve until the explorer closes the pipe."""
    name, folder = arguments
    requests, replies = open_frame_pipes()

    def send(message: Replied | Raised | Ready) -> None:
        replies.write(encoded(message))
        replies.flush()

    try:
        reply = load_environment(name, Path(folder))
    except BaseException as error:  # an import may end the interpreter, too
        send(Raised(_format_error(error)))
        return
    send(Ready())
    # In a thread of its own, so that this process ends with its explorer, whatever it does.
    received: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(requests, received), daemon=True).start()
    # Not anyio's portal, whose loop is in another thread than the file's import: see decision 50.
    with asyncio.Runner() as runner:
        while True:
            send(_replied(runner, reply, received.get()))


def load_environment(name: str, folder: Path) -> Replier:
    """Return the function of (question, messages) behind a name.

    The name is that of a function, or of an object or class with a method `reply`.
    """
    candidate = load_object(name, kind="environment", folder=folder)
    if isinstance(candidate, type):
        candidate = candidate()
    candidate = getattr(candidate, "reply", candidate)
    if not callable(candidate):
        raise FunctionUnusable("environment", name, "method", _SIGNATURE)
    if (fault := refused_arguments(candidate, 2)) is not None:
        raise FunctionUnusable("environment", name, "arguments", _SIGNATURE, fault)
    replier: Replier = candidate
    return replier


def _receive(requests: BinaryIO, received: queue.SimpleQueue[bytes]) -> None:
    while (payload := read_frame(requests)) is not None:
        received.put(payload)
    # At once: the user's code may hold the main thread for ever.
    os._exit(0)


def _replied(runner: asyncio.Runner, reply: Replier, payload: bytes) -> Replied | Raised:
    try:
        call = msgspec.msgpack.decode(payload, type=ReplyRequest)
        value = reply(call.question, call.messages)
        if inspect.isawaitable(value):
            value = runner.run(_awaited(value))
    except BaseException as error:  # such as a cancelled task, or an exit
        return Raised(_format_error(error))
    try:
        # Tried here: a value that cannot be sent is an error of the environment.
        encoded(Replied(value))
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError):
        return Raised(f"it returned a value of type {type(value).__name__}")
    return Replied(value)


async def _awaited(value: Any) -> Any:
    return await value


def _format_error(error: BaseException) -> str:
    text = " ".join(str(error).split())[:LONGEST_ERROR]
    if isinstance(error, TrinityError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


if __name__ == "__main__":
    main(sys.argv[1:])
