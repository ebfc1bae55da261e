"""The matrix: who is killed, at which boundary, before or after it, and what became of the run."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.faulty_proxy import Command, Fault, Matches, Place

from . import outcome
from .boundaries import (
    COMMANDS,
    Nth,
    Tally,
    last_step_is_committed,
    save_is_under_way,
    sender,
)
from .pipeline import Pipeline
from .plan import PATIENCE, STEPS, kinds_of
from .scenarios import Scenario

VICTIMS = ("worker", "trainer", "reducer", "explorer", "group", "server")
PLACES: tuple[Place, ...] = ("before", "after")


class First(NamedTuple):
    """A kill that makes a boundary come about at all."""

    victim: str
    when: Matches


class Cell(NamedTuple):
    """One disturbance: the victim is killed at the nth time that a boundary is met."""

    victim: str
    boundary: str
    place: Place
    nth: int = 1
    first: First | None = None

    def __str__(self) -> str:
        return f"{self.victim}/{self.boundary}/{self.place}"


# What no undisturbed run has.
AFTER_A_KILL = {
    "run-resumed": First("trainer", last_step_is_committed),
    "lease-expired": First("worker", save_is_under_way),
}


class Result(NamedTuple):
    """What became of a cell."""

    name: str
    faults: list[str]
    seconds: float
    ready: outcome.Ready
    counts: Counter[str]


def undisturbed() -> Result:
    """The run that the others are compared with; it is what it was planned to be."""
    planned = frozenset((step, kind) for step in range(1, STEPS + 1) for kind in kinds_of(step))
    return run_with("undisturbed", Pipeline.start, planned, {})


def cells(counts: Counter[str]) -> list[Cell]:
    """Every victim at every boundary that was met in an undisturbed run, and at two others."""
    met = [
        *sorted(set(counts) - set(COMMANDS)),
        *(command for command in COMMANDS if counts[command]),
    ]
    kinds = [
        *((boundary, _nth(boundary, counts[boundary]), None) for boundary in met),
        *((boundary, 1, first) for boundary, first in AFTER_A_KILL.items()),
    ]
    return [
        Cell(victim, boundary, place, nth, first)
        for boundary, nth, first in kinds
        for victim in VICTIMS
        for place in PLACES
    ]


def _nth(boundary: str, times: int) -> int:
    """In the middle of the run; early for what comes more or less often as time has it."""
    return min(times, 2) if boundary in COMMANDS else (times + 1) // 2


def run(cell: Cell, expected: outcome.Ready) -> Result:
    """Run the pipeline once, disturbed as the cell says, and compare it with what is expected."""
    faults: list[Fault] = []

    def disturb(pipeline: Pipeline) -> None:
        faults.extend(_disturb(pipeline, cell))
        pipeline.start()

    result = run_with(str(cell), disturb, expected, {"durable": cell.victim == "server"})
    if not all(fault.struck.is_set() for fault in faults):
        result.faults.append("the boundary was never met")
    return result


def run_scenario(scenario: Scenario, expected: outcome.Ready) -> Result:
    """As :func:`run`, for a disturbance of another kind."""
    return run_with(scenario.name, scenario.disturb, expected, scenario.options)


def run_with(
    name: str,
    disturb: Callable[[Pipeline], list[str] | None],
    expected: outcome.Ready,
    options: dict[str, Any],
    deadline: float = PATIENCE,
) -> Result:
    """As :func:`run`, for any disturbance; it starts the pipeline, and says what went wrong."""
    began = time.monotonic()
    tally = Tally()
    with tempfile.TemporaryDirectory(prefix="chaos-", ignore_cleanup_errors=True) as folder:
        pipeline = Pipeline(Path(folder), **options)
        with pipeline.running():
            pipeline.proxy.at("after", tally, lambda _: None)
            problems = disturb(pipeline) or []
            lacks = pipeline.until(lambda: outcome.missing(pipeline), deadline)
            problems += pipeline.ended
            ready: outcome.Ready = frozenset()
            if lacks is None:
                read = outcome.read(pipeline)
                problems += outcome.faults(pipeline.place, read, expected)
                ready = read.ready
            else:
                problems.append(f"stuck: {lacks}; {pipeline.last_words()}")
    return Result(name, problems, time.monotonic() - began, ready, tally.counts)


def _disturb(pipeline: Pipeline, cell: Cell) -> list[Fault]:
    """Arrange for the cell's kill, and for the one before it."""
    nth = Nth(cell.boundary, cell.nth)
    if cell.first is None:
        return [_killing(pipeline, cell.victim, cell.place, nth, cell.boundary)]
    first = _killing(pipeline, cell.first.victim, "after", cell.first.when, "save-started")
    then = _killing(
        pipeline,
        *(cell.victim, cell.place, lambda given: first.struck.is_set() and nth(given)),
        cell.boundary,
    )
    return [first, then]


def _killing(pipeline: Pipeline, victim: str, place: Place, when: Matches, boundary: str) -> Fault:
    def kill(given: Command) -> None:
        # Of the workers, the one that speaks.
        speaker = sender(given, boundary)
        rank = speaker.rank if speaker is not None and speaker.role == "actor" else 0
        pipeline.kill(f"worker-{rank}" if victim == "worker" else victim)

    return pipeline.proxy.at(place, when, kill)
