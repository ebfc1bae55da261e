"""Embedded Redis-compatible server, shared by all commands of one home folder."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from enum import Enum, auto
from pathlib import Path
from typing import IO
from urllib.parse import quote

import redis
from msgspec import Struct

from ..errors import EmbeddedServerUnusable, ServerUnreachable
from ..log.redis.error_replies import is_reply
from ..system.file_locks import LOCK_DEADLINE, LockHeld, lock
from .binary import choose_binary
from .clients import probe
from .data_format import read_format
from .private_files import UMASK, make_private, open_private
from .reaper import leave_no_folder, unused
from .start_failure import explain_failure

logger = logging.getLogger(__name__)

PID_FILE = "redis.pid"
_LOG_READ = 1 << 20
"""Bytes of a server's log that are read for the reason of a failed start."""
_LONGEST_SOCKET_PATH = 100  # the kernel takes 107 bytes
# Isolated and without site: it starts fast, and no module of the user can break it.
_REAPER = (sys.executable, "-I", "-S", str(Path(__file__).with_name("reaper.py")))


def trinity_home() -> Path:
    """Return the folder of the embedded server and the demo: ``TRINITY_HOME``, or in $HOME."""
    configured = os.environ.get("TRINITY_HOME")
    return Path(configured or "~/.trinity-events").expanduser().resolve()


def _fits(path: Path) -> bool:
    return len(os.fsencode(path)) <= _LONGEST_SOCKET_PATH


class _SocketState(Enum):
    """State of a server as seen on its socket."""

    ABSENT = auto()
    LOADING = auto()
    THERE = auto()


class ServerTimeouts(Struct, frozen=True, kw_only=True):
    """Deadlines of an embedded server, in seconds.

    Attributes:
        start: Time in which a server answers, once it has read its data; and in which it ends.
        free: Time to wait for the end of a server that does not answer any more.
        lock: Time to wait for another process that starts or stops the server.
    """

    start: float = 20.0
    free: float = 10.0
    lock: float = LOCK_DEADLINE


