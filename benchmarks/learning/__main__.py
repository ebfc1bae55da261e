"""Command that trains the runs of the plan, and writes the page of them.

Usage: python -m benchmarks.learning [--only TEXT ...] [--folder FOLDER] [--list] [--keep]

Each run that has no result in the folder is trained, one at a time. A command that is interrupted
goes on where it was: with the run that it was in. --only takes the runs whose names contain one of
the texts. --keep trains nothing, and writes the results in the folder to docs/benchmarks/learning
and to docs/learning.md.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from trinity_events.system.signals import exit_on_signals

from ..measure import say
from . import page
from .plan import LearningRun, plan
from .results import Results
from .running import RunFailed, perform

FOLDER = Path("learning-runs")
"""Folder of results, of the one that the command runs in."""
_USUAL = {True: 90.0, False: 150.0}
"""Seconds that a run takes on two cores without other work, by whether it is alone."""


def main() -> None:
    """Parse the arguments, and train."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.learning",
        description="Train the same runs through the pipeline and without it.",
    )
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="runs whose names contain it")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="results, one file a run")
    parser.add_argument("--list", action="store_true", help="list the runs, and train none")
    parser.add_argument("--keep", action="store_true", help="write results to docs, train none")
    given = parser.parse_args()
    results = Results(given.folder)
    runs = [run for run in plan() if given.only is None or any(t in run.name for t in given.only)]
    if given.list:
        for run in runs:
            print(f"{run.name:50} {'finished' if results.read(run.name) else '-'}")
    elif given.keep:
        page.keep([result for run in plan() if (result := results.read(run.name)) is not None])
    else:
        exit_on_signals()  # in order, so that no process remains
        train(runs, results)


def train(runs: Sequence[LearningRun], results: Results) -> None:
    """Train the runs that have no result, and say how long the others will take."""
    pending = [run for run in runs if results.read(run.name) is None]
    say(f"{len(runs) - len(pending)} of {len(runs)} runs are finished in {results.folder}")
    took = dict(_USUAL)
    failed = []
    for number, run in enumerate(pending):
        remaining = sum(took[run.alone] for run in pending[number:])
        place = len(runs) - len(pending) + number + 1
        say(f"[{place}/{len(runs)}] {run.name}; {_format_remaining(remaining)}")
        began = time.monotonic()
        try:
            result = perform(run, results)
        except RunFailed as error:
            say(f"  {error}")
            failed.append(run.name)
            continue
        took[run.alone] = time.monotonic() - began
        first, last = result.curve[0], result.curve[-1]
        say(f"  exact on held-out questions {first.exact:.2f} -> {last.exact:.2f}")
    if failed:
        sys.exit(f"{len(failed)} runs failed: {', '.join(failed)}")


def _format_remaining(seconds: float) -> str:
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"about {f'{hours} h ' if hours else ''}{minutes} min to go"


if __name__ == "__main__":
    main()
