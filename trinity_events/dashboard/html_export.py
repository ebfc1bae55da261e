"""One file with the pages of a run and their data, which a browser opens without a server."""

from __future__ import annotations

import base64
import gzip
import hashlib
import logging
import re
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec

from ..errors import TrinityError
from . import queries
from .board import DashboardLimits
from .run_reader import RunReader
from .samples import read_for_file
from .search import FOUND, Search, search_events
from .sources import DashboardSource
from .timeline import Row, build_rows, count_cells, read_bars

logger = logging.getLogger(__name__)

STATIC = Path(__file__).parent / "static"
MODULES = (
    *("format.js", "source.js", "runs.js", "learning.js", "overview.js", "versions.js"),
    "figures.js",
    *(
        "ledger.js",
        "health.js",
        "samples.js",
        "search.js",
        "event.js",
        "timeline.js",
        "scrubber.js",
        "app.js",
    ),
)
"""Modules of the pages: each imports those before it alone."""
_STATES = 160
_STATE_BYTES = 16 << 20
"""Most states of the past, and their bytes before compression."""
_EVENTS = 3000
"""Last events that can be searched for; failures of the whole run are there too."""
_SPANNED = 20_000
"""Last entries whose spans the timeline has; the rest of it has numbers of events by time."""
_SPANS = 40_000
_PIXELS = 8000
_FAILURES = ("save-failed", "step-failed", "version-refused", "lease-expired", "deadline-reached")

IMPORT = re.compile(r'^import (\{[^}]*\}) from "\./(\w+\.js)";\n', re.MULTILINE)
"""Import of a module, with its names: the only form that a bundle has an equivalent of."""
_EXPORT = re.compile(r"^export (?:async )?(?:function|class|const) (\w+)", re.MULTILINE)


async def build_html(source: DashboardSource) -> str:
    """Return the pages of a run with summaries of its log, as one file.

    Raises:
        NotIndexed: if the log cannot be read.
    """
    reader = RunReader(source, DashboardLimits().turn_entries)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(reader.run)
        await reader.indexed()
        while not reader.caught_up and reader.problem is None:
            await reader.changed(reader.version, 1.0)
        await reader.wait_for_facts()
        data = await _data(reader)
        tasks.cancel_scope.cancel()
    return _page(data)


async def _data(reader: RunReader) -> dict[str, Any]:
    now = await queries.get_now(reader)
    return {
        "now": now | {"live": False, "note": _format_note(now)},
        "lanes": await queries.get_lanes(reader),
        "overview": await queries.get_overview(reader),
        "versions": await queries.get_versions(reader),
        "figures": await queries.get_figures(reader),
        "learning": await queries.get_learning(reader),
        "dead": await queries.get_dead_letters(reader),
        "timeline": await _timeline(reader),
        "states": await _states(reader),
        "found": await _search_results(reader),
        "record": await _record(reader),
    }


def _format_note(now: dict[str, Any]) -> str:
    return (
        "A file with summaries of this run: it has its newest events, all failures, and states of "
        f"the past at some of its {now['number']:,} events."
    )


async def _record(reader: RunReader) -> dict[str, Any] | None:
    """Return the newest recorded steps; None without a record that can be read."""
    record = reader.source.record
    if record is None:
        return None
    try:
        return await anyio.to_thread.run_sync(read_for_file, record)
    # The pages of the log are worth having without it.
    except TrinityError as error:
        logger.warning("the file has no samples: %s", error)
        return None


async def _timeline(reader: RunReader) -> dict[str, Any]:
    """Return the spans of the last entries, and the counts of all, by lane."""
    history = await reader.indexed()
    begin, end = history.begin, max(reader.end, history.last)
    rows = [Row(lane.name, lane.role, lane.rank, lane.rank) for lane in history.lanes]
    first = max(history.first, history.number - _SPANNED)
    since = begin
    if first > history.first:
        since = (await queries.get_state(reader, number=first))["at"]
    bars = await read_bars(reader, since, end)
    resolution = (end - since) / _PIXELS
    return {
        "rows": [row.name for row in rows],
        "since": since,
        "width": history.activity.width,
        "cells": count_cells(history, begin, end, rows),
        "spans": build_rows(bars, rows, history, since, resolution, _SPANS)["spans"],
    }


