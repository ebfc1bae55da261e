"""Queries of pages: bounded summaries of a run, as plain data."""

from __future__ import annotations

import re
from itertools import islice
from typing import Any

import anyio.to_thread
import msgspec
from msgspec import structs

from trinity_schemas import Envelope, StepRef, event_tag

from ..analysis.causes import LiveFacts, select_processes
from ..analysis.changes import changes
from ..analysis.explain import explain
from ..analysis.goodput import GoodputReader
from ..analysis.proof import Proof
from ..core import MonitorState
from ..core.fold_state import format_producer
from ..log import Entry, before, position
from ..replay import Folded, fold_each
from ..views import state_as_json
from ..views.changes import format_change, is_relevant
from ..views.goodput import (
    format_fate,
    format_headline,
    format_rates,
    format_stragglers,
    format_unmeasured,
    format_waste,
    list_shares,
)
from .categories import CATEGORIES, TYPES, find_category, find_step
from .history import History
from .run_reader import RunReader
from .search import FOUND, SEARCHED, format_fields
from .series import Figures, Version, sample
from .state_view import build_causes, build_view, compare_digests, format_weights_proof

_MATRIX = 24
"""Versions of the matrix, the last ones."""
_SPARKS = 160
"""Points of a metric in the overview: about as many as its picture has pixels."""
_HELD_OUT = re.compile(r"eval/[^/]+/mean")
_HELD_OUT_SETS = 2
"""Sets of held-out questions in the overview; the figures have them all."""
_LEARNING = {
    "reward": ("reward", "reward/mean"),
    "response length": ("response_length", "response_tokens"),
    "entropy": ("entropy", "rollout_entropy"),
    "KL": ("kl", "kl_loss", "approx_kl", "ppo_kl"),
}
"""Words of the overview to the metrics that may have them, the first that a run reports."""
_BEFORE = 8000
"""Entries before a moment of the past from which its versions are read."""


async def get_now(reader: RunReader) -> dict[str, Any]:
    """Return the newest state, with the progress of the index."""
    history = await reader.indexed()
    state = reader.newest
    assert state is not None
    now, has_facts = reader.now, reader.facts is not None
    facts = reader.facts or LiveFacts(now=now)
    late = 0 if facts.unfolded_since is None else facts.now - facts.unfolded_since
    # Ages of the facts are those of the moment at which they were read.
    facts = structs.replace(facts, now=now, unfolded_since=now - late if late else None)
    return build_view(state, now, _digests(history)) | {
        # Without the facts of a live run, another process would be blamed than `explain` names.
        "causes": build_causes(state, facts) if has_facts or not reader.source.is_live else [],
        "unfolded": late,
        "processes": []
        if state.closed is not None
        else [
            [name, process.pid, process.condition]
            for name, process in sorted(select_processes(state, facts).items())
        ],
        "live": reader.source.is_live,
        "progress": reader.progress,
        "problem": reader.problem,
        "note": reader.note,
        "indexed": history.number,
        "first": history.first,
        "begin": history.begin,
        "end": max(reader.end, history.last),
        "groups": list(facts.groups),
    }


async def get_engines(reader: RunReader) -> dict[str, Any]:
    """Return the servers that explorers drive, each with the version that it has proven.

    A server without a version, or whose explorer has stopped, is not to be asked.
    """
    await reader.indexed()
    state = reader.newest
    assert state is not None
    return {
        "engines": [
            {
                "explorer": name,
                "url": explorer.endpoint,
                "status": explorer.shown_status,
                "version": msgspec.to_builtins(explorer.version),
                "digest": explorer.digest,
                "proof": explorer.proof,
                "applied_at": explorer.applied_at,
                "heard_at": explorer.last_heard_at,
            }
            for name, explorer in state.explorers.items()
            if explorer.endpoint is not None
        ]
    }


def _digests(history: History) -> dict[StepRef, str]:
    """Return the digests of the ready weight versions that are known."""
    return {
        ref: version.digest for ref, version in history.figures.versions.items() if version.digest
    }


