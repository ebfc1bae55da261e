"""What trainer and explorers of a collective group tell each other beside it, over a socket.

Each message is its length in four bytes, then MessagePack. Nothing is unpickled.
"""

from __future__ import annotations

import math
import select
import socket
import struct
import time
from contextlib import suppress
from typing import TypeAlias

import msgspec
from msgspec import Struct

from trinity_schemas.identity import Epoch, Rank, RunId, Step

_LENGTH = struct.Struct("!I")
_MOST = 1 << 16


class ChannelClosed(Exception):
    """The other end is gone, or talks nonsense."""


class _Message(Struct, frozen=True, kw_only=True, tag_field="type", tag=str.lower):
    """Base of all messages."""


class Hello(_Message, frozen=True):
    """An explorer's first word. The token shows that it may read the weights' server."""

    run_id: RunId
    token: str
    name: str
    gpu: str | None = None
    """Which one it has, where it has one and NCCL."""


class FormGroup(_Message, frozen=True, tag="call"):
    """The trainer makes a new group: leave the old one, and say that you are there."""

    generation: int


class Ack(_Message, frozen=True, tag="present"):
    """The explorer's answer to a call, and once more when it has taken its seat."""

    generation: int


class RankAssignment(_Message, frozen=True, tag="seat"):
    """The explorer's place in the new group, whose ranks meet at the store."""

    generation: int
    rank: Rank
    world: int
    backend: str
    store_port: int
    timeout: float


class Sending(_Message, frozen=True):
    """A version comes through the group."""

    generation: int
    number: int
    epoch: Epoch
    step: Step


class DeliveryReport(_Message, frozen=True, tag="received"):
    """What came of it at the explorer: whole, or why not."""

    generation: int
    number: int
    error: str | None = None


Message: TypeAlias = Hello | FormGroup | Ack | RankAssignment | Sending | DeliveryReport
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def readable(one: socket.socket, seconds: float | None) -> bool:
    """Whether there is something to read, or the end of it, within so long; None is for ever."""
    poll = select.poll()  # select() fails in processes of more than 1,024 files
    poll.register(one, select.POLLIN)
    return bool(poll.poll(None if seconds is None else max(0, math.ceil(seconds * 1000))))


class Channel:
    """Messages over one connected socket; for one thread, but for :meth:`close`."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._buffer = bytearray()
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    @property
    def peer(self) -> str:
        """The other end's address, for people."""
        try:
            return str(self._socket.getpeername()[0])
        except OSError:
            return "an unknown address"

    @property
    def own_address(self) -> str:
        """This end's, by which the other host reaches it. Raises ChannelClosed when it is gone."""
        try:
            return str(self._socket.getsockname()[0])
        except OSError as error:
            raise ChannelClosed(str(error)) from None

    def send(self, message: Message, seconds: float) -> None:
        """Send a message. Raises ChannelClosed, also when it takes longer than ``seconds``."""
        body = msgspec.msgpack.encode(message)
        try:
            self._socket.settimeout(seconds)
            self._socket.sendall(_LENGTH.pack(len(body)) + body)
        except OSError as error:
            raise ChannelClosed(str(error)) from None

    def receive(self, seconds: float | None) -> Message:
        """The next message.

        Raises:
            TimeoutError: when none came within ``seconds``; None waits for as long as it takes.
            ChannelClosed: when none will come.
        """
        until = None if seconds is None else time.monotonic() + seconds
        while (message := self._complete()) is None:
            left = None if until is None else max(0.0, until - time.monotonic())
            if not self._readable(left):
                raise TimeoutError("no message came")
            self._fill()
        return message

    def is_open(self) -> bool:
        """Whether the other end is there still, as far as this one was told."""
        try:
            while self._readable(0.0):
                self._fill()
        except ChannelClosed:
            return False
        return True

    def close(self) -> None:
        """End it; a receive in another thread ends too."""
        with suppress(OSError):  # it was closed at the other end
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _readable(self, seconds: float | None) -> bool:
        try:
            return readable(self._socket, seconds)
        except (OSError, ValueError) as error:
            raise ChannelClosed(str(error)) from None

    def _fill(self) -> None:
        try:
            data = self._socket.recv(_MOST)
        except OSError as error:
            raise ChannelClosed(str(error)) from None
        if not data or len(self._buffer) > _MOST:
            raise ChannelClosed("the other end closed the connection")
        self._buffer += data

    def _complete(self) -> Message | None:
        if len(self._buffer) < _LENGTH.size:
            return None
        [length] = _LENGTH.unpack_from(self._buffer)
        if length > _MOST:
            raise ChannelClosed(f"a message of {length} bytes was announced")
        end = _LENGTH.size + length
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[_LENGTH.size : end])
        del self._buffer[:end]
        try:
            return _decoder.decode(body)
        except msgspec.DecodeError as error:
            raise ChannelClosed(f"a message could not be read: {error}") from None
