"""A proxy between clients and a real server that fails on command, at an exact place.

It passes one command and its reply at a time, so that "before" and "after" a command are places
and not moments: before, the server has not seen it; after, the server has answered, and the
client does not know.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Literal
from urllib.parse import urlsplit

from tests.support.waits import PATIENCE

Command = Sequence[bytes]
Matches = Callable[[Command], bool]
Place = Literal["before", "within", "after"]

_AT_ONCE = 1 << 16


def command(name: str, holding: str = "") -> Matches:
    """Commands of a name, in one of whose arguments a text is found."""
    verb, text = name.upper().encode(), holding.encode()
    return lambda given: given[0].upper() == verb and any(text in argument for argument in given)


def script(key: str) -> Matches:
    """Scripts that are given a key that ends so, such as ``:position`` for the commit."""
    ending = key.encode()
    return lambda given: (
        given[0].upper() in (b"EVALSHA", b"EVAL")
        and any(argument.endswith(ending) for argument in given)
    )


class Fault:
    """What happens to the nth command that matches. It strikes once."""

    def __init__(
        self, place: Place, matches: Matches, nth: int, act: Callable[[Command], None] | None
    ) -> None:
        self.place = place
        self.struck = threading.Event()
        self._matches = matches
        self._remaining = nth
        self._act = act

    def meets(self, given: Command) -> bool:
        """Whether this is the command; called once for each, in order."""
        if self._remaining > 0 and self._matches(given):
            self._remaining -= 1
            return self._remaining == 0
        return False

    def strike(self, given: Command) -> None:
        """Let it happen. Without an act of its own, the connection is cut."""
        try:
            if self._act is None:
                raise _Cut
            self._act(given)
        finally:
            self.struck.set()


class Proxy:
    """Listens on a unix socket or a port of its own and passes on to ``target``, a server's URL.

    Args:
        target: ``unix:///PATH`` or ``redis://HOST:PORT``.
        path: The unix socket to listen on; without it a free port of this host.
    """

    def __init__(self, target: str, path: Path | None = None) -> None:
        self._target = urlsplit(target)
        self._path = path
        self._faults: list[Fault] = []
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._closing = False
        self._delay = 0.0
        self._refusing = False
        self._answers = threading.Event()
        self._answers.set()

    def __enter__(self) -> Proxy:
        if self._path is None:
            self._listener = socket.create_server(("127.0.0.1", 0))
            self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}"
        else:
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind(str(self._path))
            self._listener.listen(64)
            self.url = f"unix://{self._path}"
        self._start(self._accept)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._closing = True
        self._answers.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._cut_all()
        for thread in self._threads:
            thread.join(PATIENCE)
        self._listener.close()

    # --- what can go wrong -----------------------------------------------------------------

    def cut(self, place: Place, matches: Matches, nth: int = 1) -> Fault:
        """Cut the connection of the nth command that matches, at a place of it."""
        return self._add(Fault(place, matches, nth, None))

    def at(
        self, place: Place, matches: Matches, act: Callable[[Command], None], nth: int = 1
    ) -> Fault:
        """Do something at a place of a command, while command or reply are held up."""
        return self._add(Fault(place, matches, nth, act))

    def delay(self, seconds: float) -> None:
        """Hold up every reply: a slow server."""
        self._delay = seconds

    def refuse(self) -> None:
        """Cut all connections and close new ones at once: no server."""
        self._refusing = True
        self._cut_all()

    def lead_to(self, target: str) -> None:
        """Lead new connections to another server, as an address does whose server was changed."""
        self._target = urlsplit(target)

    def swallow(self) -> None:
        """Accept connections and commands, and answer nothing: a server that hangs."""
        self._answers.clear()

    def heal(self) -> None:
        """Serve again. A connection whose command was swallowed is cut."""
        self._delay, self._refusing = 0.0, False
        self._answers.set()

    # --- passing on ------------------------------------------------------------------------

    def _add(self, fault: Fault) -> Fault:
        with self._lock:
            self._faults.append(fault)
        return fault

    def _start(self, target: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _cut_all(self) -> None:
        with self._lock:
            for connection in self._open:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        self._listener.settimeout(0.2)
        while not self._closing:
            try:
                client, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            self._start(self._serve, client)

    def _serve(self, client: socket.socket) -> None:
        with ExitStack() as exits, suppress(OSError, _Cut):
            exits.enter_context(client)
            if self._refusing:
                return
            server = exits.enter_context(self._dial())
            with self._lock:
                self._open |= {client, server}
                exits.callback(self._forget, client, server)
            if self._closing:
                return
            pair = _Pair(client, server)
            while True:
                self._pass_on(pair, *pair.command())

    def _met(self, given: Command, place: Place) -> list[Fault]:
        with self._lock:
            return [fault for fault in self._faults if fault.place == place and fault.meets(given)]

    def _forget(self, *sockets: socket.socket) -> None:
        with self._lock:
            self._open -= set(sockets)

    def _dial(self) -> socket.socket:
        if self._target.scheme == "unix":
            server = socket.socket(socket.AF_UNIX)
            try:
                server.connect(self._target.path)
            except OSError:
                server.close()
                raise
            return server
        assert self._target.hostname is not None
        return socket.create_connection((self._target.hostname, self._target.port or 6379), 5)

    def _pass_on(self, pair: _Pair, raw: bytes, given: Command) -> None:
        if not self._answers.is_set():
            self._answers.wait()
            raise _Cut
        for fault in self._met(given, "before"):
            fault.strike(given)
            pair.check()
        for fault in self._met(given, "within"):
            pair.server.sendall(raw[: len(raw) // 2])
            fault.strike(given)
        pair.server.sendall(raw)
        reply = pair.reply()
        if not reply.startswith(b"-"):  # refused: nothing came after it
            for fault in self._met(given, "after"):
                fault.strike(given)
        if self._delay:
            time.sleep(self._delay)
        pair.client.sendall(reply)


class _Cut(Exception):
    """The connection ends here."""


class _Pair:
    """A client's connection and the one to the server that is behind it."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.client = client
        self.server = server
        self._from_client = b""
        self._from_server = b""

    def command(self) -> tuple[bytes, Command]:
        """The next command, as bytes and as words."""
        while (end := _end(self._from_client)) is None:
            self._receive()
        raw, self._from_client = self._from_client[:end], self._from_client[end:]
        return raw, _words(raw)

    def reply(self) -> bytes:
        """The next reply."""
        while (end := _end(self._from_server)) is None:
            self._receive()
        raw, self._from_server = self._from_server[:end], self._from_server[end:]
        return raw

    def check(self) -> None:
        """Raise _Cut when one of the two is gone."""
        while self._receive(seconds=0.0):
            pass

    def _receive(self, seconds: float | None = None) -> bool:
        # Both sides: a client that goes away while it is blocked is to be gone to the server too.
        readable, _, _ = select.select([self.client, self.server], [], [], seconds)
        for source in readable:
            data = source.recv(_AT_ONCE)
            if not data:
                raise _Cut
            if source is self.client:
                self._from_client += data
            else:
                self._from_server += data
        return bool(readable)


def _end(data: bytes, at: int = 0) -> int | None:
    """Where the RESP value that begins at ``at`` ends; None when it is not all there yet."""
    line = data.find(b"\r\n", at)
    if line < 0:
        return None
    kind, end = data[at : at + 1], line + 2
    if kind == b"$":
        size = int(data[at + 1 : line])
        end += size + 2 if size >= 0 else 0
        return end if end <= len(data) else None
    if kind == b"*":
        for _ in range(int(data[at + 1 : line])):
            element_end = _end(data, end)
            if element_end is None:
                return None
            end = element_end
    return end


def _words(raw: bytes) -> list[bytes]:
    """The words of a command, an array of bulk strings."""
    words, at = [], raw.index(b"\r\n") + 2
    while at < len(raw):
        line = raw.index(b"\r\n", at)
        begin, size = line + 2, int(raw[at + 1 : line])
        words.append(raw[begin : begin + size])
        at = begin + size + 2
    return words
