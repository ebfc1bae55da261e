"""``trinity-events goodput``."""

from __future__ import annotations

from pathlib import Path

import anyio

from trinity_schemas import ContractError, EnvelopeReader

from ..analysis.goodput import Goodput, GoodputReader
from ..archive.export import whole_stream
from ..archive.format import read_lines
from ..archive.segments import Archive
from ..core.fold import decode_entry
from ..log import Entry, Stream, position
from ..views.goodput import (
    format_headline,
    format_rates,
    format_stragglers,
    format_unmeasured,
    format_waste,
    seconds_table,
    tokens_table,
)
from .options import CheckpointRoot, Json, RedisUrl, checkpoint_root, console, open_log, print_json
from .sources import OptionalRunOrFile, recorded_file


def goodput(
    run: OptionalRunOrFile = None,
    root: CheckpointRoot = None,
    redis_url: RedisUrl = None,
    as_json: Json = False,
) -> None:
    """Print where worker-seconds and sampled tokens went, and what wasted them.

    Works while a run goes on, on finished runs, and on those that were killed and resumed. With a
    file, no server is needed.

    Example: trinity-events goodput demo-1
    """
    path = None if run is None else recorded_file(run)
    result = _read_file(path) if path else anyio.run(_read_run, redis_url, run, root)
    if as_json:
        print_json(result)
    else:
        _print(result)


class _GoodputEntries:
    """Reader of entries; those that cannot be decoded are passed over, as in the fold."""

    def __init__(self, run_id: str) -> None:
        self.goodput = GoodputReader(run_id)
        self._decode = EnvelopeReader().decode

    def add(self, entry: Entry) -> None:
        """Take an entry."""
        try:
            envelope = decode_entry(self.goodput.run_id, entry.payload, self._decode)
        except ContractError:
            return
        # The id is the server's time: processes on hosts with other clocks are comparable by it.
        self.goodput.add(position(entry.id)[0] / 1000, envelope)


def _read_file(path: Path) -> Goodput:
    header, lines = read_lines(path)
    entries = _GoodputEntries(header.run_id)
    for line in lines:
        if line.stream == Stream.EVENTS.value:
            entries.add(line.entry)
    # A file ends with its last entry; the seconds since then belong to no worker.
    return entries.goodput.goodput()


async def _read_run(redis_url: str | None, run: str | None, root: Path | None) -> Goodput:
    async with open_log(redis_url, run) as log:
        entries = _GoodputEntries(log.run_id)
        archive = Archive(checkpoint_root(root) / log.run_id, log.run_id)
        async for entry in whole_stream(log, Stream.EVENTS, archive):
            entries.add(entry)
        return entries.goodput.goodput(await log.now() / 1000)


def _print(result: Goodput) -> None:
    out = console()
    out.print(f"run {result.run_id}: {format_headline(result)}")
    if not result.workers:
        return
    out.print(format_rates(result))
    out.print()
    out.print(seconds_table(result))
    out.print(format_unmeasured(result))
    if result.tokens:
        out.print()
        out.print(tokens_table(result))
    for title, lines in (
        ("wasted or waited, by cause", format_waste(result)),
        ("slow processes", format_stragglers(result.stragglers)),
    ):
        shown = list(lines)
        if shown:
            out.print()
            out.print(title)
        for line in shown:
            out.print(f"  {line}")
