"""File format of recorded logs: JSON lines, a header first, each entry with its exact bytes.

Each line of an exported file also shows the decoded event, for users and for ``jq``. A reader
uses the bytes only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Literal

import msgspec
from msgspec import Struct, structs

from trinity_schemas import ContractError, Envelope, check_run_id, decode_envelope

from ..errors import StructuredError, TrinityError
from ..log import ORIGIN, Entry, position
from ..system.open_folder import OpenFolder, Part

FORMAT = "trinity-events-log"
FORMAT_VERSION = 1
_A_PAGE = 500
"""Lines that are encoded at once, which bounds the memory for them."""
_MOST_ENTRIES = 10**15 - 1
"""Most entries of a file; the header reserves the digits of this number."""

_DIGEST = "sha256:"
_NO_DIGEST = _DIGEST + "0" * 64
"""Placeholder of the digest, which covers its own line with the placeholder in its place."""

_LONGEST_HEADER = 1 << 16
"""Bytes read for a header; a longer first line belongs to a foreign file."""
# msgspec raises UnicodeDecodeError, which is a ValueError, for text that is not UTF-8. It raises
# RecursionError for values that are nested too deep.
_UNREADABLE = (msgspec.DecodeError, ValueError, RecursionError)

LineStream = Literal["events", "announcements", "dead"]


class ArchiveMissing(TrinityError):
    """Part of the log is in files that are missing.

    Attributes:
        fault: ``trimmed`` if the server lacks entries and no folder was named, ``segment`` if one
            is missing in the folder, ``folder`` if the folder has no archive.
        run_id: The run.
        stream: Stream of the entries.
        folder: Folder of the archive.
        before: Entry or segment before which entries are missing.
    """

    fault: Literal["trimmed", "segment", "folder"]
    run_id: str = ""
    stream: str = ""
    folder: Path | None = None
    before: str = ""
    texts: ClassVar = {
        "trimmed": "{stream} of run {run_id} before {before} are no longer on the server: they are "
        "in its checkpoint directory, so name that with --checkpoint-root",
        "segment": "{stream} of run {run_id} before {before} are not in {folder}: a segment was "
        "moved or deleted",
        "folder": "{folder} has no archived log: name the folder of a run, which has a folder "
        "named log, or a file that export wrote",
    }


class BadRecording(TrinityError):
    """A file is not a recorded log, or not one that this version reads.

    Attributes:
        path: The file.
        fault: What is wrong with it.
        line: Number of the line; None if it is not known.
        reason: Error of the line or of the file.
        version: Version of its format.
        announced: What its first line announces.
    """

    path: Path
    fault: Literal["unreadable", "foreign", "version", "header", "entry", "order", "cut", "changed"]
    line: int | None = None
    reason: str = ""
    version: object = None
    announced: str = ""
    texts: ClassVar = {
        "unreadable": "{path} cannot be read: {reason}",
        "foreign": "{path} is not a recorded log: its first line is not the header that "
        "trinity-events export writes",
        "version": "{path} is of format version {version}, this trinity-events reads version "
        f"{FORMAT_VERSION}: use the trinity-events that wrote it, or a newer one",
        "header": "{path} line 1: {reason}",
        "entry": "{path} {_line} is not an entry ({reason}): the file was cut off or changed; "
        "export the run again",
        "order": "{path} {_line}: entry {reason} is out of order",
        "cut": "{path} is not whole: its first line announces {announced}, but {reason}: it was "
        "cut off or changed; export the run again, or put a whole copy in its place",
        "changed": "{path} was changed since it was written: its bytes do not give the digest in "
        "its first line; put a whole copy in its place, or export the run again",
    }

    @property
    def _line(self) -> str:
        return "has a line that" if self.line is None else f"line {self.line}"


class NotWritten(StructuredError, OSError):
    """A file cannot be written.

    Attributes:
        path: The file.
        reason: Reason why it cannot.
    """

    path: Path
    reason: str
    text = "{path} cannot be written ({reason})"


class Header(Struct, frozen=True, kw_only=True):
    """First line of a file.

    Attributes:
        position: Position that the reducer had folded up to.
        after: Entry before the first one, which shows a missing segment.
        entries: Number of entries, which shows a cut file; None in older files.
        digest: Digest of the whole file, which shows a changed byte; None in older files.
    """

    run_id: str
    format: str = FORMAT
    version: int = FORMAT_VERSION
    position: str = ORIGIN
    after: str = ORIGIN
    entries: int | None = None
    digest: str | None = None


_WITHOUT_DIGEST = {"run_id", "format", "version", "position", "after", "entries"}
"""Fields of a header without a digest; a header with others was changed."""


class Line(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One entry. ``payload`` is base64 in the file; ``reason`` is the error of a dead letter."""

    stream: LineStream
    id: str
    payload: bytes
    reason: str | None = None
    envelope: Any = None

    @property
    def entry(self) -> Entry:
        """Entry with its bytes."""
        return Entry(self.id, self.payload)


