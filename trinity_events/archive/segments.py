"""Archived segments: entries that were kept in files before they were trimmed (invariant 8)."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ..log import ORIGIN, Entry, Stream, position
from .format import ArchiveMissing, Header, bare_line, read_lines, write_lines

logger = logging.getLogger(__name__)

FOLDER = "log"
_AFTER_GAP = "after-gap"
_LEFT_ON_SERVER = 2


class _Segment(NamedTuple):
    first: tuple[int, int]
    after_gap: bool
    last: tuple[int, int]
    path: Path


class Archive:
    """The segments of one run, in ``ROOT/RUN/log``.

    A segment is named by the first and the last entry that it holds, so that what is archived is
    known from a listing. Overlapping segments, as two leaders in a row may write, are read once.
    One that was begun after a gap has another name than one that goes on what is kept: where the
    segments of two archives are laid together, neither takes the other's place.
    """

    def __init__(self, run_folder: Path, run_id: str) -> None:
        self.folder = run_folder / FOLDER
        self._run_id = run_id

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
            told = f".{_AFTER_GAP}" if after_gap else ""
            name = f"{stream.value}.{entries[0].id}.{entries[-1].id}{told}.jsonl"
            # The bytes alone: what they say is for `export` to show, when somebody asks.
            lines = (bare_line(stream.value, entry) for entry in entries)
            write_lines(self.folder / name, Header(run_id=self._run_id, after=after), lines)

    def through(self, stream: Stream) -> str:
        """The last entry that is kept."""
        segments = self._segments(stream)
        last = max((segment.last for segment in segments), default=None)
        return ORIGIN if last is None else f"{last[0]}-{last[1]}"

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
            header, lines = read_lines(segment.path)
            if position(header.after) > at:
                raise ArchiveMissing(
                    f"{stream.value} of run {self._run_id} before {segment.path.name} are not in "
                    f"{self.folder}: a segment was moved or deleted"
                )
            for line in lines:
                if position(line.id) > at:
                    at = position(line.id)
                    yield line.entry

    def trim_limit(self, stream: Stream) -> str | None:
        """Below this entry all is kept, and the two newest segments are not touched.

        What is asked for most stays on the server; None when there is nothing to trim.
        """
        segments = self._segments(stream)
        if len(segments) <= _LEFT_ON_SERVER:
            return None
        first = segments[-_LEFT_ON_SERVER].first
        return f"{first[0]}-{first[1]}"

    def _segments(self, stream: Stream) -> list[_Segment]:
        found: list[_Segment] = []
        for path in self.folder.glob(f"{stream.value}.*.jsonl"):
            try:
                _, first, last, *told, _ = path.name.split(".")
                if told not in ([], [_AFTER_GAP]):
                    raise ValueError(told)
                found.append(_Segment(position(first), bool(told), position(last), path))
            except ValueError:
                logger.warning("%s is not a segment of the archive: passed over", path)
        # Where two begin alike, one that knows what is before it comes first.
        return sorted(found)
