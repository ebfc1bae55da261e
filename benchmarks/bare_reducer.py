"""Reducer without a checkpoint root: it folds, commits and announces, but archives nothing.

Usage: python -m benchmarks.bare_reducer URL RUN; ends when standard input is closed.
"""

from __future__ import annotations

import sys
from pathlib import Path

import anyio

from trinity_events.cli.reducer import until_stopped
from trinity_events.reducer import reduce_all


def main(url: str, run_id: str) -> None:
    """Run the reducer."""
    root: Path | None = None
    anyio.run(until_stopped, lambda: reduce_all(url, run_id=run_id, root=root), True)


if __name__ == "__main__":
    main(*sys.argv[1:])
