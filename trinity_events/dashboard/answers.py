"""Answers to the questions of pages: bounded summaries of a run, as plain data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import anyio.to_thread
import msgspec
from msgspec import Struct, structs

from trinity_schemas import Envelope, EnvelopeReader, StepRef, event_tag

from ..analysis.causes import LiveFacts, processes_of_epoch
from ..analysis.changes import changes
from ..analysis.proof import Proof
from ..core import MonitorState
from ..core.fold import Monitor
from ..core.fold_state import format_producer
from ..errors import TrinityError
from ..log import Entry, before, position
from ..replay import Folded, fold_one
from ..views import event_line, state_as_json
from ..views.changes import change_line, tells
from .categories import BIT_OF_TAG, CATEGORIES, TYPES, category_of, step_of
from .history import OTHERS, History, Lane
from .run_reader import RunReader
from .series import Figures, Version
from .spans import EventSpan, Grouping, merged
from .state_view import causes_of, proof_of, step_in_words, view_of

DETAILED = 6000
"""Maximum entries of a window whose events are grouped; a longer one is answered with counts."""
ROWS = 80
"""Maximum rows of a timeline."""
SPANS = 6000
"""Maximum spans of an answer."""
FOUND = 200
"""Maximum results of one search."""
SEARCHED = 24
"""Maximum blocks that one search reads; the answer says where to go on."""
_MATRIX = 24
"""Versions of the matrix, the last ones."""
_BEFORE = 8000
"""Entries before a moment of the past from which its versions are read."""


class BadQuestion(TrinityError):
    """A parameter of a question is not one."""


class Row(Struct, frozen=True):
    """Row of a timeline: one lane, or the lanes of a role with ranks in a range."""

    name: str
    role: str
    first: int
    last: int

    def has(self, lane: Lane) -> bool:
        """Return True if the row shows a lane."""
        return lane.role == self.role and self.first <= lane.rank <= self.last


def parse_rows(text: str) -> list[Row]:
    """Return the rows of a list such as ``trainer-0,explorer:0-63``.

    Raises:
        BadQuestion: if a name is neither a lane nor a range of lanes.
    """
    rows: list[Row] = []
    for name in text.split(",")[:ROWS] if text else ():
        role, colon, ranks = name.rpartition(":")
        if name == OTHERS:
            role, ranks = OTHERS, "0-0"
        elif not colon:
            role, _, ranks = name.rpartition("-")
            ranks = f"{ranks}-{ranks}"
        first, _, last = ranks.partition("-")
        if not role or not (first.isdigit() and last.isdigit()):
            raise BadQuestion(f"{name!r} is no lane: name one such as trainer-0 or explorer:0-63")
        rows.append(Row(name, role, int(first), int(last)))
    return rows


async def now_view(reader: RunReader) -> dict[str, Any]:
    """Return the newest state, with the progress of the index."""
    history = await reader.indexed()
    state = reader.newest
    assert state is not None
    around, now = reader.around, reader.now
    facts = (around and around.facts) or LiveFacts(now=now)
    late = 0 if facts.unfolded_since is None else facts.now - facts.unfolded_since
    # Ages of the facts are those of the moment at which they were read.
    facts = structs.replace(facts, now=now, unfolded_since=now - late if late else None)
    return view_of(state, now, digests(history)) | {
        # Without the facts of a live run, another process would be blamed than `explain` names.
        "causes": [] if reader.source.is_live and around is None else causes_of(state, facts),
        "unfolded": late,
        "processes": []
        if state.closed is not None
        else [
            [name, process.pid, process.condition]
            for name, process in sorted(processes_of_epoch(state, facts.processes).items())
        ],
        "live": reader.source.is_live,
        "progress": reader.progress,
        "problem": reader.problem,
        "note": reader.note,
        "indexed": history.number,
        "first": history.first,
        "begin": history.begin,
        "end": max(reader.end, history.last),
        "groups": [] if around is None else list(around.groups),
    }


def digests(history: History) -> dict[StepRef, str]:
    """Return the digests of the ready weight versions that are known."""
    return {
        ref: version.digest for ref, version in history.figures.versions.items() if version.digest
    }


async def state_at(
    reader: RunReader,
    *,
    number: int | None = None,
    entry: str | None = None,
    time: int | None = None,
    whole: bool = False,
    changed: bool = False,
) -> dict[str, Any]:
    """Return the state after an entry, given by its number, its id or a moment.

    Args:
        reader: The run.
        number: Number of entries up to the state.
        entry: Id of the last of them.
        time: Milliseconds of the moment.
        whole: True to add the whole state, as JSON.
        changed: True to add the changes of the state by the entry, at most :data:`FOUND`.
    """
    if entry is not None:
        number = await reader.number_of(entry)
    elif time is not None:
        number = await reader.number_at(time)
    elif number is None:
        number = (await reader.indexed()).number
    result = await reader.at(number)
    history = await reader.indexed()
    state = result.state
    now = position(state.position)[0]
    view = view_of(state, now, digests(history)) | {
        "causes": causes_of(state, LiveFacts(now=now)),
        "first": history.first,
        "indexed": history.number,
        "problem": result.problem,
        "event": None if result.envelope is None else event_of(result.entry, result.envelope),
        "announcements": [
            event_of(result.entry, announcement) for announcement in result.announcements
        ],
    }
    if whole:
        view["whole"] = state_as_json(state)
    if changed and number > history.first:
        former = state_as_json((await reader.at(number - 1)).state)
        found_changes = filter(tells, changes(former, state_as_json(state)))
        view["changed"] = [change_line(change) for change in islice(found_changes, FOUND)]
    return view


def event_of(entry: Entry | None, envelope: Envelope) -> dict[str, Any]:
    """Return an event with its fields, and as a line."""
    assert entry is not None
    return {
        "entry": entry.id,
        "type": event_tag(envelope.event),
        "category": category_of(envelope.event),
        "producer": format_producer(envelope.producer),
        "node": envelope.producer.node,
        "epoch": envelope.epoch,
        "step": step_of(envelope.event),
        "line": _line(entry.id, envelope),
        "fields": msgspec.to_builtins(envelope.event, str_keys=True),
    }


def _line(entry_id: str, envelope: Envelope) -> str:
    """Return the fields of an event as ``tail`` prints them, without id, time and producer."""
    tag = event_tag(envelope.event)
    return event_line(entry_id, envelope).partition(f" {tag}")[2].strip()[:400]


async def explain_step(reader: RunReader, step: int) -> dict[str, Any]:
    """Return the explanation of a step by the newest state, and the entries that prove it.

    Entries are sought in the last blocks with events of the step, at most :data:`SEARCHED`.
    """
    history = await reader.indexed()
    state = reader.newest
    assert state is not None
    folded_entries: list[Folded] = []
    blocks = [
        block for block in history.blocks.all if block.least_step <= step <= block.greatest_step
    ]
    for block in blocks[-SEARCHED:]:
        start = await reader.at(block.number)
        entries = await reader.source.read(before(block.first), limit=block.entries)
        folded_entries += await anyio.to_thread.run_sync(list, _folded(start.state, entries))
    proof = Proof(step)
    for folded in folded_entries:
        for announcement in folded.announcements:
            proof.add_announcement(folded.entry.id, announcement)
    for folded in folded_entries:
        if folded.envelope is not None:
            proof.add(folded.entry.id, folded.envelope)
    return {
        "step": step,
        "words": step_in_words(state, step, reader.now) if step in state.steps else "",
        "proof": msgspec.to_builtins(proof.entries[:FOUND]),
    }


def _folded(state: MonitorState, entries: list[Entry]) -> Iterator[Folded]:
    """Fold entries into a state, one by one as they are asked for."""
    monitor, decode = Monitor(state), EnvelopeReader().decode
    for entry in entries:
        yield fold_one(monitor, entry, decode)


# --- timeline ------------------------------------------------------------------------------


async def lanes(reader: RunReader) -> dict[str, Any]:
    """Return all lanes, the categories, and the failures and openings of epochs."""
    history = await reader.indexed()
    return {
        "categories": CATEGORIES,
        "types": TYPES,
        "lanes": [[lane.name, lane.role, lane.rank, lane.node] for lane in history.lanes],
        "marks": [[m.milliseconds, m.number, m.entry, m.name, m.text] for m in history.marks],
        "begin": history.begin,
        "end": max(reader.end, history.last),
        "number": history.number,
        "first": history.first,
    }


async def overview(reader: RunReader) -> dict[str, Any]:
    """Return the counts of all lanes together, for the strip below the pages."""
    history = await reader.indexed()
    activity = history.activity
    sums: dict[tuple[int, int], int] = {}
    for lane in range(len(history.lanes)):
        for bucket, category, count in activity.cells(lane, history.begin, history.last):
            sums[bucket, category] = sums.get((bucket, category), 0) + count
    return {
        "begin": activity.begin,
        "width": activity.width,
        "cells": [[bucket, category, count] for (bucket, category), count in sums.items()],
        "end": max(reader.end, history.last),
        "indexed": history.last,
    }


async def timeline(
    reader: RunReader, begin: int, end: int, pixels: int, rows: Sequence[Row]
) -> dict[str, Any]:
    """Return what happened in a window: spans of each row, or counts if there are too many events.

    Args:
        reader: The run.
        begin: Milliseconds at which the window begins.
        end: Milliseconds at which it ends.
        pixels: Width of the picture.
        rows: Its rows.
    """
    history = await reader.indexed()
    tail = reader.tail
    end = max(end, begin + 1)
    if tail is not None and history.last < begin and tail.begin < end:
        history = tail  # the last events need not wait until all those before them are indexed
    rows = rows or [
        Row(lane.name, lane.role, lane.rank, lane.rank) for lane in history.lanes[:ROWS]
    ]
    answer: dict[str, Any] = {"begin": begin, "end": end, "rows": [row.name for row in rows]}
    if history.blocks.count_between(begin, end) > DETAILED:
        cells = await anyio.to_thread.run_sync(counts, history, begin, end, rows)
        return answer | {"mode": "counts", "width": history.activity.width, "cells": cells}
    if history is tail:
        empty = MonitorState(run_id=reader.source.run_id, epoch=history.state.epoch)
        spans = await _spans_from(reader, empty, f"{begin - 1}-{2**64 - 1}", begin, end)
    else:
        spans = await spans_of(reader, begin, end)
    resolution = (end - begin) / max(100, pixels)
    return answer | {"mode": "spans"} | rows_of_spans(spans, rows, history, begin, resolution)


def counts(history: History, begin: int, end: int, rows: Sequence[Row]) -> list[list[Any]]:
    """Return the counts of each row: row, milliseconds, category, count."""
    activity, cells = history.activity, []
    for number, row in enumerate(rows):
        sums: dict[tuple[int, int], int] = {}
        for lane, lane_info in enumerate(history.lanes):
            if row.has(lane_info):
                for bucket, category, count in activity.cells(lane, begin, end):
                    sums[bucket, category] = sums.get((bucket, category), 0) + count
        for (bucket, category), count in sums.items():
            cells.append([number, activity.begin + bucket * activity.width, category, count])
    return cells


async def spans_of(reader: RunReader, begin: int, end: int) -> list[EventSpan]:
    """Group the entries of a window; what began before it comes from the state at its begin."""
    history = await reader.indexed()
    first = await reader.number_at(begin - 1) if begin > history.begin else history.first
    start = (await reader.at(max(first, history.first))).state
    return await _spans_from(reader, start, start.position, begin, end)


async def _spans_from(
    reader: RunReader, start: MonitorState, after: str, begin: int, end: int
) -> list[EventSpan]:
    """Group the entries after a position up to the end of a window."""
    entries: list[Entry] = []
    async for page in reader.pages(after, f"{end}-{2**64 - 1}"):
        entries += page
    return await anyio.to_thread.run_sync(_grouped, start, entries, begin, end)


def _grouped(state: MonitorState, entries: list[Entry], begin: int, end: int) -> list[EventSpan]:
    grouping = Grouping(state, begin)
    for folded in _folded(state, entries):
        if folded.envelope is not None:
            grouping.add(folded.entry.id, folded.envelope)
        for announcement in folded.announcements:
            grouping.announced(folded.entry.id, announcement)
    last = position(entries[-1].id)[0] if entries else begin
    return grouping.finish(max(last, begin) if last < end else end)


def rows_of_spans(
    spans: list[EventSpan],
    rows: Sequence[Row],
    history: History,
    begin: int,
    resolution: float,
    most: int = SPANS,
) -> dict[str, Any]:
    """Return the spans of rows of one lane, at most so many, and the counts of rows of several."""
    row_of: dict[str, int] = {}
    grouped: set[int] = set()
    for number, row in enumerate(rows):
        if row.first != row.last:
            grouped.add(number)
        for lane in history.lanes:
            if row.has(lane):
                row_of[lane.name] = number
    single = [span for span in spans if row_of.get(span.lane, -1) not in {-1, *grouped}]
    shown = merged(single, resolution)
    width = max(1, int(4 * resolution))
    sums: dict[tuple[int, int, int], int] = {}
    for span in spans:
        number = row_of.get(span.lane, -1)
        if number in grouped:
            cell = (number, (span.end - begin) // width, span.category)
            sums[cell] = sums.get(cell, 0) + 1
    return {
        "width": width,
        "spans": [_span(row_of[span.lane], span) for span in shown[:most]],
        "left_out": max(0, len(shown) - most),
        "cells": [
            [number, begin + bucket * width, category, count]
            for (number, bucket, category), count in sums.items()
        ],
    }


def _span(row: int, span: EventSpan) -> list[Any]:
    return [
        row,
        span.begin,
        span.end,
        span.category,
        span.label,
        span.entry,
        span.step,
        span.outcome,
        span.count,
        span.detail,
    ]


# --- search --------------------------------------------------------------------------------


class Search(Struct, frozen=True, kw_only=True):
    """Conditions of a search, newest first."""

    types: tuple[str, ...] = ()
    producer: str = ""
    """Role, or role and rank."""
    step: int | None = None
    since: int = 0
    until: int = 2**62
    before: int | None = None
    """Number of an entry; results are before it."""
    limit: int = 50

    def check(self) -> None:
        """Raise BadQuestion for a type that does not exist."""
        for tag in self.types:
            if tag not in BIT_OF_TAG:
                raise BadQuestion(f"{tag!r} is no type of events: see /api/runs/RUN/lanes")

    def wants(self, envelope: Envelope, milliseconds: int) -> bool:
        """Return True if an event matches."""
        event, producer = envelope.event, envelope.producer
        return (
            self.since <= milliseconds <= self.until
            and (not self.types or event_tag(event) in self.types)
            and (not self.producer or self.producer in (producer.role, format_producer(producer)))
            and (self.step is None or step_of(event) == self.step)
        )


async def search(reader: RunReader, query: Search) -> dict[str, Any]:
    """Return matching events and announcements, newest first, and where to go on."""
    query.check()
    history = await reader.indexed()
    types = sum({BIT_OF_TAG[tag] for tag in query.types})
    wanted_lanes = sum(
        1 << number
        for number, lane in enumerate(history.lanes)
        if query.producer in (lane.name, lane.role)
    )
    most = min(max(1, query.limit), FOUND)
    results: list[list[Any]] = []
    end = history.number if query.before is None else min(query.before - 1, history.number)
    blocks, read = history.blocks, 0
    at = blocks.at_number(max(0, end - 1))
    while at >= 0 and len(results) < most and read < SEARCHED:
        block = blocks.all[at]
        following = blocks.all[at + 1].milliseconds if at + 1 < len(blocks.all) else history.last
        may = (
            (not types or block.types & types)
            and (not query.producer or block.lanes & wanted_lanes)
            and (query.step is None or block.least_step <= query.step <= block.greatest_step)
            and block.milliseconds <= query.until
            and following >= query.since
        )
        if may:
            read += 1
            count = min(block.entries, end - block.number)
            start = await reader.at(block.number)
            entries = await reader.source.read(before(block.first), limit=max(count, 0))
            matching = await anyio.to_thread.run_sync(_matching, start.state, entries, query)
            results += reversed(matching)
        end = block.number
        at -= 1
    more = results[most - 1][0] if len(results) >= most else (end + 1 if at >= 0 else None)
    return {
        "found": results[:most],
        "before": more,
        "until": history.blocks.all[at + 1].milliseconds if blocks.all else None,
    }


def _matching(state: MonitorState, entries: list[Entry], query: Search) -> list[list[Any]]:
    """Return the matching events and announcements of one block, oldest first."""
    results = []
    for entry, envelope, announcements, problem in _folded(state, entries):
        milliseconds = position(entry.id)[0]
        if envelope is None:
            if not (query.types or query.producer) and query.step is None:
                reason = str(problem)[:300]
                results.append([state.entries, entry.id, milliseconds, "", "", None, -1, reason])
            continue
        results += [
            _search_row(state.entries, entry.id, message)
            for message in (envelope, *announcements)
            if query.wants(message, milliseconds)
        ]
    return results


def _search_row(number: int, entry_id: str, envelope: Envelope) -> list[Any]:
    event = envelope.event
    return [
        number,
        entry_id,
        position(entry_id)[0],
        format_producer(envelope.producer),
        event_tag(event),
        step_of(event),
        category_of(event),
        _line(entry_id, envelope),
    ]


# --- versions, figures, health -------------------------------------------------------------


async def versions(reader: RunReader, number: int | None = None) -> dict[str, Any]:
    """Return the last weight versions, and for each explorer the versions that it applied.

    Args:
        reader: The run.
        number: Number of entries up to a moment of the past, whose last versions are returned; by
            default the newest moment.
    """
    history = await reader.indexed()
    run_figures, state = history.figures, history.state
    if number is not None and number < history.number:
        end = max(history.first, number)
        start = await reader.at(max(history.first, end - _BEFORE))
        entries = await reader.exactly(start.state.position, end - start.state.entries)
        run_figures, state = await anyio.to_thread.run_sync(_figures, start.state, entries)
    # One that was opened before the first entry read is known in part alone.
    last = [version for version in run_figures.versions.values() if version.opened][-_MATRIX:]
    return {
        "versions": [_version(version) for version in last],
        "explorers": sorted(
            {name for version in last for name in (*version.applied, *version.refused)}
            | set(state.explorers)
        ),
        "cells": [
            [
                column,
                name,
                applied.at,
                applied.fetch,
                applied.pause,
                applied.digest,
                proof_of(applied.digest, version.digest),
            ]
            for column, version in enumerate(last)
            for name, applied in version.applied.items()
        ],
        "refused": [
            [column, name, refused.reason, refused.at]
            for column, version in enumerate(last)
            for name, refused in version.refused.items()
        ],
    }


def _figures(state: MonitorState, entries: list[Entry]) -> tuple[Figures, MonitorState]:
    """Return the figures of some entries, and the state after them."""
    figures = Figures()
    for entry, envelope, announcements, _ in _folded(state, entries):
        if envelope is not None:
            for message in (envelope, *announcements):
                figures.add(position(entry.id)[0] / 1000, message)
    return figures, state


def _version(version: Version) -> list[Any]:
    return [
        version.ref.epoch,
        version.ref.step,
        version.opened,
        version.ready_at,
        version.transport,
        version.parts,
        version.bytes,
        version.stall,
        version.digest,
        len(version.applied),
    ]


async def figures(reader: RunReader) -> dict[str, Any]:
    """Return metrics by step, times by version, and staleness of trained samples."""
    run_figures = (await reader.indexed()).figures
    return {
        "metrics": {name: series.points() for name, series in sorted(run_figures.metrics.items())},
        "times": {name: series.points() for name, series in run_figures.times.items()},
        "staleness": sorted(run_figures.staleness.items()),
    }


async def dead_letters(reader: RunReader) -> dict[str, Any]:
    """Return the last dead letters, each with the first bytes of its payload as text."""
    await reader.indexed()
    around = reader.around
    letters = () if around is None else around.dead
    return {
        "dead": [
            [letter.entry.id, letter.reason, letter.entry.payload[:120].decode("ascii", "replace")]
            for letter in letters
        ]
    }