async def _states(reader: RunReader) -> list[dict[str, Any]]:
    """Return states of the past: around what stands out, and at even distances."""
    history = await reader.indexed()
    last = await queries.get_state(reader, number=history.number)
    size = len(msgspec.json.encode(last))
    # States of thousands of explorers are large: the file has fewer of them then.
    most = max(8, min(_STATES, _STATE_BYTES // max(1, size)))
    marks = [mark.number for mark in history.marks][-most // 3 :]
    # Before and after: a viewer compares the two.
    candidates = {number for mark in marks for number in (mark - 1, mark)}
    parts = max(2, most - len(candidates))
    length = history.number - history.first
    candidates |= {history.first + length * part // parts for part in range(parts + 1)}
    numbers = sorted(number for number in candidates if history.first <= number <= history.number)
    return [await queries.get_state(reader, number=number) for number in numbers]


async def _search_results(reader: RunReader) -> list[list[Any]]:
    """Return the last events and all failures that stand out, newest first."""
    rows: dict[tuple[int, str, str], list[Any]] = {}
    for types, most in (((), _EVENTS), (_FAILURES, _EVENTS)):
        before, count = None, 0
        while count < most:
            query = Search(types=types, before=before, limit=FOUND)
            page = await search_events(reader, query)
            count += len(page["found"]) + 1
            rows |= {(row[0], row[3], row[4]): row for row in page["found"]}
            before = page["before"]
            if before is None:
                break
    return sorted(rows.values(), key=lambda row: row[0], reverse=True)


def _page(data: dict[str, Any]) -> str:
    """Return the file: the page with its style, its script and the data inside."""
    style, script = (STATIC / "style.css").read_text(), bundle()
    charts = (STATIC / "vendor" / "uPlot.iife.min.js").read_text()
    charts_style = (STATIC / "vendor" / "uPlot.min.css").read_text()
    icon = base64.b64encode((STATIC / "icon.svg").read_bytes()).decode()
    policy = (
        # By hashes: a file has no server of its own that scripts could be allowed from.
        f"default-src 'none'; script-src '{_hash(script)}' '{_hash(charts)}'; "
        f"style-src '{_hash(style)}' '{_hash(charts_style)}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    # In base64: a text of the run such as "</script>" would end the element.
    packed = base64.b64encode(gzip.compress(msgspec.json.encode(data), 9)).decode()
    page = (STATIC / "index.html").read_text()
    for written, instead in (
        ('<meta charset="utf-8">', f'<meta charset="utf-8">\n{_meta(policy)}'),
        ('href="icon.svg"', f'href="data:image/svg+xml;base64,{icon}"'),
        (
            '<link rel="stylesheet" href="vendor/uPlot.min.css">',
            f"<style>{charts_style}</style>",
        ),
        ('<link rel="stylesheet" href="style.css">', f"<style>{style}</style>"),
        ('<script src="vendor/uPlot.iife.min.js"></script>', f"<script>{charts}</script>"),
        ('<script type="module" src="app.js"></script>\n', ""),
        (
            "</body>",
            f'<script type="application/json" id="data">{packed}</script>\n'
            f'<script type="module">{script}</script>\n</body>',
        ),
    ):
        # A page that was changed must not lose one of them unnoticed.
        assert page.count(written) == 1, written
        page = page.replace(written, instead)
    return page


def bundle() -> str:
    """Return all modules as one script, each a function that returns what it exports."""
    # Browsers load no modules of a page that was opened as a file.
    parts = ["const modules = {};"]
    for name in MODULES:
        text = (STATIC / name).read_text()
        exported = ", ".join(_EXPORT.findall(text))
        body = IMPORT.sub(r'const \1 = modules["\2"];\n', text)
        body = _EXPORT.sub(lambda match: match[0].removeprefix("export "), body)
        parts.append(f'modules["{name}"] = (() => {{\n{body}\nreturn {{ {exported} }};\n}})();')
    return "\n".join(parts)


def _meta(policy: str) -> str:
    return f'<meta http-equiv="content-security-policy" content="{policy}">'


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
