"""Timeline of a window: the bars of each row, or counts where there are too many events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio.to_thread
from msgspec import Struct
from msgspec.structs import astuple

from ..core import MonitorState
from ..log import Entry
from ..replay import fold_each
from .bars import Bar, build_bars, merge_bars
from .history import OTHERS, History, Lane
from .run_reader import InvalidQuery, RunReader

DETAILED = 6000
"""Maximum entries of a window whose events are shown; a longer one has counts instead."""
ROWS = 80
"""Maximum rows of a timeline."""
BARS = 6000
"""Maximum bars of a timeline."""


class Row(Struct, frozen=True):
    """Row of a timeline: one lane, or the lanes of a role with ranks in a range."""

    name: str
    role: str
    first: int
    last: int

    def shows(self, lane: Lane) -> bool:
        """Return True if the row shows a lane."""
        return lane.role == self.role and self.first <= lane.rank <= self.last


def parse_rows(text: str) -> list[Row]:
    """Return the rows of a list such as ``trainer-0,explorer:0-63``.

    Raises:
        InvalidQuery: if a name is neither a lane nor a range of lanes.
    """
    rows: list[Row] = []
    # Cut before it is parsed: the query comes from outside.
    for name in text.split(",")[:ROWS] if text else ():
        role, colon, ranks = name.rpartition(":")
        if name == OTHERS:
            role, ranks = OTHERS, "0-0"
        elif not colon:
            role, _, ranks = name.rpartition("-")
            ranks = f"{ranks}-{ranks}"
        first, _, last = ranks.partition("-")
        if not role or not (first.isdigit() and last.isdigit()):
            raise InvalidQuery("lane", name)
        rows.append(Row(name, role, int(first), int(last)))
    return rows


async def get_timeline(
    reader: RunReader, begin: int, end: int, pixels: int, rows: Sequence[Row]
) -> dict[str, Any]:
    """Return the bars of each row in a window, or counts if there are too many events.

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
    # Counts come from the index; bars need the entries, which are read and folded again.
    if history.blocks.count_between(begin, end) > DETAILED:
        cells = await anyio.to_thread.run_sync(count_cells, history, begin, end, rows)
        return answer | {"mode": "counts", "width": history.activity.width, "cells": cells}
    if history is tail:
        empty = MonitorState(run_id=reader.source.run_id, epoch=history.state.epoch)
        # From the largest id of the millisecond before: all of the window's entries follow.
        bars = await _read_bars_after(reader, empty, f"{begin - 1}-{2**64 - 1}", begin, end)
    else:
        bars = await read_bars(reader, begin, end)
    resolution = (end - begin) / max(100, pixels)
    return answer | {"mode": "spans"} | build_rows(bars, rows, history, begin, resolution)


def count_cells(history: History, begin: int, end: int, rows: Sequence[Row]) -> list[list[Any]]:
    """Return the counts of each row: row, milliseconds, category, count."""
    activity, cells = history.activity, []
    for number, row in enumerate(rows):
        sums: dict[tuple[int, int], int] = {}
        for lane, lane_info in enumerate(history.lanes):
            if row.shows(lane_info):
                for bucket, category, count in activity.cells(lane, begin, end):
                    sums[bucket, category] = sums.get((bucket, category), 0) + count
        for (bucket, category), count in sums.items():
            cells.append([number, activity.begin + bucket * activity.width, category, count])
    return cells


async def read_bars(reader: RunReader, begin: int, end: int) -> list[Bar]:
    """Return the bars of a window; those that began before it come from the state at its begin."""
    history = await reader.indexed()
    first = await reader.find_number_at(begin - 1) if begin > history.begin else history.first
    start = (await reader.at(max(first, history.first))).state
    return await _read_bars_after(reader, start, start.position, begin, end)


async def _read_bars_after(
    reader: RunReader, start: MonitorState, after: str, begin: int, end: int
) -> list[Bar]:
    """Return the bars of the entries after a position, up to the end of a window."""
    entries: list[Entry] = []
    async for page in reader.pages(after, f"{end}-{2**64 - 1}"):
        entries += page
    return await anyio.to_thread.run_sync(_build_bars, start, entries, begin, end)


def _build_bars(state: MonitorState, entries: list[Entry], begin: int, end: int) -> list[Bar]:
    return list(build_bars(state, fold_each(state, entries), begin, end))


def build_rows(
    bars: list[Bar],
    rows: Sequence[Row],
    history: History,
    begin: int,
    resolution: float,
    most: int = BARS,
) -> dict[str, Any]:
    """Return at most ``most`` bars of rows with one lane, and the counts of rows with several."""
    row_of: dict[str, int] = {}
    grouped: set[int] = set()
    for number, row in enumerate(rows):
        # A row of many ranks has no room for bars, which would lie over one another.
        if row.first != row.last:
            grouped.add(number)
        for lane in history.lanes:
            if row.shows(lane):
                row_of[lane.name] = number
    single = [bar for bar in bars if row_of.get(bar.lane, -1) not in {-1, *grouped}]
    shown = merge_bars(single, resolution)
    width = max(1, int(4 * resolution))
    sums: dict[tuple[int, int, int], int] = {}
    for bar in bars:
        number = row_of.get(bar.lane, -1)
        if number in grouped:
            cell = (number, (bar.end - begin) // width, bar.category)
            sums[cell] = sums.get(cell, 0) + 1
    return {
        "width": width,
        "spans": [[row_of[bar.lane], *astuple(bar)[1:]] for bar in shown[:most]],
        "left_out": max(0, len(shown) - most),
        "cells": [
            [number, begin + bucket * width, category, count]
            for (number, bucket, category), count in sums.items()
        ],
    }
