"""``make hangs``: plants hangs in real processes, and asks ``explain`` for their first causes.

Each plant has a server, a run and processes of its own. A cause counts as named if ``explain``
names the culprit before the deadline, and still does a moment later.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from trinity_events.system.signals import exit_on_signals

from .plants import PLANTS, Plant
from .stage import Stage

DEADLINE = 120.0
"""Seconds after a hang was planted within which its cause is to be named."""
PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"
BEGIN, END = "<!-- hangs: written by make hangs -->", "<!-- end of hangs -->"
AT_LEAST = 0.95
"""Part of the plants whose cause must be named: 38 of 40."""


class Named(NamedTuple):
    """Answer of ``explain`` to a plant."""

    plant: Plant
    right: bool
    seconds: float
    """Seconds from the plant to the answer."""
    cause: str
    """First cause, as it was told last."""


def perform(plant: Plant, deadline: float = DEADLINE) -> Named:
    """Plant a hang, and ask until its cause is named or the deadline passes."""
    with tempfile.TemporaryDirectory(prefix="hang-") as folder:
        stage = Stage(plant.name, Path(folder))
        with stage.set(*plant.options):
            stage.open_on(stage.url, plant.strategy)
            plant.plant(stage)
            return _named(plant, stage, deadline)


def _named(plant: Plant, stage: Stage, deadline: float) -> Named:
    began, right = time.monotonic(), 0
    while True:
        document = stage.explain()
        seconds = time.monotonic() - began
        right = right + 1 if plant.is_named(document) else 0
        if right == 2 or seconds > deadline:
            first = document.get("causes") or [{"sentence": "nothing"}]
            return Named(plant, right == 2, seconds, first[0]["sentence"])


def main() -> int:
    """Plant what was asked for; return 1 if too few causes were named."""
    options = _options()
    exit_on_signals()
    chosen = [plant for plant in PLANTS if any(text in plant.name for text in options.only)]
    with ThreadPoolExecutor(options.at_once) as pool:
        results = [_shown(result) for result in pool.map(_performed, chosen)]
    named = sum(result.right for result in results)
    print(f"the first cause of {named} of {len(results)} hangs was named within {DEADLINE:g} s")
    if options.keep:
        keep(results)
    return 0 if named >= AT_LEAST * len(results) else 1


def _performed(plant: Plant) -> Named:
    try:
        return perform(plant)
    except Exception as error:
        return Named(plant, False, 0.0, f"not planted: {type(error).__name__}: {error}")


def _shown(result: Named) -> Named:
    mark = "named" if result.right else "MISSED"
    print(f"{mark:7} {result.plant.name:22} {result.seconds:5.1f} s  {result.cause}", flush=True)
    return result


def table(results: Sequence[Named]) -> str:
    """Return the results as a table of a page."""
    rows = [
        f"| {result.plant.what} | {'yes' if result.right else 'no'} | {result.seconds:.1f} |"
        for result in results
    ]
    return "\n".join(["| hang | first cause named | seconds |", "|---|---|---:|", *rows, ""])


def keep(results: Sequence[Named]) -> None:
    """Write the table to its page. Raises ValueError unless all plants were performed."""
    if len(results) != len(PLANTS):
        raise ValueError("the page shows all plants: leave --only out")
    before, rest = PAGE.read_text().split(BEGIN)
    _, after = rest.split(END)
    named = sum(result.right for result in results)
    total_line = f"{named} of {len(results)} first causes were named."
    PAGE.write_text(f"{before}{BEGIN}\n{total_line}\n\n{table(results)}{END}{after}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make hangs", description=__doc__)
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="TEXT", help="plants whose names contain it"
    )
    parser.add_argument("--at-once", type=int, default=2, help="plants at a time")
    parser.add_argument("--keep", action="store_true", help="write the table to its page")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