def bare_line(stream: LineStream, entry: Entry) -> Line:
    """Make the line of an entry with its bytes only."""
    return Line(stream=stream, id=entry.id, payload=entry.payload)


def line_of(stream: LineStream, entry: Entry, reason: str | None = None) -> Line:
    """Make the line of an entry with the decoded event, if it can be decoded."""
    shown: Envelope | None = None
    with suppress(ContractError):
        shown = decode_envelope(entry.payload)
    return Line(stream=stream, id=entry.id, payload=entry.payload, reason=reason, envelope=shown)


Write = Callable[[Sequence[Line]], None]


@contextmanager
def lines_written(path: Path, header: Header) -> Iterator[Write]:
    """Write a file in pieces; it appears whole and durable at the end of the block, or not at all.

    Removes first the unfinished files of killed writers.

    Args:
        path: The file; the target of a link.
        header: Its first line.

    Raises:
        NotWritten: if the file cannot be written, or while another process writes it. Errors
            of the lines themselves pass through.
    """
    with ExitStack() as exits:
        part = exits.enter_context(_part_of(path))
        yield exits.enter_context(_lines_in(part, path, header))


@contextmanager
def file_written(path: Path) -> Iterator[BinaryIO]:
    """Write a file in pieces; it appears whole and durable at the end of the block, or not at all.

    Raises NotWritten.
    """
    with _part_of(path) as part, _writing(path):
        yield part.file
        part.finish()


def write_file(path: Path, data: bytes) -> None:
    """Write a file whole and durably, or not at all. Raises NotWritten."""
    with file_written(path) as file:
        file.write(data)


@contextmanager
def _part_of(path: Path) -> Iterator[Part]:
    """Open an unfinished file that takes the place of a path, or of the target of a link."""
    with ExitStack() as exits:
        with _writing(path):
            target = _target(path)
            folder = exits.enter_context(OpenFolder.at(target.parent))
            part = exits.enter_context(folder.part(target.name))
            if folder.remove_abandoned(target.name, but=part.own):
                raise BlockingIOError("another process is writing it")
        yield part


def write_lines(path: Path, header: Header, lines: Iterable[Line]) -> None:
    """Write a file whole and durably, or not at all."""
    with lines_written(path, header) as write:
        _write_pages(write, lines)


def write_segment(folder: OpenFolder, name: str, header: Header, lines: Iterable[Line]) -> None:
    """Write a file into an open folder, whole and durably, or not at all.

    Two leaders in a row may write the same file: the last to finish gives the file its name.
    """
    with folder.part(name) as part, _lines_in(part, folder.path / name, header) as write:
        _write_pages(write, lines)


def _write_pages(write: Write, lines: Iterable[Line]) -> None:
    source = iter(lines)
    while page := list(islice(source, _A_PAGE)):
        write(page)


