"""Messages between trainer and explorers of a collective group, over a socket.

Each message is its length in four bytes, then MessagePack. No message is unpickled.
"""

from __future__ import annotations

import math
import select
import socket
import struct
import time
from collections.abc import Collection
from contextlib import suppress
from typing import ClassVar, Literal, TypeAlias

import msgspec
from msgspec import Struct

from trinity_schemas.identity import Epoch, Rank, RunId, Step

from ....errors import StructuredError

_LENGTH = struct.Struct("!I")  # network byte order
_MOST = 1 << 16  # bytes of a message: all are short, and a longer one is not of this protocol


class ChannelClosed(StructuredError):
    """The other end of a connection is gone, or sends invalid messages.

    Attributes:
        fault: What it did.
        reason: Error of the connection or of the decoder.
        size: Bytes of the message.
    """

    fault: Literal["connection", "end", "length", "message", "greeting", "token"]
    reason: str = ""
    size: int = 0
    texts: ClassVar = {
        "connection": "{reason}",
        "end": "the other end closed the connection",
        "length": "a message of {size} bytes was announced",
        "message": "a message could not be read: {reason}",
        "greeting": "its first message was not a greeting",
        "token": "it is of another run, or has not read this run's token",
    }


class _Message(Struct, frozen=True, kw_only=True, tag_field="type", tag=str.lower):
    """Base of all messages."""


class Hello(_Message, frozen=True):
    """First message of an explorer. The token shows that it can read the weights' server."""

    run_id: RunId
    token: str
    name: str
    gpu: str | None = None
    """Identity of its GPU, if it has one and NCCL."""


class FormGroup(_Message, frozen=True, tag="call"):
    """Trainer's request to form a new group: leave the old group and answer."""

    generation: int


class Ack(_Message, frozen=True, tag="present"):
    """Explorer's answer to :class:`FormGroup`; it sends another one when it has joined."""

    generation: int


class RankAssignment(_Message, frozen=True, tag="seat"):
    """Explorer's rank in the new group, and the store at which the ranks connect."""

    generation: int
    rank: Rank
    world: int
    backend: str
    store_port: int
    timeout: float


class Sending(_Message, frozen=True):
    """Trainer's notice that it sends a version through the group."""

    generation: int
    number: int
    epoch: Epoch
    step: Step


class DeliveryReport(_Message, frozen=True, tag="received"):
    """Explorer's report that the version is complete, or the reason why not."""

    generation: int
    number: int
    error: str | None = None


Message: TypeAlias = Hello | FormGroup | Ack | RankAssignment | Sending | DeliveryReport
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def readable(connection: socket.socket, seconds: float | None) -> bool:
    """Return True if the socket has data or is closed within ``seconds``; None waits forever."""
    poll = select.poll()  # select() fails in processes with more than 1,024 open files
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(None if seconds is None else max(0, math.ceil(seconds * 1000))))


def readable_channels(channels: Collection[Channel], seconds: float) -> list[Channel]:
    """Return the channels that have data or are closed, as soon as any has, within ``seconds``."""
    poll = select.poll()
    by_descriptor = {channel.descriptor: channel for channel in channels}
    for descriptor in by_descriptor:
        poll.register(descriptor, select.POLLIN)
    ready = poll.poll(max(0, math.ceil(seconds * 1000)))
    return [by_descriptor[descriptor] for descriptor, _ in ready]


class Channel:
    """Messages over one connected socket; only :meth:`close` may be called by other threads."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._buffer = bytearray()
        # Each short message is waited for: Nagle's algorithm would hold it back.
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A host that lost its power closes no connection.
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    @property
    def peer(self) -> str:
        """Return the peer's address, for log lines."""
        try:
            return str(self._socket.getpeername()[0])
        except OSError:
            return "an unknown address"

    @property
    def descriptor(self) -> int:
        """Return the file descriptor of the connection."""
        return self._socket.fileno()

    @property
    def own_address(self) -> str:
        """Return the local address for the peer. Raises ChannelClosed if the peer is gone."""
        try:
            return str(self._socket.getsockname()[0])
        except OSError as error:
            raise ChannelClosed("connection", str(error)) from None

    def send(self, message: Message, seconds: float) -> None:
        """Send a message. Raises ChannelClosed, also if it takes longer than ``seconds``."""
        body = msgspec.msgpack.encode(message)
        try:
            self._socket.settimeout(seconds)
            self._socket.sendall(_LENGTH.pack(len(body)) + body)
        except OSError as error:
            raise ChannelClosed("connection", str(error)) from None

    def receive(self, seconds: float | None) -> Message:
        """Return the next message.

        Raises:
            TimeoutError: if no message came within ``seconds``; None waits without a limit.
            ChannelClosed: if no message will come.
        """
        until = None if seconds is None else time.monotonic() + seconds
        while (message := self._complete()) is None:
            remaining = None if until is None else max(0.0, until - time.monotonic())
            if not self._readable(remaining):
                raise TimeoutError("no message came")
            self._fill()
        return message

    def is_open(self) -> bool:
        """Return True if no end of the connection was seen yet."""
        try:
            while self._readable(0.0):
                self._fill()
        except ChannelClosed:
            return False
        return True

    def close(self) -> None:
        """Close the connection; a receive in another thread ends too."""
        with suppress(OSError):  # the peer may have closed it
            # close() alone does not wake a thread that polls the descriptor.
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _readable(self, seconds: float | None) -> bool:
        try:
            return readable(self._socket, seconds)
        except (OSError, ValueError) as error:
            raise ChannelClosed("connection", str(error)) from None

    def _fill(self) -> None:
        try:
            data = self._socket.recv(_MOST)
        except OSError as error:
            raise ChannelClosed("connection", str(error)) from None
        if not data or len(self._buffer) > _MOST:
            raise ChannelClosed("end")
        self._buffer += data

    def _complete(self) -> Message | None:
        if len(self._buffer) < _LENGTH.size:
            return None
        [length] = _LENGTH.unpack_from(self._buffer)
        # Checked before the body arrives: the peer chooses the number.
        if length > _MOST:
            raise ChannelClosed("length", size=length)
        end = _LENGTH.size + length
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[_LENGTH.size : end])
        del self._buffer[:end]
        try:
            return _decoder.decode(body)
        except msgspec.DecodeError as error:
            raise ChannelClosed("message", str(error)) from None
