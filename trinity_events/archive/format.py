"""The file format: JSON lines, a header first, each entry with its exact bytes.

Beside the bytes, which alone count when a file is read, each line of an exported file shows the
event for people and for ``jq``.
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Literal

import msgspec
from msgspec import Struct, structs

from trinity_schemas import ContractError, Envelope, check_run_id, decode_envelope

from ..errors import TrinityError
from ..log import ORIGIN, Entry, position

FORMAT = "trinity-events-log"
FORMAT_VERSION = 1
_A_PAGE = 500
"""Lines that are encoded at once."""
_MOST_ENTRIES = 10**15 - 1
"""Of a file: so many digits are kept free for their number."""

_LONGEST_HEADER = 1 << 16
"""Bytes: what has more is another file, which may have no line's end at all."""
_UNREADABLE = (msgspec.DecodeError, ValueError, RecursionError)

LineStream = Literal["events", "announcements", "dead"]


class ArchiveMissing(TrinityError):
    """Part of the log is in files that were not found."""


class BadRecording(TrinityError):
    """A file that is not a recorded log, or not one that this version reads."""


class NotWritten(OSError):
    """A file cannot be written: which it is, and why."""

    def __str__(self) -> str:
        return str(self.strerror)


class Header(Struct, frozen=True, kw_only=True):
    """First line of a file. ``position`` is how far the reducer had folded.

    A segment says ``after`` which entry it goes on, so that a missing one is noticed. ``entries``
    is how many follow, so that it is noticed when some of them do not; None in files of before it
    was told.
    """

    run_id: str
    format: str = FORMAT
    version: int = FORMAT_VERSION
    position: str = ORIGIN
    after: str = ORIGIN
    entries: int | None = None