@contextmanager
def _lines_in(part: Part, path: Path, header: Header) -> Iterator[Write]:
    """Write lines into a file; at the end of the block write the header and name the file."""
    encoder = msgspec.json.Encoder()
    digest = hashlib.sha256()
    count = 0
    # Reserve room for the longest header, because its counts are known at the end.
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
    encoded_header = encoder.encode(structs.replace(header, entries=count, digest=_NO_DIGEST))
    first = encoded_header + b" " * (room - len(encoded_header)) + b"\n"
    with _writing(path):
        part.file.seek(0)
        part.file.write(_with_digest(first, _NO_DIGEST, _digest(digest, first)))
        part.finish()


def _digest(lines: hashlib._Hash, first: bytes) -> str:
    """Return the digest of a file: of its lines, then of its header with the placeholder."""
    # The header comes last, as its counts are known only after the lines.
    lines.update(first)
    return f"{_DIGEST}{lines.hexdigest()}"


def _with_digest(first: bytes, present: str, replacement: str) -> bytes:
    return first.replace(present.encode(), replacement.encode(), 1)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except NotWritten:
        raise
    except OSError as error:
        raise NotWritten(path, error.strerror or str(error)) from error


def _target(path: Path) -> Path:
    """Resolve links and create the file's folder. Raises OSError if the path is not a file's."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        raise IsADirectoryError("it is a folder, not a file")
    if path.exists() and not path.is_file():
        raise OSError("it is not a file, and would be replaced")
    return path.resolve()


def read_lines(path: Path) -> tuple[Header, Iterator[Line]]:
    """Return the header of a file, and an iterator over its entries.

    Raises:
        BadRecording: if the file is not a recorded log; the message names the line. The iterator
            raises it too.
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
        raise BadRecording(path, "unreadable", reason=error.strerror or str(error)) from None


def _header(path: Path, first: bytes) -> Header:
    try:
        raw = msgspec.json.decode(first, type=dict[str, Any])
    except _UNREADABLE:
        raw = {}
    if raw.get("format") != FORMAT:
        raise BadRecording(path, "foreign", 1)
    # Before the fields, which another version may have otherwise.
    if raw.get("version") != FORMAT_VERSION:
        raise BadRecording(path, "version", 1, version=raw.get("version"))
    try:
        header = msgspec.convert(raw, Header)
        check_run_id(header.run_id)
        position(header.position)
        position(header.after)
        if header.digest is None and (more := raw.keys() - _WITHOUT_DIGEST):
            raise ValueError(f"it has {min(more)!r} and no digest: the file was changed")
    except (msgspec.ValidationError, ValueError) as error:
        raise BadRecording(path, "header", 1, str(error)) from None
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
                raise BadRecording(path, "entry", number, str(error)) from None
            if at <= last.get(line.stream, (-1, -1)):
                raise BadRecording(path, "order", number, line.id)
            last[line.stream] = at
            count += 1
            digest.update(raw)
            yield line
    _check_whole(path, header, count, last.get("events", position(ORIGIN)))
    if header.digest is not None:
        without_digest = _with_digest(first, header.digest, _NO_DIGEST)
        if _digest(digest, without_digest) != header.digest:
            raise BadRecording(path, "changed")


class _LinePlace(Struct, frozen=True, kw_only=True):
    """Place of a line in the order of a file; a decoder skips the other fields."""

    stream: LineStream
    id: str


class _Bytes(_LinePlace, frozen=True, kw_only=True):
    """Line without the decoded event, which a reader of the bytes need not decode."""

    payload: bytes
    reason: str | None = None


_ORDER: tuple[LineStream, ...] = ("events", "announcements", "dead")
"""Order of the streams in an exported file."""
_CHUNK = 1 << 20
"""Bytes that are read at once for a digest."""


def check_recording(path: Path) -> Header:
    """Return the header of a file whose bytes are those that were written.

    It compares the digest alone, and reads the lines only to tell what is wrong, or if an older
    file has no digest. Raises BadRecording.
    """
    with _opened(path) as file:
        first = file.readline(_LONGEST_HEADER)
        header = _header(path, first)
        if header.digest is not None:
            digest = hashlib.sha256()
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
            if _digest(digest, _with_digest(first, header.digest, _NO_DIGEST)) == header.digest:
                return header
    for _ in _lines(path, header, first):
        pass
    return header


