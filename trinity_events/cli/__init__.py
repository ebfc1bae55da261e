"""The command line: ``trinity-events COMMAND``. Each command has a file of its own."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line; whoever interrupts it, while it is loaded too, sees no traceback."""
    try:
        from .app import run

        run()
    except KeyboardInterrupt:
        sys.exit(130)
