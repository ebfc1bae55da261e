"""The command line: ``trinity-events COMMAND``. Each command has a file of its own."""

from __future__ import annotations

import signal
import sys
from types import FrameType

from ..signals import ending_signals

__all__ = ["main"]


def main() -> None:
    """Run the command line; an interrupt, even during imports, prints no traceback."""
    for one in ending_signals():
        signal.signal(one, _end)
    try:
        from .app import run

        run()
    except KeyboardInterrupt:
        sys.exit(130)


def _end(number: int, _: FrameType | None) -> None:
    """Exit in order, so that the command cleans up as after an error."""
    sys.exit(128 + number)
