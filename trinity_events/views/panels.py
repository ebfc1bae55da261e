"""Panels of the full-screen view of a run, for 80 columns and more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ..analysis.causes import LiveFacts
from ..analysis.explain import format_unfinished
from ..analysis.failures import failures
from ..analysis.troubles import find_troubles
from ..core import MonitorState
from ..core.fold_state import format_slot
from ..core.handlers.waits import chained_waits, find_wait_chains
from ..core.ordinal_ranges import count as count_ordinals
from ..core.refusals import suspects
from ..core.state import KINDS
from ..log import DeadLetter, position
from .learning import format_held_out, format_pace, format_reward, format_step
from .status import format_age, format_ready_step, format_trainer_status
from .terminal import visible

_LINES = 12
"""Maximum lines of a panel's list; the others are counted."""
_BAR = 20
"""Columns of a progress bar."""
_NO_TIME = "-"
_LONGEST_NAME = 20
"""Columns of the name of a consumer group."""
_GROUPS = 8
"""Maximum consumer groups of the panel of lags; the others are counted."""
_SENTENCES = frozenset({"run failed", "save failed", "saves failed", "weights refused"})
"""Troubles of which the panel has sentences that say more."""
_REDUCER_LATE = 2_000
"""Milliseconds from which an entry that no reducer has folded is shown: some wait at any moment."""


def head_panel(state: MonitorState, now: int) -> RenderableType:
    """Return the panel of the run: its step, its reward, its ready steps and its last event."""
    heard = format_age(now - position(state.position)[0]) if state.entries else _NO_TIME
    ready = "  ".join(f"{kind} {format_ready_step(state, kind)}" for kind in KINDS)
    lines = [
        Text.assemble(
            (visible(state.run_id), "bold"),
            f"  {format_trainer_status(state)}  ",
            (format_step(state), "bold"),
            f"  {format_pace(state)}",
            ("  last event ", "dim"),
            heard,
        ),
    ]
    if reward := format_reward(state):
        lines.append(Text.assemble(("reward: ", "dim"), (reward, "bold")))
    elif state.closed is None and not state.trainer_step:
        lines += _start_lines(state, now)
    lines += [
        Text.assemble((f"{name}: ", "dim"), visible(held_out, lines=False))
        for name, held_out in format_held_out(state)
    ]
    lines.append(Text.assemble(("ready: ", "dim"), ready, ("  epoch ", "dim"), str(state.epoch)))
    if state.ledger is not None:
        lines.append(Text.assemble(("prompts: ", "dim"), visible(state.ledger.format_sums())))
    return Group(*lines)


def _start_lines(state: MonitorState, now: int) -> list[Text]:
    """Return the lines of a run that has trained no step yet: what it waits for, and who is there.

    Every start waits for minutes: a new user would take that for a run that hangs.
    """
    since = "" if state.opened_at is None else f", opened {format_age(now - state.opened_at)}"
    waits = [f"{wait.by} waits for {wait.what}" for wait, _ in chained_waits(state, now)]
    doing = waits[0] if waits else "no process has reported a wait"
    lines = [
        Text.assemble(("starting: ", "dim"), (visible(f"{doing}{since}", lines=False), "bold"))
    ]
    present = sorted(state.hosts.keys() | state.explorers.keys())
    if present:
        more = f" and {len(present) - _LINES} more" if len(present) > _LINES else ""
        names = visible(", ".join(present[:_LINES]), lines=False)
        lines.append(Text.assemble(("there: ", "dim"), f"{names}{more}"))
    return lines


def trouble_panel(state: MonitorState, now: int) -> RenderableType:
    """Return the panel of errors, waits and steps that are not ready."""
    lines = [Text(visible(failure.sentence, lines=False), "red") for failure in failures(state)]
    lines += [
        Text(visible(f"{trouble.count:,} {trouble.words}.", lines=False), "red")
        for trouble in find_troubles(state)
        if trouble.serious and trouble.words not in _SENTENCES
    ]
    if state.closed_error is not None:
        lines.append(Text(visible(state.closed_error, lines=False), "red"))
    lines += [Text(visible(sentence, lines=False), "red") for sentence in suspects(state.refusals)]
    if state.anomaly_counts:
        counts = ", ".join(f"{name} {count}" for name, count in state.anomaly_counts.items())
        lines.append(Text(f"Anomalies: {counts}.", "red"))
    for name, group in state.detached.items():
        lines.append(Text(f"Group {visible(name)} was detached, {group.pending} pending.", "red"))
    sentences = [*find_wait_chains(state, now), *format_unfinished(state, now=now)]
    lines += [Text(visible(sentence, lines=False), "yellow") for sentence in sentences]
    return _first(lines, "Nothing waits, and nothing failed.")


