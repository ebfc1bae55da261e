"""A run's state, and the list of runs, as tables."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from trinity_schemas import Kind

from ..core import MonitorState, explain
from ..core.state import KINDS


def runs_table(states: Iterable[MonitorState]) -> Table:
    """One line a run."""
    table = Table(box=None, pad_edge=False)
    for column in ("RUN", "OPENED", "EPOCH", "TRAINER", "STEP", *(kind.upper() for kind in KINDS)):
        table.add_column(column, no_wrap=True)
    for state in states:
        table.add_row(
            state.run_id,
            _when(state.opened_at),
            str(state.epoch),
            _trainer(state),
            str(state.trainer_step),
            *(_pointer(state, kind) for kind in KINDS),
        )
    return table


def status_panel(
    state: MonitorState, silent_since: int | None = None, *, now: int | None = None
) -> RenderableType:
    """Everything about one run that one looks for first.

    Args:
        state: The run's state.
        silent_since: The milliseconds of its last entry, where nobody is there any more.
        now: Milliseconds of the server's clock to which ages are counted; by default those of
            the last entry of the log.
    """
    silent = silent_since is not None
    head = Text.assemble(
        ("run ", "dim"),
        (state.run_id, "bold"),
        ("  epoch ", "dim"),
        str(state.epoch),
        ("  trainer ", "dim"),
        f"{'silent' if silent else _trainer(state)} at step {state.trainer_step}",
        ("  entries ", "dim"),
        f"{state.entries}",
        ("  opened ", "dim"),
        _when(state.opened_at),
    )
    ready = Table(box=None, pad_edge=False)
    for column in ("READY", "STEP", "SINCE", "DIGEST"):
        ready.add_column(column)
    for kind in KINDS:
        pointer = state.ready.get(kind)
        if pointer is not None:
            since = _when(int(pointer.entry_id.partition("-")[0]))
            ready.add_row(kind, _pointer(state, kind), since, (pointer.digest or "")[:20])
    explorers = Table(box=None, pad_edge=False)
    for column in ("EXPLORER", "STATUS", "SERVES", "SINCE"):
        explorers.add_column(column)
    for name, explorer in sorted(state.explorers.items()):
        serves = "nothing yet" if explorer.version is None else f"step {explorer.version.step}"
        status: str = explorer.status
        if status != "stopped" and (silent or state.closed == "failed"):
            status = "silent" if silent else "lost"
        explorers.add_row(name, status, serves, _when(explorer.applied_at))
    about: list[Text] = []
    if state.transport is not None:
        chosen = f"{state.transport.name}: {state.transport.reason}"
        about.append(Text.assemble(("weights travel by ", "dim"), chosen))
    if state.closed_error is not None:
        about.append(Text(state.closed_error, style="red"))
    lines = [
        Text(explain(state, step, now=now), style="yellow")
        for step, found in sorted(state.steps.items())
        if any(kind.outcome is None for kind in found.kinds.values())
    ]
    if state.anomaly_counts:
        counts = ", ".join(f"{name} {count}" for name, count in state.anomaly_counts.items())
        lines.append(Text(f"Anomalies: {counts}.", style="red"))
        last = state.anomalies[-1]
        lines.append(Text(f"Last: {last.detail} (entry {last.entry_id}).", style="red"))
    if silent:
        about.append(Text(_nobody(state, silent_since), style="red"))
    return Group(head, *about, Text(), ready, Text(), explorers, *lines)


def _nobody(state: MonitorState, since: int | None) -> str:
    # Between steps a trainer shows no sign of life: without a reducer it may be there, and slow.
    return (
        "Nobody seems to be there any more: the run is open, but no reducer leads it, and none of "
        f"its processes was heard of since {_when(since)}. If it was killed, run it again under "
        f"this name, or look at what it did with: trinity-events replay {state.run_id}"
    )


def _pointer(state: MonitorState, kind: Kind) -> str:
    pointer = state.ready.get(kind)
    if pointer is None:
        return "-"
    return f"{pointer.at.step}" + (f" (epoch {pointer.at.epoch})" if pointer.at.epoch > 1 else "")


def _trainer(state: MonitorState) -> str:
    return state.closed or state.trainer or "-"


def _when(milliseconds: int | None) -> str:
    if milliseconds is None:
        return "-"
    return datetime.fromtimestamp(milliseconds / 1000).strftime("%Y-%m-%d %H:%M:%S")
