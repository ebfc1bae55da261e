"""The command line: ``trinity-events COMMAND``. Each command has a file of its own."""

from .app import main

__all__ = ["main"]
