"""Tables of a run's state, and of the list of runs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from trinity_schemas import Kind

from ..analysis.causes import BEHIND, HostProcess, LiveFacts, find_unseen
from ..analysis.explain import format_unfinished
from ..analysis.failures import failures
from ..analysis.hosts import format_silence, format_unseen
from ..checkpoints.layout import final_name
from ..core import MonitorState
from ..core.best_checkpoint import best_checkpoint
from ..core.handlers.rollouts import format_exclusion
from ..core.handlers.waits import chained_waits, format_awaited, remaining_seconds
from ..core.limits import KEPT_EXPLORERS
from ..core.ordinal_ranges import count, format_ranges
from ..core.pauses import format_pause, open_pauses
from ..core.refusals import format_refusal, suspects
from ..core.resumptions import format_resumption
from ..core.state import KINDS, ExplorerState
from ..log import position
from .learning import format_pace, format_reward, format_step
from .terminal import visible
from .times import format_date_time

_TABLED = 16
"""Number of waits that the table shows; the others are counted."""
_EXCLUDED = 8
"""Excluded explorers that are named, the last ones; status --json has them all."""
_PAUSED = 8
"""Paused explorers that are named; status --json has them all."""
_HINTS = 3
"""Runs that did not finish of which the commands to continue are shown, the newest ones."""
_DEEPEST = 8
"""Maximum indentation of a wait in its table."""


def runs_table(runs: Iterable[tuple[MonitorState, int | None]]) -> Table:
    """Return a table with one line per run. A narrow terminal cuts columns, but never the ids.

    Args:
        runs: The state of each run; an abandoned run also has the milliseconds of its last entry.
    """
    table = Table(box=None, pad_edge=False)
    # Read twice: the first time for the column of prompts, which runs without rollouts lack.
    runs = list(runs)
    prompts = ["PROMPTS"] if any(state.ledger is not None for state, _ in runs) else []
    columns = ("TRAINER", "STEP", "REWARD", "CHECKPOINT", "LAST EVENT")
    for column in ("RUN", "OPENED", *columns, *prompts):
        # A table first narrows the columns that may break into lines.
        table.add_column(column, no_wrap=column in ("RUN", "OPENED"))
    for state, silent_since in runs:
        table.add_row(
            state.run_id,
            format_date_time(state.opened_at),
            format_trainer_status(state, silent=silent_since is not None),
            format_step(state).removeprefix("step "),
            "-" if state.learning.reward is None else f"{state.learning.reward:.3g}",
            format_ready_step(state, "checkpoint"),
            format_date_time(position(state.position)[0] if state.entries else None),
            *(visible(_prompts(state), lines=False) for _ in prompts),
        )
    return table


def format_run_hints(runs: Iterable[tuple[MonitorState, int | None]]) -> list[str]:
    """Return what can be done with the runs that need a hand, and with the newest one.

    Args:
        runs: As of :func:`runs_table`, oldest first.
    """
    runs = list(runs)
    broken = [
        (state, "has no live process" if silent_since is not None else f"{state.closed}")
        for state, silent_since in runs
        if silent_since is not None or state.closed in ("failed", "interrupted")
    ]
    hints = [
        f"Continue {state.run_id} ({how}): {state.command}"
        for state, how in broken[-_HINTS:]
        if state.command and not state.is_closed_for_good
    ]
    newest = runs[-1][0]
    look = "watch" if newest.closed is None else "status"
    return [*hints, f"Look at the newest: trinity-events {look} {newest.run_id}, or dashboard"]


def status_panel(
    state: MonitorState,
    facts: LiveFacts | None = None,
    silent_since: int | None = None,
) -> RenderableType:
    """Return the panel of one run's state.

    Args:
        state: The run's state.
        facts: Facts about an open run's processes and server. Ages count to their moment; without
            them, to the last entry.
        silent_since: The milliseconds of the last entry of an abandoned run; else None.
    """
    silent = silent_since is not None
    now = None if facts is None else facts.now
    reports_since = None if facts is None else facts.reports_since
    processes = {} if facts is None else facts.processes
    head = Text.assemble(
        ("run ", "dim"),
        (state.run_id, "bold"),
        ("  epoch ", "dim"),
        str(state.epoch),
        ("  trainer ", "dim"),
        f"{format_trainer_status(state, silent=silent)} at {format_step(state)}",
        ("  entries ", "dim"),
        f"{state.entries}",
        ("  opened ", "dim"),
        format_date_time(state.opened_at),
    )
    about: list[Text] = []
    if reward := format_reward(state):
        about.append(Text.assemble(("reward ", "dim"), reward))
    if now is not None and state.closed is None and state.entries:
        heard = format_age(now - position(state.position)[0])
        pace = Text.assemble(("  pace ", "dim"), format_pace(state)) if format_pace(state) else ""
        about.append(Text.assemble(("last event ", "dim"), heard, pace))
    if state.transport is not None:
        chosen = f"{state.transport.name}: {state.transport.reason}"
        about.append(Text.assemble(("weights travel by ", "dim"), visible(chosen, lines=False)))
    if state.ledger is not None:
        prompts = visible(state.ledger.format_sums(), lines=False)
        about.append(Text.assemble(("prompts ", "dim"), prompts))
    # Shown as characters, not obeyed: any writer of the log chose these words.
    about += [Text(visible(line, lines=False)) for line in format_resumption(state)]
    if state.closed_error is not None:
        about.append(Text(visible(state.closed_error, lines=False), style="red"))
    if now is not None and reports_since is not None and now - reports_since >= BEHIND:
        came = format_age(now - reports_since)
        waiting_reports = f"Reports of explorers wait for a reducer; the oldest one came {came}."
        about.append(Text(waiting_reports, style="red"))
    # An abandoned run has its own sentence, which says as much of all of its processes.
    if not silent and state.silent_trainer is not None:
        about.append(Text(format_silence([state.silent_trainer]), style="red"))
    if silent:
        about.append(Text(_format_abandoned(silent_since), style="red"))
    if silent or state.closed in ("failed", "interrupted"):
        about.append(Text(format_next_step(state), style="red"))
    failed = [
        Text(visible(failure.sentence, lines=False), style="red") for failure in failures(state)
    ]
    waiting = [
        Text(visible(line, lines=False), style="yellow")
        for line in format_unfinished(state, now=now)
    ]
    tables = (
        *((Text(), _ready(state)) if state.ready else ()),
        *((Text(), _explorers(state, now, processes, silent)) if state.explorers else ()),
        *_unlisted(state),
        *_processes(processes),
        *_unseen(state, facts),
        *_evaluations(state, now),
        *_waits_table(state, _find_moment(state, now)),
    )
    return Group(
        head,
        *about,
        *tables,
        *failed,
        *waiting,
        *_pauses(state, _find_moment(state, now)),
        *_exclusions(state),
        *_alarms(state),
        *_reward_errors(state),
        *_refusals(state),
        *_anomalies(state),
    )


def _find_moment(state: MonitorState, now: int | None) -> int:
    """Return ``now``, or the milliseconds of the last entry."""
    return position(state.position)[0] if now is None else now


def _ready(state: MonitorState) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("READY", "STEP", "SINCE", "DIGEST"):
        table.add_column(column)
    for kind in KINDS:
        pointer = state.ready.get(kind)
        if pointer is not None:
            # The time of the entry that made it ready, by the server's clock.
            since = format_date_time(position(pointer.entry_id)[0])
            table.add_row(kind, format_ready_step(state, kind), since, (pointer.digest or "")[:20])
    return table


def _evaluations(state: MonitorState, now: int | None) -> Iterator[RenderableType]:
    """Yield the table of the evaluations on held-out questions, if there were any."""
    if not state.evaluations:
        return
    table = Table(box=None, pad_edge=False)
    for column in ("EVALUATION", "STEP", "SINCE", "RESULT"):
        table.add_column(column)
    for name, evaluated in sorted(state.evaluations.items()):
        shown = [] if evaluated.last is None else [evaluated.last]
        for evaluation in (*shown, *evaluated.open):
            result = visible(
                evaluation.failure or _result(evaluation.metrics) or "open", lines=False
            )
            since = (
                format_date_time(evaluation.since)
                if now is None
                else format_age(now - evaluation.since)
            )
            table.add_row(name, str(evaluation.version.step), since, result)
    yield from (Text(), table)
    if (best := best_checkpoint(state)) is not None and state.best is not None:
        chosen = f"{state.best.name} {state.best.metric} {best.value:.3g}"
        yield Text(f"Best checkpoint: step {best.at.step} ({visible(chosen, lines=False)}), kept")


def _result(metrics: Mapping[str, float]) -> str:
    """Return metrics in words, each with the interval that two others give."""
    parts = []
    for name, value in metrics.items():
        # The ends of an interval stand behind their metric.
        if name.removesuffix("_low").removesuffix("_high") in metrics.keys() - {name}:
            continue
        low, high = metrics.get(f"{name}_low"), metrics.get(f"{name}_high")
        interval = "" if low is None or high is None else f" ({low:.3g} to {high:.3g})"
        parts.append(f"{name} {value:.3g}{interval}")
    return ", ".join(parts)


def _prompts(state: MonitorState) -> str:
    return "-" if state.ledger is None else state.ledger.format_sums()


def _explorers(
    state: MonitorState, now: int | None, processes: Mapping[str, HostProcess], silent: bool
) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("EXPLORER", "STATUS", "SERVES", "PROOF", "SINCE", "HEARD"):
        table.add_column(column)
    for name, explorer in sorted(state.explorers.items()):
        serves = "nothing yet" if explorer.version is None else f"step {explorer.version.step}"
        heard = format_date_time(explorer.last_heard_at)
        if now is not None and explorer.last_heard_at is not None and state.closed is None:
            heard = format_age(now - explorer.last_heard_at)
        process = processes.get(name)
        # Seen on this host, which is newer than what the log has.
        if process is not None and process.condition == "stopped":
            status = "suspended"
        else:
            status = _explorer_status(state, name, explorer, silent=silent)
        proof = explorer.proof or "-"
        table.add_row(name, status, serves, proof, format_date_time(explorer.applied_at), heard)
    return table


def _unlisted(state: MonitorState) -> Iterator[RenderableType]:
    """Yield the sentence on explorers that the state no longer has; nothing without any."""
    if state.unlisted_explorers:
        yield Text(
            f"{count(state.unlisted_explorers):,} more explorers are not listed: the state has the "
            f"{KEPT_EXPLORERS:,} that were heard last. The others have the ranks "
            f"{format_ranges(state.unlisted_explorers)}.",
            style="yellow",
        )


def _processes(processes: Mapping[str, HostProcess]) -> Iterator[RenderableType]:
    """Yield the table of the processes on this host; nothing without any."""
    if not processes:
        return
    table = Table(box=None, pad_edge=False)
    for column in ("PROCESS", "PID", "ON THIS HOST"):
        table.add_column(column)
    for name, process in sorted(processes.items()):
        style = "" if process.condition == "running" else "red"
        table.add_row(visible(name, lines=False), str(process.pid), Text(process.condition, style))
    yield from (Text(), table)


def _unseen(state: MonitorState, facts: LiveFacts | None) -> Iterator[RenderableType]:
    """Yield the sentence on processes of other hosts; nothing without any."""
    sentence = "" if facts is None else format_unseen(find_unseen(state, facts))
    if sentence:
        yield Text(visible(sentence, lines=False), style="dim")


def _waits_table(state: MonitorState, now: int) -> list[RenderableType]:
    """Return a table of the open waits; those of the processes that one names are indented."""
    links = chained_waits(state, now)
    if not links:
        return []
    table = Table(box=None, pad_edge=False)
    for column in ("WAITS", "FOR", "FROM", "SINCE", "GIVES UP"):
        table.add_column(column, overflow="fold", no_wrap=column in ("WAITS", "GIVES UP"))
    for wait, depth in links[:_TABLED]:
        remaining = remaining_seconds(wait, now)
        cells = (wait.what, format_awaited(wait) or "-", format_age(now - wait.since))
        table.add_row(
            # Bounded: a long chain would leave no room for its names.
            "  " * min(depth, _DEEPEST) + visible(wait.by, lines=False),
            *(visible(cell, lines=False) for cell in cells),
            "-" if remaining is None else f"in {remaining:.0f} s",
        )
    more = len(links) - _TABLED
    rest = [Text(f"{more} more waits are open.", style="yellow")] if more > 0 else []
    return [Text(), table, *rest]


def _pauses(state: MonitorState, now: int) -> list[Text]:
    """Return the sentences on engines that stand still; of many, the first ones."""
    pauses = open_pauses(state)
    lines = [
        Text(visible(format_pause(paused, now), lines=False), "yellow")
        for paused in pauses[:_PAUSED]
    ]
    more = len(pauses) - _PAUSED
    return [*lines, *([Text(f"{more} more explorers have paused.", "yellow")] if more > 0 else [])]


def _exclusions(state: MonitorState) -> list[Text]:
    lines = [
        Text(visible(f"{format_exclusion(name, excluded)}.", lines=False), style="red")
        for name, excluded in list(state.excluded.items())[-_EXCLUDED:]
    ]
    more = len(state.excluded) - _EXCLUDED
    if more > 0:
        lines.append(Text(f"{more} more explorers are excluded.", style="red"))
    return lines


def _alarms(state: MonitorState) -> list[Text]:
    return [
        Text(visible(f"Alarm {name}: {alarm.sentence}.", lines=False), style="red")
        for name, alarm in state.alarms.items()
    ]


def _reward_errors(state: MonitorState) -> list[Text]:
    """Return the first reward error, and the number of further causes."""
    if not state.reward_errors:
        return []
    first, *further = state.reward_errors.values()
    more = f", and rewards failed for {len(further)} further causes" if further else ""
    sentence = (
        f"A reward failed: {first.sentence.rstrip('.')}{more} (see trinity-events explain "
        f"{state.run_id})."
    )
    return [Text(visible(sentence, lines=False), style="red")]


def _refusals(state: MonitorState) -> list[Text]:
    if not state.refused:
        return []
    return [
        Text(visible(sentence, lines=False), style="red")
        for sentence in (
            f"Refused weights: {state.refused}. Last: {format_refusal(state.refusals[-1])}",
            *suspects(state.refusals),
        )
    ]


def _explorer_status(
    state: MonitorState, name: str, explorer: ExplorerState, *, silent: bool
) -> str:
    """Return the status of an explorer.

    It is lost if its lease has expired. In a closed run it is lost if the run's end names it.
    """
    # It said so itself, which no later sign contradicts.
    if explorer.status == "stopped":
        return "stopped"
    if silent:
        return "silent"
    if state.closed is None:
        return explorer.shown_status
    # By words, so that explorer-1 is not found in explorer-12.
    named = re.search(rf"\b{re.escape(name)}\b", state.closed_error or "")
    return "lost" if named else "ended"


def _anomalies(state: MonitorState) -> list[Text]:
    if not state.anomaly_counts:
        return []
    counts = ", ".join(f"{name} {count}" for name, count in state.anomaly_counts.items())
    last = state.anomalies[-1]
    return [
        Text(f"Anomalies: {counts}.", style="red"),
        Text(f"Last: {visible(last.detail, lines=False)} (entry {last.entry_id}).", style="red"),
    ]


def _format_abandoned(since: int | None) -> str:
    # A trainer publishes nothing between steps: without a reducer it may be slow.
    return (
        "The run seems abandoned: it is open, but no reducer leads it, and no process of it has "
        f"sent a sign of life since {format_date_time(since)}."
    )


def format_next_step(state: MonitorState) -> str:
    """Return the sentence on how a run goes on that did not finish."""
    look = f"Look at what it did with: trinity-events replay {state.run_id}"
    if state.is_closed_for_good:
        return f"The same command would fail again: the error names the way out. {look}"
    pointer = state.ready.get("checkpoint")
    if pointer is None:
        newest = "No checkpoint is ready: the run, started again under its name, begins at step 1."
    else:
        folder = (
            f", in {final_name(pointer.at.step)} of its directory" if pointer.has_folder else ""
        )
        newest = (
            f"The newest ready checkpoint is that of step {pointer.at.step}{folder}: the run, "
            "started again under its name, goes on from there, or with --fresh from step 1."
        )
    continued = f" Continue it with: {state.command}" if state.command else ""
    return f"{newest}{continued} {look}"


def format_ready_step(state: MonitorState, kind: Kind) -> str:
    """Return the newest ready step of a kind; a dash without one."""
    pointer = state.ready.get(kind)
    if pointer is None:
        return "-"
    return f"{pointer.at.step}" + (f" (epoch {pointer.at.epoch})" if pointer.at.epoch > 1 else "")


def format_age(milliseconds: int) -> str:
    """Return an age in words."""
    seconds = max(0, milliseconds) // 1000
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        # From two on: "1 h ago" would stand for up to two hours.
        if seconds >= 2 * length:
            return f"{seconds // length} {unit} ago"
    return f"{seconds} s ago"


def format_trainer_status(state: MonitorState, *, silent: bool = False) -> str:
    """Return the status of the trainer, or the reason with which the run was closed."""
    return "silent" if silent else state.trainer_status or "-"
