"""The file format: JSON lines, a header first, each entry with its exact bytes.

Beside the bytes, which alone count when a file is read, each line of an exported file shows the
event for people and for ``jq``.
"""

from __future__ import annotations

import hashlib
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
from ..open_folder import OpenFolder, Part

FORMAT = "trinity-events-log"
FORMAT_VERSION = 1
_A_PAGE = 500
"""Lines that are encoded at once."""
_MOST_ENTRIES = 10**15 - 1
"""Of a file: so many digits are kept free for their number."""

_DIGEST = "sha256:"
_NO_DIGEST = _DIGEST + "0" * 64
"""In the place of the digest while that is taken: it is of the first line as well."""

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
    is how many follow, so that it is noticed when some of them do not. ``digest`` is of the whole
    file, so that a changed byte is noticed. Both are None in files of before they were told.
    """

    run_id: str
    format: str = FORMAT
    version: int = FORMAT_VERSION
    position: str = ORIGIN
    after: str = ORIGIN
    entries: int | None = None
    digest: str | None = None


_WITHOUT_DIGEST = {"run_id", "format", "version", "position", "after", "entries"}
"""What the first line had before there were digests: with anything else, it was changed."""


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


Write = Callable[[Sequence[Line]], None]


@contextmanager
def lines_written(path: Path, header: Header) -> Iterator[Write]:
    """Write a file bit by bit: whole at the end of the block, and durably, or not at all.

    Removes first what writers of this file that were killed have left beside it.

    Args:
        path: The file; of a link, what it leads to.
        header: Its first line.

    Raises:
        NotWritten: for what is wrong with the file, and not with what is to be in it; also while
            another process writes it.
    """
    with ExitStack() as exits:
        with _writing(path):
            target = _target(path)
            folder = exits.enter_context(OpenFolder.at(target.parent))
            part = exits.enter_context(folder.part(target.name))
            if folder.remove_abandoned(target.name, but=part.own):
                raise BlockingIOError("another process is writing it")
        yield exits.enter_context(_lines_in(part, path, header))


def write_lines(path: Path, header: Header, lines: Iterable[Line]) -> None:
    """Write a file whole and durably, or not at all."""
    with lines_written(path, header) as write:
        _write_pages(write, lines)


def write_segment(folder: OpenFolder, name: str, header: Header, lines: Iterable[Line]) -> None:
    """Write a file into an open folder, whole and durably, or not at all.

    Others may write it too, as two leaders in a row do: the last to finish gives it its name.
    """
    with folder.part(name) as part, _lines_in(part, folder.path / name, header) as write:
        _write_pages(write, lines)


def _write_pages(write: Write, lines: Iterable[Line]) -> None:
    source = iter(lines)
    while page := list(islice(source, _A_PAGE)):
        write(page)


@contextmanager
def _lines_in(part: Part, path: Path, header: Header) -> Iterator[Write]:
    """Write lines into a file; at the end of the block the first one, and give it its name."""
    encoder = msgspec.json.Encoder()
    digest = hashlib.sha256()
    count = 0
    # The first line has the length of the longest: what follows is known at the end.
    longest = structs.replace(header, entries=_MOST_ENTRIES, digest=_NO_DIGEST)
    room = len(encoder.encode(longest))

    def write(lines: Sequence[Line]) -> None:
        nonlocal count
        encoded = encoder.encode_lines(lines)
        digest.update(encoded)
        with _writing(path):
            part.file.write(encoded)
        count += len(lines)

    with _writing(path):
        part.file.write(b" " * room + b"\n")
    yield write
    told = encoder.encode(structs.replace(header, entries=count, digest=_NO_DIGEST))
    first = told + b" " * (room - len(told)) + b"\n"
    with _writing(path):
        part.file.seek(0)
        part.file.write(_with_digest(first, _NO_DIGEST, _digest(digest, first)))
        part.finish()


def _digest(lines: hashlib._Hash, first: bytes) -> str:
    """Digest a file: its lines, and then its first line as it is without the digest."""
    lines.update(first)
    return f"{_DIGEST}{lines.hexdigest()}"


def _with_digest(first: bytes, present: str, wanted: str) -> bytes:
    return first.replace(present.encode(), wanted.encode(), 1)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except NotWritten:
        raise
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


def read_lines(path: Path) -> tuple[Header, Iterator[Line]]:
    """The header, and the entries as they are read.

    Raises:
        BadRecording: for anything that is not such a file, naming the line; from the iterator
            too.
    """
    with _opened(path) as file:
        first = file.readline(_LONGEST_HEADER)
    header = _header(path, first)
    return header, _lines(path, header, first)


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
        if header.digest is None and (more := raw.keys() - _WITHOUT_DIGEST):
            raise ValueError(f"{min(more)!r} is told there, and no digest: the file was changed")
    except (msgspec.ValidationError, ValueError) as error:
        raise BadRecording(f"{path} line 1: {error}") from None
    return header


def _lines(path: Path, header: Header, first: bytes) -> Iterator[Line]:
    decoder = msgspec.json.Decoder(Line)
    digest = hashlib.sha256()
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
            digest.update(raw)
            yield line
    _check_whole(path, header, count, last.get("events", position(ORIGIN)))
    if header.digest is not None:
        told = _with_digest(first, header.digest, _NO_DIGEST)
        if _digest(digest, told) != header.digest:
            raise BadRecording(
                f"{path} was changed since it was written: its bytes do not give the digest in its "
                "first line; put a whole copy in its place, or export the run again"
            )


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
