"""``trinity-events audit``."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import anyio

from trinity_schemas import ContractError, EnvelopeReader

from ..analysis.audit import Audit, Auditor, LineageBooks
from ..archive.export import whole_stream
from ..archive.format import read_lines
from ..archive.segments import Archive
from ..core.fold import decode_entry
from ..core.lineage import EpochSpan
from ..core.ordinal_ranges import format_ranges
from ..log import Entry, Stream
from ..views.terminal import Terminal, visible
from .options import CheckpointRoot, Json, RedisUrl, checkpoint_root, console, open_log, print_json
from .sources import OptionalRunOrFile, recorded_file

_SHOWN = 32
"""Contradictions that are printed; the others are counted. JSON has all of them."""


def audit(
    run: OptionalRunOrFile = None,
    root: CheckpointRoot = None,
    redis_url: RedisUrl = None,
    as_json: Json = False,
) -> None:
    """Count the fate of each dispatched prompt: trained once, dropped for a reason, or open.

    Counts each lineage by itself: an opening of the run, with the epochs that resumed it. Exits
    with 1 if a prompt is lost or trained twice. With a file, no server is needed.

    Example: trinity-events audit demo-1
    """
    path = None if run is None else recorded_file(run)
    if path is not None:
        header, lines = read_lines(path)
        counted = _Counted(header.run_id)
        for line in lines:
            # The ledger is folded from events alone.
            if line.stream == Stream.EVENTS.value:
                counted.add(line.entry)
    else:
        counted = anyio.run(_count_run, redis_url, run, checkpoint_root(root))
    result = counted.auditor.audit()
    if as_json:
        print_json(result)
    else:
        _print(result, counted.undecodable)
    if not result.balanced:
        sys.exit(1)


class _Counted:
    """Auditor of entries, with the number of those that cannot be decoded."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.auditor = Auditor(run_id)
        self.undecodable = 0
        self._decode = EnvelopeReader().decode

    def add(self, entry: Entry) -> None:
        """Count an entry."""
        try:
            self.auditor.add(decode_entry(self.run_id, entry.payload, self._decode))
        # As in the fold, for which such an entry is a dead letter: it changes no ledger.
        except ContractError:
            self.undecodable += 1


async def _count_run(redis_url: str | None, run: str | None, root: Path) -> _Counted:
    async with open_log(redis_url, run) as log:
        counted = _Counted(log.run_id)
        archive = Archive(root / log.run_id, log.run_id)
        async for entry in whole_stream(log, Stream.EVENTS, archive):
            counted.add(entry)
    return counted


def _print(result: Audit, undecodable: int) -> None:
    out = console()
    for books in result.lineages:
        _print_lineage(out, books)
    for number, what in (
        (result.ignored, "events of rollouts were repeated or of an older epoch, and do not count"),
        (undecodable, "entries cannot be decoded, and do not count"),
    ):
        if number:
            out.print(f"{number} {what}", style="yellow")
    if not result.lineages:
        out.print(f"run {result.run_id} has dispatched no rollouts: there is nothing to audit")
    elif result.balanced:
        out.print(f"the books of run {result.run_id} balance")
    else:
        out.print(f"the books of run {result.run_id} do NOT balance", style="bold red")


def _print_lineage(out: Terminal, books: LineageBooks) -> None:
    dropped = sum(books.dropped.values())
    out.print(f"lineage: {', '.join(map(_span, books.spans))}")
    out.print(
        f"  dispatched {books.dispatched} = trained {books.trained} + dropped {dropped}"
        f"{_by_name(books.dropped)} + open {books.open}"
    )
    discarded = f", and {books.discarded_steps} discarded" if books.discarded_steps else ""
    out.print(f"  {books.steps} training steps{discarded}")
    recomputed = sum(books.recomputed.values())
    out.print(f"  recomputed {recomputed}{_by_name(books.recomputed)}")
    if books.staleness:
        staleness = ", ".join(f"{steps}: {number}" for steps, number in books.staleness.items())
        out.print(f"  staleness in steps, with samples: {staleness}")
    if books.open_ordinals:
        out.print(f"  open: {format_ranges(books.open_ordinals)}")
    for reason, ordinals in books.dropped_ordinals.items():
        out.print(f"  dropped ({visible(reason, lines=False)}): {format_ranges(ordinals)}")
    # Details quote text of any writer, and each is one line.
    for contradiction in books.contradictions[:_SHOWN]:
        detail = visible(contradiction.detail, lines=False)
        out.print(
            f"  {contradiction.name}, epoch {contradiction.epoch}: {detail}", style="bold red"
        )
    if len(books.contradictions) > _SHOWN:
        more = len(books.contradictions) - _SHOWN
        out.print(f"  and {more} more contradictions: see --json", style="bold red")


def _span(span: EpochSpan) -> str:
    last = "" if span.last is None else f" to {span.last}"
    return f"epoch {span.epoch} from step {span.first}{last}"


def _by_name(numbers: Mapping[str, int]) -> str:
    named = ", ".join(f"{name} {number}" for name, number in numbers.items())
    return f" ({named})" if named else ""
