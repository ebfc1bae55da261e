"""``make chaos``: runs the matrix and prints it; with ``--keep`` it goes into the documentation."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from . import matrix, table
from .matrix import Result
from .scenarios import SCENARIOS

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"


def main() -> int:
    """Run what was asked for; returns 1 when anything was not as it should be."""
    options = _options()
    first = matrix.undisturbed()
    _tell("undisturbed", first)
    if first.faults:
        return 1
    began = time.monotonic()
    cells = [cell for cell in matrix.cells(first.counts) if options.only in str(cell)]
    others = [scenario for scenario in SCENARIOS if options.only in scenario.name]
    tasks: list[Callable[[], Result]] = [
        *(lambda cell=cell: matrix.run(cell, first.ready) for cell in cells),
        *(lambda other=other: matrix.run_scenario(other, first.ready) for other in others),
    ]
    results = _run(tasks * options.times, options.parallel)
    seconds = time.monotonic() - began
    by_name = {
        result.name: result for result in sorted(results, key=lambda result: len(result.faults))
    }
    text = table.table(cells, others, by_name)
    text += table.summary(results, seconds)
    print(f"\n{text}")
    if options.keep:
        PAGE.write_text(table.with_matrix(PAGE.read_text(), text))
    return 1 if any(result.faults for result in results) else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make chaos", description=__doc__)
    parser.add_argument("--only", default="", help="what a cell's name must hold, as reducer/")
    parser.add_argument("--times", type=int, default=1, help="how often each is run")
    parser.add_argument("--parallel", type=int, default=2, help="how many run at once")
    parser.add_argument("--keep", action="store_true", help=f"write it into {PAGE.name}")
    options = parser.parse_args()
    if options.keep and options.only:
        parser.error("--keep is for the whole matrix: leave --only out")
    return options


def _run(tasks: list[Callable[[], Result]], parallel: int) -> list[Result]:
    results = []
    pool = ThreadPoolExecutor(parallel)
    try:
        for number, done in enumerate(as_completed([pool.submit(task) for task in tasks]), 1):
            results.append(done.result())
            _tell(f"{number}/{len(tasks)} {results[-1].name}", results[-1])
    finally:
        pool.shutdown(cancel_futures=True)
    return results


def _tell(what: str, result: Result) -> None:
    print(f"{what:60} {result.seconds:5.1f} s  {'; '.join(result.faults) or 'ok'}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