async def get_state(
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
        number = await reader.find_number(entry)
    elif time is not None:
        number = await reader.find_number_at(time)
    elif number is None:
        number = (await reader.indexed()).number
    result = await reader.at(number)
    history = await reader.indexed()
    state = result.state
    now = position(state.position)[0]
    view = build_view(state, now, _digests(history)) | {
        "causes": build_causes(state, LiveFacts(now=now)),
        "first": history.first,
        "indexed": history.number,
        "problem": result.problem,
        "event": None if result.envelope is None else _event(result.entry, result.envelope),
        "announcements": [
            _event(result.entry, announcement) for announcement in result.announcements
        ],
    }
    if whole:
        view["whole"] = state_as_json(state)
    if changed and number > history.first:
        former = state_as_json((await reader.at(number - 1)).state)
        found_changes = filter(is_relevant, changes(former, state_as_json(state)))
        view["changed"] = [format_change(change) for change in islice(found_changes, FOUND)]
    return view


def _event(entry: Entry | None, envelope: Envelope) -> dict[str, Any]:
    """Return an event with its fields, and as a line."""
    assert entry is not None
    return {
        "entry": entry.id,
        "type": event_tag(envelope.event),
        "category": find_category(envelope.event),
        "producer": format_producer(envelope.producer),
        "node": envelope.producer.node,
        "epoch": envelope.epoch,
        "step": find_step(envelope.event),
        "line": format_fields(entry.id, envelope),
        "fields": msgspec.to_builtins(envelope.event, str_keys=True),
    }


async def explain_step(reader: RunReader, step: int) -> dict[str, Any]:
    """Return the explanation of a step by the newest state, and the entries that prove it.

    Entries are sought in the last blocks with events of the step, at most :data:`SEARCHED`.
    """
    history = await reader.indexed()
    state = reader.newest
    assert state is not None
    # Kept, for two passes: a proof takes all announcements before the events.
    folded_entries: list[Folded] = []
    blocks = [
        block for block in history.blocks.all if block.least_step <= step <= block.greatest_step
    ]
    # The last ones: what decided the outcome of a step comes at its end.
    for block in blocks[-SEARCHED:]:
        start = await reader.at(block.number)
        entries = await reader.source.read(before(block.first), limit=block.entries)
        # In a thread: a block of a thousand entries would hold up all other answers.
        folded_entries += await anyio.to_thread.run_sync(list, fold_each(start.state, entries))
    proof = Proof(step)
    for folded in folded_entries:
        for announcement in folded.announcements:
            proof.add_announcement(folded.entry.id, announcement)
    for folded in folded_entries:
        if folded.envelope is not None:
            proof.add(folded.entry.id, folded.envelope)
    return {
        "step": step,
        "words": explain(state, step, now=reader.now, named=None) if step in state.steps else "",
        "proof": msgspec.to_builtins(proof.entries[:FOUND]),
    }


async def get_lanes(reader: RunReader) -> dict[str, Any]:
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


async def get_overview(reader: RunReader) -> dict[str, Any]:
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


async def get_versions(reader: RunReader, number: int | None = None) -> dict[str, Any]:
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
        # Not from the beginning: the versions of a moment were opened shortly before it.
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
                compare_digests(applied.digest, version.digest),
                "" if applied.proof is None else format_weights_proof(applied.proof),
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
    for entry, envelope, announcements, _ in fold_each(state, entries):
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


async def get_figures(reader: RunReader) -> dict[str, Any]:
    """Return metrics by step, times by version, and staleness of trained samples."""
    run_figures = (await reader.indexed()).figures
    return {
        "metrics": {name: series.points() for name, series in sorted(run_figures.metrics.items())},
        "times": {name: series.points() for name, series in run_figures.times.items()},
        "staleness": sorted(run_figures.staleness.items()),
        "goodput": build_goodput(run_figures.goodput, reader.now / 1000),
    }


def build_goodput(reader: GoodputReader, now: float) -> dict[str, Any] | None:
    """Return where worker-seconds and tokens went, as tables; None without reported times."""
    goodput = reader.goodput(now)
    if not goodput.workers:
        return None
    return {
        "words": format_headline(goodput),
        "rates": format_rates(goodput),
        "roles": {
            role: [[format_fate(fate), fate, share] for fate, share in shares.items()]
            for role, shares in list_shares(goodput).items()
        },
        "tokens": list(goodput.tokens.items()),
        "waste": list(format_waste(goodput)),
        "slow": list(format_stragglers(goodput.stragglers)),
        "unmeasured": format_unmeasured(goodput),
    }


async def get_learning(reader: RunReader) -> dict[str, Any]:
    """Return the metrics by which a user sees if a run learns, each with its last points.

    The overview asks for them again and again: they are a dozen kilobytes, and all figures may be
    megabytes.
    """
    run_figures = (await reader.indexed()).figures
    metrics = run_figures.metrics
    goodput = build_goodput(run_figures.goodput, reader.now / 1000)
    held_out = sorted(name for name in metrics if _HELD_OUT.fullmatch(name))
    shown = {
        label: next((name for name in names if name in metrics), None)
        for label, names in _LEARNING.items()
    }
    shown |= {_format_set(name): name for name in held_out[:_HELD_OUT_SETS]}
    return {
        "metrics": {
            label: sample(metrics[name].points(), _SPARKS)
            for label, name in shown.items()
            if name is not None
        },
        "goodput": None if goodput is None else _summarize_goodput(goodput),
    }


def _summarize_goodput(goodput: dict[str, Any]) -> list[str]:
    """Return the goodput, and what took most of the rest: the start of a short run, or a waste."""
    name, fate, share = max(goodput["roles"]["all"], key=lambda row: row[2], default=("", "", 0.0))
    start = [f"{share:.1%} {name}"] if fate == "starting" else []
    return [goodput["words"], *start, *goodput["waste"][:1]]


def _format_set(metric: str) -> str:
    """Return the words for the mean reward of a set; every set's begin in the same way."""
    name = metric.split("/")[1]
    return name if name.startswith("held-out") else f"held-out {name}"


async def get_dead_letters(reader: RunReader) -> dict[str, Any]:
    """Return the last dead letters, each with the first bytes of its payload as text."""
    await reader.indexed()
    return {
        "dead": [
            # As ASCII: the payload may be anything, and is shown as text.
            [letter.entry.id, letter.reason, letter.entry.payload[:120].decode("ascii", "replace")]
            for letter in reader.dead_letters
        ]
    }
