"""Ownership of a run's folder: a mark in the folder identifies its log."""

from __future__ import annotations

import hashlib
import logging
import socket
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import anyio.to_thread
import msgspec
from msgspec import Struct

from ..checkpoints.layout import BELONGS_TO
from ..errors import FolderTaken
from ..log import ORIGIN, Entry, RedisEventLog, Stream, position
from ..system.open_folder import OpenFolder
from .continuation import common_part
from .format import ArchiveMissing, BadRecording
from .segments import Archive

logger = logging.getLogger(__name__)

# Bytes; a mark holds an identity, an address and the name of a host.
_LONGEST_MARK = 4096


class LogMark(Struct, frozen=True, kw_only=True):
    """Content of the mark that identifies the log of a run's folder."""

    log: str
    """Id and digest of the log's first entry, which only copies of the log share."""
    server: str | None = None
    """Address of the log's server, as the marking process reached it; None for an archive alone."""
    host: str | None = None
    """Host of the marking process."""

    def __str__(self) -> str:
        where = f"that of {self.server} (from {self.host})" if self.server else "one archived there"
        return f"{where}, begun {_time(self.log)} ({self.log})"


def identity_of(first: Entry) -> str:
    """Return the identity of a log, made from its first entry."""
    digest = hashlib.sha256(first.id.encode() + b" " + first.payload).hexdigest()
    return f"{first.id}.{digest[:16]}"


async def log_identity(log: RedisEventLog, archive: Archive) -> str | None:
    """Return the identity of a log; None as long as it has no entry.

    The reducer stores it on the server before it trims the first entry. For a log that was
    trimmed by an older version, the archive that the log continues gives the identity.
    """
    stored_identity = await log.identity()
    if stored_identity is not None:
        return stored_identity
    entries = await log.read(limit=1)
    # Read last: if it is None, the server had trimmed nothing at the first read.
    first_retained = await log.first_retained_id(Stream.EVENTS)
    if first_retained is None:
        return identity_of(entries[0]) if entries else None
    if (await common_part(archive, log, Stream.EVENTS)).last != ORIGIN:
        archived = archived_identity(archive)
        if archived is not None:
            return archived
    # The first entry is gone everywhere: the oldest that is left identifies the log.
    return identity_of(entries[0] if entries else Entry(first_retained, b""))


def archived_identity(archive: Archive) -> str | None:
    """Return the identity of an archive's log; None if the archive lacks the first entry."""
    with suppress(BadRecording, ArchiveMissing):
        first = archive.first(Stream.EVENTS)
        return None if first is None else identity_of(first)
    return None


class FolderOwner:
    """Owner of a run's folder: it marks the folder, and refuses a folder of another log.

    Args:
        folder: The run's folder.
        run_id: The run.
        adopt: True to take over, once, a folder that belongs to another log.
    """

    def __init__(self, folder: Path, run_id: str, *, adopt: bool = False) -> None:
        self._run_id = run_id
        self.archive = Archive(folder, run_id)
        """Archive in the folder, for reading."""
        self._adopt = adopt
        self._mark: LogMark | None = None

    def belongs(self, log: str, server: str) -> None:
        """Set the log that the folder should belong to."""
        self._mark = LogMark(log=log, server=server, host=socket.gethostname())

    def claim(self, run: OpenFolder) -> None:
        """Mark the folder if it has no mark. Raises FolderTaken if it belongs to another log."""
        own = self._mark
        if own is None:
            raise FolderTaken(run.path, self._run_id, "no log")
        try:
            self._claim(run, own)
        except FolderTaken as error:
            if not self._adopt:
                raise
            # The user has agreed to this one takeover: the next other log is refused.
            self._adopt = False
            run.write(BELONGS_TO, msgspec.json.encode(own))
            logger.warning("%s is taken over, as --adopt-folder asks: %s", run.path, error)

    def _claim(self, run: OpenFolder, own: LogMark) -> None:
        while (mark := read_mark(run, self._run_id)) is None:
            # A folder of an older version has no mark, but its archive may identify the log.
            archived = archived_identity(self.archive)
            if archived not in (None, own.log):
                raise folder_taken(run.path, self._run_id, LogMark(log=str(archived)), str(own))
            # Another process may be first: its mark is read and compared then.
            if run.write_new(BELONGS_TO, msgspec.json.encode(own)):
                return
        if mark.log != own.log:
            raise folder_taken(run.path, self._run_id, mark, str(own))


async def own_folder(log: RedisEventLog, folder: Path, server: str, *, adopt: bool = False) -> None:
    """Mark a run's folder as its log's, for the process that opens the run.

    The process calls this before it opens the run, so that it does not open the run in vain. It
    calls this again afterwards, because a new log has no first entry before.

    Args:
        log: The run's log.
        folder: The run's folder.
        server: Address of the log's server, for messages.
        adopt: True to take over a folder that belongs to another log.

    Raises:
        FolderTaken: if the folder belongs to another log.
    """
    owner = FolderOwner(folder, log.run_id, adopt=adopt)
    identity = await log_identity(log, owner.archive)
    if identity is not None:
        owner.belongs(identity, server)
        await anyio.to_thread.run_sync(_claim, owner, folder)
    elif not adopt:
        await anyio.to_thread.run_sync(_refuse_marked, folder, log.run_id, server)


def _claim(owner: FolderOwner, folder: Path) -> None:
    with OpenFolder.open_run(folder, create=True) as run:
        owner.claim(run)


def _refuse_marked(folder: Path, run_id: str, server: str) -> None:
    """Raise FolderTaken if the folder belongs to any log."""
    with suppress(FileNotFoundError), OpenFolder.open_run(folder) as run:
        if (mark := read_mark(run, run_id)) is not None:
            raise folder_taken(folder, run_id, mark, f"a new one of {server}")


def read_mark(run: OpenFolder, run_id: str) -> LogMark | None:
    """Return the log that a folder belongs to. Raises FolderTaken if the mark is unreadable."""
    data = run.read(BELONGS_TO, _LONGEST_MARK)
    if data is None and run.stat(BELONGS_TO) is None:
        return None
    try:
        mark = msgspec.json.decode(data or b"", type=LogMark)
        position(mark.log.partition(".")[0])
        # Messages show the mark, and a terminal carries out the control characters of any file.
        if not f"{mark.log}{mark.server}{mark.host}".isprintable():
            raise ValueError("the mark has unprintable characters")
    except (msgspec.DecodeError, ValueError, RecursionError):
        raise FolderTaken(run.path, run_id, "unreadable", BELONGS_TO) from None
    return mark


def folder_taken(folder: Path, run_id: str, mark: LogMark, own: str) -> FolderTaken:
    """Make the error for a folder that belongs to another log."""
    return FolderTaken(folder, run_id, "other log", str(mark), own)


def _time(identity: str) -> str:
    try:
        milliseconds = position(identity.partition(".")[0])[0]
        return f"{datetime.fromtimestamp(milliseconds / 1000, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (ValueError, OverflowError, OSError):
        return "at an unknown time"
