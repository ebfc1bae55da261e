"""Archive segments: files with entries that the server may trim (invariant 8)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from ..checkpoints.layout import (
    ARCHIVE,
    SegmentName,
    is_unfinished_segment,
    parse_segment_name,
    segment_pattern,
)
from ..log import ORIGIN, Entry, Stream, position
from ..system.open_folder import OpenFolder
from .format import ArchiveMissing, BadRecording, Header, Line, bare_line, read_lines, write_segment

logger = logging.getLogger(__name__)

_LEFT_ON_SERVER = 2
"""Fewest segments whose entries stay on the server; two leaders may write the same segment."""


class _Segment(NamedTuple):
    first: tuple[int, int]
    after_gap: bool
    last: tuple[int, int]
    entries: int | None
    """None in a name of an older format."""
    path: Path


def _claim_nothing(run: OpenFolder) -> None:
    """Accept any folder."""


class Archive:
    """Archive of one run: its segments in ``ROOT/RUN/log``.

    A segment's name gives its first and last entry and their number, so that a listing shows what
    is archived. Two leaders in a row may write overlapping segments; a reader gets each entry
    once. A segment after a gap is marked in its name. If a user merges two archives, it therefore
    does not replace a segment without a gap.

    Args:
        run_folder: The run's folder.
        run_id: The run.
        claim: Called with the run's open folder before each change; it may raise FolderTaken.
    """

    def __init__(
        self, run_folder: Path, run_id: str, claim: Callable[[OpenFolder], None] = _claim_nothing
    ) -> None:
        self.folder = run_folder / ARCHIVE
        self._run_id = run_id
        self._claim = claim

    def add(
        self,
        stream: Stream,
        entries: list[Entry],
        after: str = ORIGIN,
        *,
        after_gap: bool = False,
    ) -> None:
        """Write the entries to a new segment, durably.

        Args:
            stream: Stream of the entries.
            entries: Entries in their order.
            after: Entry before the first one.
            after_gap: True if entries between ``after`` and the first one may be missing.
        """
        if entries:
            name = SegmentName(stream.value, entries[0].id, entries[-1].id, len(entries), after_gap)
            # Only the bytes: `export` adds the decoded events.
            lines = (bare_line(stream.value, entry) for entry in entries)
            header = Header(run_id=self._run_id, after=after)
            with self._opened(create=True) as folder:
                write_segment(folder, str(name), header, lines)

    @contextmanager
    def _opened(self, *, create: bool = False) -> Iterator[OpenFolder]:
        """Open the folder for a change; neither it nor the run's folder may be a link."""
        with OpenFolder.open_run(self.folder.parent, create=create) as run:
            self._claim(run)
            with run.below(ARCHIVE, create=create) as folder:
                yield folder

    def clear_up(self) -> None:
        """Remove unfinished segments."""
        with suppress(FileNotFoundError), self._opened() as folder:
            for name in folder.names():
                unfinished = any(is_unfinished_segment(name, stream.value) for stream in Stream)
                if unfinished and folder.is_file(name):
                    folder.remove(name)

    def through(self, stream: Stream) -> str:
        """Return the id of the last archived entry."""
        return next(iter(self.ends(stream)), ORIGIN)

    def read(self, stream: Stream, after: str = ORIGIN) -> Iterator[Entry]:
        """Yield the archived entries after an entry in order, each once.

        Raises:
            BadRecording: if a segment was damaged; the message names it.
            ArchiveMissing: if a segment is missing.
        """
        at = position(after)
        for segment in self._segments(stream):
            if segment.last <= at:
                continue
            # Read the whole segment before using any entry: the digest covers the whole file.
            header, lines = _whole(segment.path)
            # The header names the entry before the first one: a segment between the two is missing.
            if position(header.after) > at:
                raise ArchiveMissing(
                    "segment", self._run_id, stream.value, self.folder, segment.path.name
                )
            for line in lines:
                if position(line.id) > at:
                    at = position(line.id)
                    yield line.entry

    def first(self, stream: Stream) -> Entry | None:
        """Return the first entry of the stream; None unless it is archived.

        Raises BadRecording.
        """
        for segment in self._segments(stream)[:1]:
            header, lines = _whole(segment.path)
            if lines and header.after == ORIGIN and not segment.after_gap:
                return lines[0].entry
        return None

    def ends(self, stream: Stream) -> list[str]:
        """Return the id of each segment's last entry, the newest first."""
        positions = sorted((segment.last for segment in self._segments(stream)), reverse=True)
        return [f"{last[0]}-{last[1]}" for last in positions]

    def trim_limit(self, stream: Stream, entries: int, nbytes: int) -> str | None:
        """Return the entry below which the server may trim; None if there is nothing to trim.

        The newest segments stay on the server: at least two, and enough for ``entries`` entries or
        ``nbytes`` bytes of files, whichever is less.
        """
        entry_count = size = 0
        segments = self._segments(stream)
        for number, segment in enumerate(reversed(segments), 1):
            # The name of an older segment has no number: the segment counts as enough.
            entry_count += entries if segment.entries is None else segment.entries
            size += segment.path.stat().st_size
            if number >= _LEFT_ON_SERVER and (entry_count >= entries or size >= nbytes):
                break
        else:
            return None
        if number == len(segments):
            return None
        return f"{segment.first[0]}-{segment.first[1]}"

    def set_aside(self, stream: Stream, after: str, before: str) -> Path:
        """Move segments of another log, with entries after ``after``, to a folder; return it.

        Their entries before ``before`` belong to this log too, and stay in the archive.
        """
        # Before the shared part is written, whose segment ends after `after`, too.
        strange = [segment for segment in self._segments(stream) if segment.last > position(after)]
        # A copy first, then the moves: a death in between leaves entries twice, and never none.
        self.add(stream, self._shared(stream, after, before), after)
        name = f"not-on-the-server-after-{after}"
        with self._opened(create=True) as folder, folder.below(name, create=True) as aside:
            for segment in strange:
                folder.rename(segment.path.name, aside, segment.path.name)
        return self.folder / name

    def _shared(self, stream: Stream, after: str, before: str) -> list[Entry]:
        """Return the readable entries between two entries; they are of one segment at most."""
        entries: list[Entry] = []
        with suppress(ArchiveMissing, BadRecording):
            for entry in self.read(stream, after):
                if position(entry.id) >= position(before):
                    break
                entries.append(entry)
        return entries

    def _segments(self, stream: Stream) -> list[_Segment]:
        segments: list[_Segment] = []
        for path in self.folder.glob(segment_pattern(stream.value)):
            try:
                segments.append(_segment(path))
            except ValueError:
                logger.warning("%s is not a segment of the archive: ignored", path)
        # Of two segments that begin alike, the one without a gap comes first.
        return sorted(segments)


def _whole(path: Path) -> tuple[Header, list[Line]]:
    header, lines = read_lines(path)
    return header, list(lines)


def _segment(path: Path) -> _Segment:
    """Parse a segment's path. Raises ValueError for a foreign name."""
    name = parse_segment_name(path.name)
    return _Segment(position(name.first), name.after_gap, position(name.last), name.entries, path)