def events_from(path: Path, entry_id: str) -> Iterator[Entry]:
    """Yield the events of a file from an entry on, without reading the lines before.

    It finds the entry by bisection, for `export` writes events first, in order. In a file of
    another order it may miss the entry. The file's digest is not checked.
    """
    target = position(entry_id)

    def is_before(place: _LinePlace) -> bool:
        return place.stream == "events" and position(place.id) < target

    return (line.entry for line in _lines_after(path, is_before, "events"))


def lines_of_stream(path: Path, stream: LineStream) -> Iterator[Line]:
    """Yield the lines of a stream, without reading those of other streams, as above."""
    number = _ORDER.index(stream)
    return _lines_after(path, lambda place: _ORDER.index(place.stream) < number, stream)


def last_events(path: Path, limit: int) -> list[Entry]:
    """Return about ``limit`` events at the end of a file's events, as above."""
    with _opened(path) as file:
        begin = len(file.readline())
        end = _bisected(path, file, lambda place: place.stream == "events")
        # A guess by one line; it doubles until the piece at the end has enough lines.
        size = max(1, len(file.readline()))
        while True:
            file.seek(max(begin, end - limit * size))
            # The piece may begin within a line, which is passed over.
            if file.tell() > begin:
                file.readline()
            raw = file.read(max(0, end - file.tell())).splitlines()
            if len(raw) >= limit or end - limit * size <= begin:
                decoder = msgspec.json.Decoder(_Bytes)
                lines = (decoder.decode(line) for line in raw[-limit:])
                return [Entry(line.id, line.payload) for line in lines]
            size *= 2


def _lines_after(
    path: Path, is_before: Callable[[_LinePlace], bool], stream: LineStream
) -> Iterator[Line]:
    """Yield the lines of a stream after those that are before it."""
    decoder = msgspec.json.Decoder(_Bytes)
    try:
        with _opened(path) as file:
            file.readline()
            file.seek(_bisected(path, file, is_before))
            for raw in file:
                line = decoder.decode(raw)
                if line.stream == stream:
                    yield Line(stream=stream, id=line.id, payload=line.payload, reason=line.reason)
                # The streams follow one another in an exported file: the rest is of later ones.
                elif _ORDER.index(line.stream) > _ORDER.index(stream):
                    return
    except _UNREADABLE as error:
        raise _no_entry(path, error) from None


def _bisected(path: Path, file: BinaryIO, is_before: Callable[[_LinePlace], bool]) -> int:
    """Return the offset of the first line that is not before; the file is behind its header."""
    decoder = msgspec.json.Decoder(_LinePlace)
    low, high = file.tell(), path.stat().st_size
    try:
        while low < high:  # the first line that begins at or after `low` may be the one
            middle = (low + high) // 2
            raw = _first_line_from(file, middle)
            if raw and is_before(decoder.decode(raw)):
                # Behind the line that was read, which is before what is looked for.
                low = file.tell()
            else:
                high = middle
    except _UNREADABLE as error:
        raise _no_entry(path, error) from None
    return low


def _no_entry(path: Path, error: Exception) -> BadRecording:
    return BadRecording(path, "entry", reason=str(error))


def _first_line_from(file: BinaryIO, offset: int) -> bytes:
    """Read the first line that begins at or after an offset."""
    # One byte back: a line that begins right at the offset is found, too.
    file.seek(offset - 1)
    if file.read(1) != b"\n":
        file.readline()
    return file.readline()


def _check_whole(path: Path, header: Header, entries: int, end: tuple[int, int]) -> None:
    """Raise BadRecording if a file was cut off at the end of a line."""
    if header.entries is None:
        expected, actual = f"events up to {header.position}", f"they end at {end[0]}-{end[1]}"
        whole = end >= position(header.position)
    else:
        expected, actual = f"{header.entries} entries", f"it has {entries}"
        whole = entries == header.entries
    if not whole:
        raise BadRecording(path, "cut", reason=actual, announced=expected)
