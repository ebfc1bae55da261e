"""Archived segments: entries that were kept in files before they were trimmed (invariant 8)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from ..checkpoint_layout import (
    ARCHIVE,
    SegmentName,
    is_unfinished_segment,
    parse_segment_name,
    segment_pattern,
)
from ..log import ORIGIN, Entry, Stream, position
from ..open_folder import OpenFolder
from .format import ArchiveMissing, BadRecording, Header, Line, bare_line, read_lines, write_segment

logger = logging.getLogger(__name__)

_LEFT_ON_SERVER = 2
"""Segments at least, so that one that is written twice by leaders in a row is there as well."""
_LEFT_BYTES = 64 << 20
"""Of segments: so many are enough to leave on the server, however few entries they are."""


class _Segment(NamedTuple):
    first: tuple[int, int]
    after_gap: bool
    last: tuple[int, int]
    entries: int | None
    """None in an archive of before they were told by the name."""
    path: Path


def _claim_nothing(run: OpenFolder) -> None:
    """Let any folder be changed."""


class Archive:
    """The segments of one run, in ``ROOT/RUN/log``.

    A segment is named by the first and the last entry that it holds and by their number, so that
    what is archived is known from a listing. Overlapping segments, as two leaders in a row may
    write, are read once. One that was begun after a gap has another name than one that goes on what
    is kept: where the segments of two archives are laid together, neither takes the other's place.
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
        """Keep the entries durably.

        Args:
            stream: Whose they are.
            entries: In their order.
            after: What they follow on; after a gap, only what they come behind.
            after_gap: Whether what is between them and what is kept is not known.
        """
        if entries:
            name = SegmentName(stream.value, entries[0].id, entries[-1].id, len(entries), after_gap)
            # The bytes alone: what they say is for `export` to show, when somebody asks.
            lines = (bare_line(stream.value, entry) for entry in entries)
            header = Header(run_id=self._run_id, after=after)
            with self._opened(create=True) as folder:
                write_segment(folder, str(name), header, lines)

    @contextmanager
    def _opened(self, *, create: bool = False) -> Iterator[OpenFolder]:
        """Open the folder for what changes it: neither it nor the run's folder may be a link."""
        run = self.folder.parent
        if create:
            run.parent.mkdir(parents=True, exist_ok=True)
        with OpenFolder.at(run.parent) as root, root.below(run.name, create=create) as opened:
            self._claim(opened)
            with opened.below(ARCHIVE, create=create) as folder:
                yield folder

    def clear_up(self) -> None:
        """Remove what is left of segments that were never finished."""
        with suppress(FileNotFoundError), self._opened() as folder:
            for name in folder.names():
                unfinished = any(is_unfinished_segment(name, one.value) for one in Stream)
                if unfinished and folder.is_file(name):
                    folder.remove(name)

    def through(self, stream: Stream) -> str:
        """The last entry that is kept."""
        return next(iter(self.ends(stream)), ORIGIN)

    def read(self, stream: Stream, after: str = ORIGIN) -> Iterator[Entry]:
        """The entries that are kept, in order, each once.

        Raises:
            BadRecording: when a segment was damaged, naming it.
            ArchiveMissing: when one is not there.
        """
        at = position(after)
        for segment in self._segments(stream):
            if segment.last <= at:
                continue
            # All of it before any of it is used: its digest is of the whole.
            header, lines = _whole(segment.path)
            if position(header.after) > at:
                raise ArchiveMissing(
                    f"{stream.value} of run {self._run_id} before {segment.path.name} are not in "
                    f"{self.folder}: a segment was moved or deleted"
                )
            for line in lines:
                if position(line.id) > at:
                    at = position(line.id)
                    yield line.entry

    def first(self, stream: Stream) -> Entry | None:
        """Return the first entry of the stream; None unless it is kept.

        Raises BadRecording.
        """
        for segment in self._segments(stream)[:1]:
            header, lines = _whole(segment.path)
            if lines and header.after == ORIGIN and not segment.after_gap:
                return lines[0].entry
        return None

    def ends(self, stream: Stream) -> list[str]:
        """The last entry of each segment, the newest first."""
        found = sorted((segment.last for segment in self._segments(stream)), reverse=True)
        return [f"{last[0]}-{last[1]}" for last in found]

    def trim_limit(self, stream: Stream, entries: int) -> str | None:
        """Below this entry all is kept; what is asked for most stays on the server.

        None when there is nothing to trim. What stays is the newest segments: two at least, and
        as many as have so many entries, or 64 MiB.
        """
        left, nbytes = 0, 0
        segments = self._segments(stream)
        for number, segment in enumerate(reversed(segments), 1):
            left += entries if segment.entries is None else segment.entries
            nbytes += segment.path.stat().st_size
            if number >= _LEFT_ON_SERVER and (left >= entries or nbytes >= _LEFT_BYTES):
                break
        else:
            return None
        if number == len(segments):
            return None
        return f"{segment.first[0]}-{segment.first[1]}"

    def set_aside(self, stream: Stream, after: str, before: str) -> Path:
        """Take segments with entries after one out of the archive: they are of another log.

        What of them comes before ``before`` is of this log too, and stays. Returns where they are.
        """
        strange = [one for one in self._segments(stream) if one.last > position(after)]
        self.add(stream, self._shared(stream, after, before), after)
        name = f"not-on-the-server-after-{after}"
        with self._opened(create=True) as folder, folder.below(name, create=True) as aside:
            for segment in strange:
                folder.rename(segment.path.name, aside, segment.path.name)
        return self.folder / name

    def _shared(self, stream: Stream, after: str, before: str) -> list[Entry]:
        """What is between the two, as far as it can be read: of one segment, at most."""
        found: list[Entry] = []
        with suppress(ArchiveMissing, BadRecording):
            for entry in self.read(stream, after):
                if position(entry.id) >= position(before):
                    break
                found.append(entry)
        return found

    def _segments(self, stream: Stream) -> list[_Segment]:
        found: list[_Segment] = []
        for path in self.folder.glob(segment_pattern(stream.value)):
            try:
                found.append(_segment(path))
            except ValueError:
                logger.warning("%s is not a segment of the archive: passed over", path)
        # Where two begin alike, one that knows what is before it comes first.
        return sorted(found)


def _whole(path: Path) -> tuple[Header, list[Line]]:
    header, lines = read_lines(path)
    return header, list(lines)


def _segment(path: Path) -> _Segment:
    """Parse a segment's path. Raises ValueError for a foreign name."""
    name = parse_segment_name(path.name)
    return _Segment(position(name.first), name.after_gap, position(name.last), name.entries, path)