class EmbeddedServer:
    """Embedded server of one home folder.

    It runs detached. Every user process holds a shared lock on ``users.lock`` while it uses the
    server, and the last one stops it. The kernel releases the lock of a killed process. If that
    was the last one, a small process beside the server (``reaper.py``) stops it. Processes start
    and stop the server under ``start.lock``, so none attaches to a server that is ending.

    The server itself holds ``server.lock`` while it runs. So no second server is started on its
    files, even if its socket cannot be found.

    Args:
        home: The folder.
        name: Subfolder of the home, one for each of its servers.
        durable: True if it keeps an append-only file.
        timeouts: Its deadlines.
    """

    def __init__(
        self,
        home: Path,
        name: str = "redis",
        *,
        durable: bool = True,
        timeouts: ServerTimeouts = ServerTimeouts(),
    ) -> None:
        self.home = home
        self.data = home / name
        self._durable = durable
        self._timeouts = timeouts

    @property
    def socket(self) -> Path:
        """Path of its socket; in a temporary folder if the home's path is too long for a socket.

        Processes may have different temporary folders: that of the server's starter counts.
        """
        path = self.data / "redis.sock"
        if _fits(path):
            return path
        try:
            return self._elsewhere.readlink()
        except OSError:
            return self._temporary

    @property
    def _elsewhere(self) -> Path:
        """Link in the home to a socket outside it."""
        return self.data / "redis.sock.elsewhere"

    @property
    def _temporary(self) -> Path:
        # One folder for each home, at a short path that all users of the home compute alike.
        name = hashlib.sha256(os.fsencode(self.data)).hexdigest()[:16]
        below = Path(f"trinity-events-{os.getuid()}-{name}", "redis.sock")
        path = Path(tempfile.gettempdir()) / below
        return path if _fits(path) else Path("/tmp") / below  # noqa: S108

    @property
    def url(self) -> str:
        """URL of its socket."""
        return f"unix://{quote(str(self.socket))}"

    @contextmanager
    def attached(self) -> Iterator[str]:
        """Start the server unless it runs, and use it; yield its URL."""
        try:
            make_private(self.data)
            # Opened for reading too: NFS grants no shared lock on a write-only file.
            users = open_private(self.data / "users.lock")
        except OSError as error:
            raise EmbeddedServerUnusable(
                str(self.home), error.strerror or str(error), fault="home"
            ) from None
        with users:
            with self._deciding():
                # Under the start lock: else the last user could stop the server after the look.
                self._lock(users, fcntl.LOCK_SH)
                if not self._answers():
                    self._start()
            try:
                yield self.url
            finally:
                with self._deciding_at_the_end() as decides:
                    # It tries to make the own lock exclusive, which succeeds for the last user
                    # alone.
                    if decides and unused(users):
                        self._stop()

    @contextmanager
    def listening(self, port: int) -> Iterator[str]:
        """Make the attached server listen on a loopback port too; yield the URL.

        A server has one port at most. Processes that ask for the same port share it, and the last
        of them closes it. Other processes may use the server further, without the port.
        """
        with open_private(self.data / "port.lock") as users:
            with self._deciding(), probe(self.socket) as client:
                if unused(users):
                    self._listen(client, port)
                elif (there := int(client.config_get("port")["port"])) != port:
                    raise EmbeddedServerUnusable(str(there), fault="other port", folder=self.home)
                self._lock(users, fcntl.LOCK_SH)
            try:
                yield f"redis://127.0.0.1:{port}"
            finally:
                with (
                    self._deciding_at_the_end() as decides,
                    suppress(redis.RedisError),
                    probe(self.socket) as client,
                ):
                    if decides and unused(users):
                        client.config_set("port", 0)

    @staticmethod
    def _listen(client: redis.Redis, port: int) -> None:
        # Before the port: it must never listen on another address, even for a moment.
        client.config_set("bind", "127.0.0.1")
        try:
            client.config_set("port", port)
        except redis.ResponseError as error:
            raise EmbeddedServerUnusable(str(port), str(error), fault="port") from None

    @contextmanager
    def _deciding(self) -> Iterator[None]:
        with open_private(self.data / "start.lock") as deciding:
            self._lock(deciding, fcntl.LOCK_EX)
            yield

    @contextmanager
    def _deciding_at_the_end(self) -> Iterator[bool]:
        """Take the start lock as :meth:`_deciding`; yield False if it is not free in time.

        Then the reaper stops the server, once it has the lock.
        """
        with ExitStack() as exits:
            try:
                # A deadline here would otherwise replace the error of the caller's block.
                exits.enter_context(self._deciding())
            except ServerUnreachable as error:
                logger.warning("the embedded server is left to its reaper: %s", error)
                yield False
                return
            yield True

    def _lock(self, file: IO[str], how: int) -> None:
        """Take a lock within its deadline. Raises ServerUnreachable, which names the holder."""
        try:
            lock(file.fileno(), Path(file.name), how, self._timeouts.lock)
        except LockHeld as error:
            raise EmbeddedServerUnusable(file.name, str(error), fault="lock") from error

    def _answers(self) -> bool:
        """Return True if a server listens, also if it answers an error or nothing.

        A second server on its files would destroy them.
        """
        return self._state() is not _SocketState.ABSENT

    def _state(self) -> _SocketState:
        try:
            with probe(self.socket) as client:
                client.ping()
        except redis.BusyLoadingError:
            return _SocketState.LOADING
        # Counted as there: a second server would write to the same files.
        except redis.TimeoutError:
            return _SocketState.THERE  # slow
        except (redis.RedisError, OSError) as error:
            return _SocketState.THERE if is_reply(error) else _SocketState.ABSENT
        return _SocketState.THERE

    def _start(self) -> None:
        """Start the server, unless it runs and was only slow to answer."""
        with open_private(self.data / "server.lock") as lives:
            if not self._is_free(lives):
                return
            self._place_socket()
            self._launch(lives)
        self._start_reaper()

    def _is_free(self, lives: IO[str]) -> bool:
        """Wait until no server has the files, or their server answers; return True if none has.

        An ending server keeps the files a little longer than its socket.
        """
        give_up = time.monotonic() + self._timeouts.free
        while not unused(lives):
            if self._answers():
                return False
            if time.monotonic() > give_up:
                raise EmbeddedServerUnusable(
                    str(self.socket), fault="silent", process=self._process(), folder=self.data
                )
            time.sleep(0.02)
        return True

    def _process(self) -> int | None:
        """Return the process of the server, if its file has it."""
        try:
            return int((self.data / PID_FILE).read_text())
        except (OSError, ValueError):
            return None

    def _place_socket(self) -> None:
        """Make a socket folder that other users cannot write to, and link it in the home.

        It needs the start lock, since a process that stops the server removes the folder.
        """
        try:
            self._make_place()
        except OSError as error:
            raise EmbeddedServerUnusable(
                str(self.socket), error.strerror or str(error), fault="socket"
            ) from None

    def _make_place(self) -> None:
        if self.socket.parent != self.data:
            # It may point to the temporary folder of an earlier starter.
            self._elsewhere.unlink(missing_ok=True)
            folder = self._temporary.parent
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = folder.lstat()
            # Anyone may make a folder in /tmp first, and would own the socket.
            if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
                raise EmbeddedServerUnusable(str(folder), fault="shared")
            self._elsewhere.symlink_to(self._temporary)
        # A killed server leaves its socket, on which the next one cannot bind.
        self.socket.unlink(missing_ok=True)

    def _launch(self, lives: IO[str]) -> None:
        binary = choose_binary(read_format(self.data) if self._durable else None)
        logged = self._log_size()
        command = [
            str(binary.path),
            # No network: the permissions of the socket are its password.
            *("--port", "0"),
            *("--unixsocket", str(self.socket), "--unixsocketperm", "700"),
            *("--dir", str(self.data), "--appendfsync", "everysec"),
            *("--appendonly", "yes" if self._durable else "no"),
            # The append-only file has everything; an eviction would lose entries of the log.
            *("--save", "", "--maxmemory-policy", "noeviction"),
            *("--logfile", str(self._log), "--daemonize", "yes"),
            *("--pidfile", str(self.data / PID_FILE)),
        ]
        # The server daemonizes: it outlives this process, which has no child to reap. It inherits
        # the lock, which the kernel releases when the server ends.
        started = subprocess.run(  # noqa: S603
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            pass_fds=(lives.fileno(),),
            umask=UMASK,
        )
        lives.close()  # so that the server alone holds it
        if started.returncode != 0 or not self._comes_up():
            log_text = self._logged_since(logged)
            reason = explain_failure(binary, self.data, log_text)
            raise EmbeddedServerUnusable(str(binary.path), reason, fault="start", folder=self.data)

    def _comes_up(self) -> bool:
        """Wait until the server has read its data; return False if it ends or does not answer."""
        give_up = time.monotonic() + self._timeouts.start
        while (state := self._state()) is not _SocketState.THERE:
            # It makes progress: a large file may take longer than the deadline of a start.
            if state is _SocketState.LOADING:
                give_up = time.monotonic() + self._timeouts.start
            # Its lock says at once that it ended, without a wait for the deadline.
            if self._has_ended() or time.monotonic() > give_up:
                return False
            time.sleep(0.02)
        return True

    def _has_ended(self) -> bool:
        """Return True if no server holds the server lock."""
        with open_private(self.data / "server.lock") as lives:
            return unused(lives)

    @property
    def _log(self) -> Path:
        return self.data / "redis.log"

    def _log_size(self) -> int:
        try:
            return self._log.stat().st_size
        except OSError:
            return 0

    def _logged_since(self, size: int) -> str:
        """Return the server's log after an offset; empty if it cannot be read."""
        try:
            with self._log.open("rb") as log:
                log.seek(size)
                return log.read(_LOG_READ).decode(errors="replace")
        except OSError:
            return ""

    def _start_reaper(self) -> None:
        """Start the reaper of the server; the server works without one, too."""
        # A server without a reaper works: only a killed last user would leave it running.
        with suppress(redis.RedisError, OSError), probe(self.socket) as client:
            server = client.info("server")["process_id"]
            subprocess.run(  # noqa: S603
                [*_REAPER, str(self.data), str(self.socket), str(server)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                check=False,
            )

    def _stop(self) -> None:
        # A server that ends closes the connection, also before it answers.
        with suppress(redis.RedisError, OSError), probe(self.socket) as client:
            client.shutdown(nosave=True)
        give_up = time.monotonic() + self._timeouts.start
        while self._answers() and time.monotonic() < give_up:
            time.sleep(0.02)
        leave_no_folder(self.data, self.socket)
