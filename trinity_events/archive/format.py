"""The file format: JSON lines, a header first, each entry with its exact bytes.

Beside the bytes, which alone count when a file is read, each line of an exported file shows the
event for people and for ``jq``.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any, Literal

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

LineStream = Literal["events", "announcements", "dead"]


class ArchiveMissing(TrinityError):
    """Part of the log is in files that were not found."""


class BadRecording(TrinityError):
    """A file that is not a recorded log, or not one that this version reads."""


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
def lines_written(path: Path, header: Header) -> Iterator[Callable[[Sequence[Line]], None]]:
    """Write a file bit by bit: whole at the end of the block, and durably, or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder, not a file")
    if path.exists() and not path.is_file():
        raise OSError(f"{path} is no file, and a file would take its place")
    path = path.resolve()  # of a link, what it leads to
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}-{os.getpid()}")
    encoder = msgspec.json.Encoder()
    count = 0
    # Its length is that of the longest header: how many entries follow is known at the end.
    room = len(encoder.encode(structs.replace(header, entries=_MOST_ENTRIES)))
    try:
        with temporary.open("wb") as file:
            file.write(b" " * room + b"\n")

            def write(lines: Sequence[Line]) -> None:
                nonlocal count
                file.write(encoder.encode_lines(lines))
                count += len(lines)

            yield write
            file.seek(0)
            file.write(encoder.encode(structs.replace(header, entries=count)))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
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
        first = file.readline()
    header = _header(path, first)
    return header, _lines(path, header)


def _opened(path: Path) -> Any:
    try:
        return path.open("rb")
    except OSError as error:
        raise BadRecording(f"{path} cannot be read: {error.strerror}") from None


def _header(path: Path, first: bytes) -> Header:
    try:
        raw = msgspec.json.decode(first, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError):
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
            except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
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
