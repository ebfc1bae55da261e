"""``trinity-events bisect``."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import anyio
import typer

from ..analysis.expressions import BadExpression, Condition
from ..core import MonitorState
from ..errors import TrinityError
from ..replay import Folded
from ..views import fields_as_json, format_folded
from ..views.documents import Bisection, FoldedEntry
from ..views.terminal import print_out
from .options import CheckpointRoot, Json, RedisUrl, print_json
from .sources import RunOrFile, open_states


class BadCondition(TrinityError):
    """The expression is no condition on a state.

    Attributes:
        reason: What is wrong with it; None if it names an unknown field.
        field: The unknown field.
        fields: Fields that there are.
    """

    reason: str | None = None
    field: str = ""
    fields: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.reason is not None:
            return f"{self.reason} (see docs/commands/bisect.md)"
        return f"a state has no field {self.field!r}: there are {', '.join(self.fields)}"


def bisect(
    run: RunOrFile,
    expression: Annotated[
        str,
        typer.Argument(metavar="EXPRESSION", help="Condition on the fields of status --json."),
    ],
    every: Annotated[
        bool,
        typer.Option(
            "--every", help="Ask after every event, for a condition that holds for a while only."
        ),
    ] = False,
    root: CheckpointRoot = None,
    redis_url: RedisUrl = None,
    as_json: Json = False,
) -> None:
    """Find the first event of a run after which a condition on its state is true.

    Exits with 1 if it never is. The language has paths, count(PATH), ==, !=, <, <=, >, >=, in,
    and, or, not: "ready.weights.at.step >= 4", "'disk' in steps.*.kinds.*.failure".

    Example: trinity-events bisect demo-1 "explorers.*.version.step >= 3"

    Example: trinity-events bisect demo-1.jsonl "count(waits) > 2 and closed == null"
    """
    try:
        condition = Condition(expression)
    except BadExpression as error:
        raise BadCondition(str(error)) from None
    # A field that no state has would be searched for in the whole log, and never found.
    unknown = condition.fields - {*MonitorState.__struct_encode_fields__, "*"}
    if unknown:
        fields = tuple(sorted(MonitorState.__struct_encode_fields__))
        raise BadCondition(field=min(unknown), fields=fields)
    run_id, match = anyio.run(partial(_find, run, root, redis_url, condition, every=every))
    if as_json:
        entry = (
            None
            if match is None
            else FoldedEntry(
                id=match.entry.id, envelope=match.envelope, announcements=match.announcements
            )
        )
        print_json(Bisection(run_id=run_id, expression=expression, entry=entry))
    elif match is None:
        hint = (
            "" if every else "; --every asks about each event, for what was true for a while only"
        )
        print_out(
            f"{expression!r} is not true after any event that was asked about{hint}", lines=False
        )
    else:
        for line in format_folded(match):
            print_out(line, lines=False)
    if match is None:
        sys.exit(1)


async def _find(
    run: str, root: Path | None, redis_url: str | None, condition: Condition, *, every: bool
) -> tuple[str, Folded | None]:
    def holds(state: MonitorState) -> bool:
        # Of these fields alone: it may be asked after every entry, and a state may be large.
        return condition(fields_as_json(state, condition.fields))

    async with open_states(run, root, redis_url) as states:
        # Kept states (decision 26) are enough for a condition that stays true once it is.
        find = states.first_of_all if every else states.first_after
        return states.source.run_id, await find(holds)
