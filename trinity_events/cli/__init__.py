"""The command line: ``trinity-events COMMAND``. Each command has a file of its own."""

from __future__ import annotations

import signal
import sys
from types import FrameType

__all__ = ["main"]


def main() -> None:
    """Run the command line; whoever interrupts it, while it is loaded too, sees no traceback."""
    signal.signal(signal.SIGTERM, _end)
    try:
        from .app import run

        run()
    except KeyboardInterrupt:
        sys.exit(130)


def _end(number: int, _: FrameType | None) -> None:
    """End in order: what a command has begun is cleared up, as when it fails."""
    sys.exit(128 + number)
