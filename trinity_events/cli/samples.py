"""``trinity-events samples``."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import typer

from ..record.columns import SUMMARY_COLUMNS
from ..record.reader import TRAINED, RecordMissing, RolloutRecord
from ..views.samples import build_table, format_sample, format_step
from ..views.terminal import print_out
from .options import CheckpointRoot, RunArgument, checkpoint_root, console, parse_run_id


class Order(StrEnum):
    """Orders of samples, by the column that they sort by."""

    reward = "reward"
    length = "length"
    advantage = "advantage"
    staleness = "staleness"
    ordinal = "ordinal"


_COLUMNS = {
    Order.reward: "reward",
    Order.length: "completion_tokens",
    Order.advantage: "advantage",
    Order.staleness: "staleness",
}


def samples(
    run: RunArgument,
    step: Annotated[
        int | None,
        typer.Option(
            "--step", min=1, help="Step that trained on them; by default the newest recorded one."
        ),
    ] = None,
    ordinal: Annotated[
        int | None,
        typer.Option("--ordinal", min=0, help="Show all turns of the answers to this question."),
    ] = None,
    fate: Annotated[
        str,
        typer.Option(
            "--fate",
            help="Fate of the answers: trained, or such as stale, filtered or surplus; discarded "
            "for all that no step trained on.",
        ),
    ] = TRAINED,
    sort: Annotated[
        Order, typer.Option("--sort", help="Order: the largest first, or by question.")
    ] = Order.ordinal,
    reverse: Annotated[bool, typer.Option("--reverse", help="Turn the order.")] = False,
    limit: Annotated[
        int, typer.Option("--limit", "-n", min=1, help="Number of samples to show.")
    ] = 40,
    root: CheckpointRoot = None,
) -> None:
    """Show what a run's model answered: the recorded samples of a step.

    They are read from the run's folder; no server is needed. What is recorded is set by the
    section record of the run's configuration.

    Example: trinity-events samples demo-1 --step 40 --sort reward

    Example: trinity-events samples demo-1 --step 40 --ordinal 163

    Example: trinity-events samples demo-1 --fate filtered
    """
    run_id = parse_run_id(run)
    record = RolloutRecord(checkpoint_root(root) / run_id, run_id)
    # A table shows neither texts nor tokens: without these columns, thousands of samples are read
    # in milliseconds.
    columns = None if ordinal is not None else (*SUMMARY_COLUMNS, "preview")
    if fate == TRAINED:
        recorded = record.find_step(step)
        rows = record.read(recorded, columns, ordinal=ordinal)
    else:
        recorded, rows = record.find_fate(fate, step, columns)
        rows = [row for row in rows if ordinal in (None, row["ordinal"])]
    if ordinal is not None and not rows:
        raise RecordMissing(run_id, "ordinal", record.folder, step=recorded.step, ordinal=ordinal)
    shown = _sort(rows, sort, reverse=reverse)[:limit]
    print_out(format_step(run_id, recorded, rows, fate))
    if ordinal is None:
        console().print(build_table(shown))
    else:
        for row in shown:
            print_out("")
            for line in format_sample(row):
                print_out(line)
    if len(shown) < len(rows):
        print_out(f"{len(rows) - len(shown)} more: --limit shows them")


def _sort(rows: list[dict[str, Any]], order: Order, *, reverse: bool) -> list[dict[str, Any]]:
    if order is Order.ordinal:
        return rows[::-1] if reverse else rows
    column = _COLUMNS[order]

    def key(row: dict[str, Any]) -> float:
        value = row[column]
        # Last in the default order, as if it had the least value.
        return float("-inf") if value is None else float(value)

    return sorted(rows, key=key, reverse=not reverse)
