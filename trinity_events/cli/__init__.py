"""The command line: ``trinity-events COMMAND``. Each command has a file of its own."""

from __future__ import annotations

import sys

from ..system.signals import exit_on_signals, write_stacks_on_signal

__all__ = ["main"]


def main() -> None:
    """Run the command line; an interrupt, even during imports, prints no traceback."""
    try:
        exit_on_signals()
        write_stacks_on_signal()
        # Loaded inside: an interrupt meanwhile must print no traceback either.
        from .app import run

        run()
    except KeyboardInterrupt:
        sys.exit(130)  # 128 and the number of SIGINT, as a shell reports it