def transfers_panel(state: MonitorState, now: int) -> RenderableType:
    """Return the panel of running saves and of versions that are being published."""
    table = Table(box=None, pad_edge=False, show_header=False)
    rows = 0
    for step, step_state in sorted(state.steps.items()):
        version = step_state.version
        kind = step_state.kinds.get("weights")
        if version is None or (kind is not None and kind.settled):
            continue
        rows += 1
        have, expected = len(version.parts), max(1, len(version.ranks))
        bar = ProgressBar(total=expected, completed=have, width=_BAR)
        age = format_age(now - version.opened_at)
        table.add_row(f"weights {step}", bar, f"{have}/{expected} parts", age)
    # Publications come first; what is left of the lines is for saves.
    for attempt in list(state.attempts.values())[: max(0, _LINES - rows)]:
        # Shown above, as a version with its parts.
        if attempt.slot.kind == "weights":
            continue
        rows += 1
        stage = "runs" if attempt.started else "waits for its turn"
        written = _written(state, attempt.slot.step, attempt.slot.kind)
        about = visible(format_slot(attempt.slot), lines=False)
        table.add_row(about, stage, written, format_age(now - attempt.since))
    if not rows:
        return Text("No save and no publication is under way.", "dim")
    more = len(state.attempts) - rows
    return Group(table, Text(f"and {more} more attempts", "dim")) if more > 0 else table


def explorers_panel(state: MonitorState, now: int) -> RenderableType:
    """Return the panel of versions by explorer: those that are furthest behind first."""
    pointer = state.ready.get("weights")
    newest = pointer.at if pointer is not None else None
    table = Table(box=None, pad_edge=False)
    for column in ("EXPLORER", "STATUS", "SERVES", "BEHIND", "SINCE", "HEARD"):
        table.add_column(column, no_wrap=True)
    behind: dict[str, int] = {}
    for name, explorer in state.explorers.items():
        served = explorer.version
        behind[name] = 0
        if newest is not None:
            # Without a version, an explorer is behind by all steps.
            behind[name] = newest.step - (served.step if served is not None else 0)
    # Those behind first: a panel shows a dozen of thousands.
    order = sorted(state.explorers, key=lambda name: (-behind[name], name))
    for name in order[:_LINES]:
        explorer = state.explorers[name]
        late = behind[name]
        table.add_row(
            visible(name, lines=False),
            explorer.shown_status,
            "-"
            if explorer.version is None
            else f"{explorer.version.epoch}/{explorer.version.step}",
            Text(str(late), "yellow" if late > 1 else ""),
            _format_age(explorer.applied_at, now),
            _format_age(explorer.last_heard_at, now),
        )
    if not order:
        return Text("No explorer was heard of.", "dim")
    # Of all, also of those that the table leaves out.
    versions = Counter(
        "none" if explorer.version is None else f"{explorer.version.step}"
        for explorer in state.explorers.values()
    )
    counts = ", ".join(f"{count} serve step {step}" for step, count in versions.most_common(4))
    more = f"; {len(order) - _LINES} more" if len(order) > _LINES else ""
    if state.unlisted_explorers:
        more += f"; {count_ordinals(state.unlisted_explorers):,} that are not listed"
    return Group(table, Text(f"{counts}{more}", "dim"))


def lags_panel(facts: LiveFacts, dead: Sequence[DeadLetter]) -> RenderableType | None:
    """Return the panel of the readers behind the end of the log; None if there is nothing to show.

    It has the reducer, consumer groups, those that are furthest behind first, and dead letters.
    """
    lines: list[RenderableType] = []
    late = 0 if facts.unfolded_since is None else facts.now - facts.unfolded_since
    if late >= _REDUCER_LATE:
        sentence = f"The reducer has not folded an entry of {format_age(late)}."
        lines.append(Text(sentence, "yellow"))
    if facts.groups:
        lines.append(_groups_table(facts))
    if dead:
        last = dead[-1]
        when = format_age(facts.now - position(last.entry.id)[0])
        reason = visible(last.reason, lines=False)
        lines.append(Text(f"Last dead letter, {when}: {reason}", "red", no_wrap=True))
    return Group(*lines) if lines else None


def _groups_table(facts: LiveFacts) -> RenderableType:
    table = Table(box=None, pad_edge=False, collapse_padding=True)
    for column in ("GROUP", "STREAM", "MEMBERS", "LAG", "PENDING", "OLDEST", "LAST READ"):
        table.add_column(column, no_wrap=True)
    order = sorted(facts.groups, key=lambda group: (group.caught_up, -group.pending, group.name))
    for group in order[:_GROUPS]:
        since = None if group.oldest_pending is None else position(group.oldest_pending)[0]
        table.add_row(
            visible(group.name, lines=False)[:_LONGEST_NAME],
            group.stream,
            str(group.members),
            _NO_TIME if group.lag is None else Text(str(group.lag), "yellow" if group.lag else ""),
            Text(str(group.pending), "yellow" if group.pending else ""),
            _format_age(since, facts.now),
            _NO_TIME if group.idle is None else format_age(int(group.idle * 1000)),
        )
    more = len(order) - _GROUPS
    return Group(table, Text(f"and {more} more groups", "dim")) if more > 0 else table


def _written(state: MonitorState, step: int, kind: str) -> str:
    """Return the bytes that the running saves of a kind reported, in MB."""
    step_state = state.steps.get(step)
    kinds = {} if step_state is None else step_state.kinds
    slots = next(
        (kind_state.slots.values() for name, kind_state in kinds.items() if name == kind), ()
    )
    written = sum(max(slot.progress.values(), default=0) for slot in slots)
    return f"{written / 1e6:,.0f} MB" if written else ""


def _format_age(at: int | None, now: int) -> str:
    return _NO_TIME if at is None else format_age(now - at)


def _first(lines: list[Text], otherwise: str) -> RenderableType:
    if not lines:
        return Text(otherwise, "green")
    more = len(lines) - _LINES
    return Group(*lines[:_LINES], *([Text(f"and {more} more", "dim")] if more > 0 else []))