class Line(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One entry. ``payload`` is base64 in the file; ``reason`` says why a dead letter is one."""

    stream: LineStream
    id: str
    payload: bytes
    reason: str | None = None
    envelope: Any = None

    @property
    def entry(self) -> Entry:
        """The entry with its bytes."""
        return Entry(self.id, self.payload)


def bare_line(stream: LineStream, entry: Entry) -> Line:
    """The line of an entry, of which only the bytes are kept."""
    return Line(stream=stream, id=entry.id, payload=entry.payload)


def line_of(stream: LineStream, entry: Entry, reason: str | None = None) -> Line:
    """The line of an entry."""
    shown: Envelope | None = None
    with suppress(ContractError):
        shown = decode_envelope(entry.payload)
    return Line(stream=stream, id=entry.id, payload=entry.payload, reason=reason, envelope=shown)


@contextmanager
def lines_written(
    path: Path, header: Header, *, alone: bool = False
) -> Iterator[Callable[[Sequence[Line]], None]]:
    """Write a file bit by bit: whole at the end of the block, and durably, or not at all.

    Args:
        path: The file.
        header: Its first line.
        alone: Whether to refuse while another writes the file. Then what one that was killed has
            left is overwritten by the next, where otherwise each leaves a file of its own.

    Raises:
        NotWritten: for what is wrong with the file, and not with what is to be in it.
    """
    encoder = msgspec.json.Encoder()
    count = 0
    # Its length is that of the longest header: how many entries follow is known at the end.
    room = len(encoder.encode(structs.replace(header, entries=_MOST_ENTRIES)))
    with ExitStack() as exits:
        with _writing(path):
            target = _target(path)
            temporary = target.with_name(f".{target.name}.{socket.gethostname()}-{os.getpid()}")
            if alone:
                temporary = exits.enter_context(_held(target.with_name(f".{target.name}.part")))
            file = temporary.open("wb")

        def write(lines: Sequence[Line]) -> None:
            nonlocal count
            with _writing(path):
                file.write(encoder.encode_lines(lines))
            count += len(lines)

        try:
            with _writing(path):
                file.write(b" " * room + b"\n")
            yield write
            with _writing(path):
                file.seek(0)
                file.write(encoder.encode(structs.replace(header, entries=count)))
                file.flush()
                os.fsync(file.fileno())
                file.close()
                temporary.replace(target)
                _sync_folder(target.parent)
        except BaseException:
            temporary.unlink(missing_ok=True)
            with suppress(OSError):  # of what it holds yet, which nobody wants
                file.close()
            raise


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        why = error.strerror or error
        raise NotWritten(error.errno, f"{path} cannot be written ({why})") from error


def _target(path: Path) -> Path:
    """Of a link, what it leads to; its folder is there. Raises OSError for what is no file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        raise IsADirectoryError("it is a folder, not a file")
    if path.exists() and not path.is_file():
        raise OSError("it is no file, and a file would take its place")
    return path.resolve()


@contextmanager
def _held(temporary: Path) -> Iterator[Path]:
    """A file that one at a time has. Raises BlockingIOError."""
    while True:
        with temporary.open("ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BlockingIOError("another process is writing it") from None
            if _is_at(file, temporary):
                yield temporary
                return


def _is_at(file: BinaryIO, path: Path) -> bool:
    """Whether the file still has that name: whoever had it until now may have renamed it."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _sync_folder(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_lines(path: Path, header: Header, lines: Iterable[Line]) -> None:
    """Write a file whole and durably, or not at all."""
    source = iter(lines)
    with lines_written(path, header) as write:
        while page := list(islice(source, _A_PAGE)):
            write(page)


def read_lines(path: Path) -> tuple[Header, Iterator[Line]]:
    """The header, and the entries as they are read.

    Raises:
        BadRecording: for anything that is not such a file, naming the line; from the iterator
            too.
    """
    with _opened(path) as file:
        first = file.readline(_LONGEST_HEADER)
    header = _header(path, first)
    return header, _lines(path, header)


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise BadRecording(f"{path} cannot be read: {error.strerror}") from None


def _header(path: Path, first: bytes) -> Header:
    try:
        raw = msgspec.json.decode(first, type=dict[str, Any])
    except _UNREADABLE:
        raw = {}
    if raw.get("format") != FORMAT:
        raise BadRecording(
            f"{path} is not a recorded log: its first line is not the header that "
            "trinity-events export writes"
        )
    if raw.get("version") != FORMAT_VERSION:
        raise BadRecording(
            f"{path} is of format version {raw.get('version')}, this trinity-events reads "
            f"version {FORMAT_VERSION}: use the trinity-events that wrote it, or a newer one"
        )
    try:
        header = msgspec.convert(raw, Header)
        check_run_id(header.run_id)
        position(header.position)
        position(header.after)
    except (msgspec.ValidationError, ValueError) as error:
        raise BadRecording(f"{path} line 1: {error}") from None
    return header


def _lines(path: Path, header: Header) -> Iterator[Line]:
    decoder = msgspec.json.Decoder(Line)
    last: dict[str, tuple[int, int]] = {}
    count = 0
    with _opened(path) as file:
        file.readline()
        for number, raw in enumerate(file, start=2):
            try:
                line = decoder.decode(raw)
                at = position(line.id)
            except _UNREADABLE as error:
                raise BadRecording(
                    f"{path} line {number} is not an entry ({error}): the file was cut off or "
                    "changed; export the run again"
                ) from None
            if at <= last.get(line.stream, (-1, -1)):
                raise BadRecording(f"{path} line {number}: entry {line.id} is out of order")
            last[line.stream] = at
            count += 1
            yield line
    _check_whole(path, header, count, last.get("events", position(ORIGIN)))


def _check_whole(path: Path, header: Header, entries: int, end: tuple[int, int]) -> None:
    """Raise BadRecording when a file was cut off at the end of a line."""
    if header.entries is None:
        told, found = f"events up to {header.position}", f"they end at {end[0]}-{end[1]}"
        whole = end >= position(header.position)
    else:
        told, found = f"{header.entries} entries", f"it has {entries}"
        whole = entries == header.entries
    if not whole:
        raise BadRecording(
            f"{path} is not whole: its first line tells of {told}, but {found}: it was cut off or "
            "changed; export the run again, or put a whole copy in its place"
        )
