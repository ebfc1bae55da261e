"""Writes each command's help, as the command line prints it, into its page below docs/commands.

Usage: python docs/generate.py
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from unittest import mock

from typer.testing import CliRunner

from trinity_events.cli.app import build

PAGES = Path(__file__).parent / "commands"
BEGIN = "<!-- help: written by docs/generate.py from the command's --help -->"
END = "<!-- end of help -->"
_HELP = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)


def commands() -> list[str]:
    """The commands that are installed, in the order of the command line's own help."""
    found = build().registered_commands
    return [one.name or getattr(one.callback, "__name__", "") for one in found]


def help_of(command: str) -> str:
    """Return the output of ``trinity-events COMMAND --help`` in a terminal of 80 columns."""
    # The caller's terminal and servers must not show in the output.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TRINITY_")}
    with mock.patch.dict(os.environ, {**kept, "COLUMNS": "80"}, clear=True):
        result = CliRunner().invoke(build(), [command, "--help"], prog_name="trinity-events")
    if result.exit_code != 0:
        raise RuntimeError(f"the help of {command} cannot be had: {result.output}")
    return "\n".join(line.rstrip() for line in result.output.strip().splitlines())


def expected(command: str) -> str:
    """The page as it should be: as it is, with the help of today."""
    section = f"{BEGIN}\n\n```text\n{help_of(command)}\n```\n\n{END}"
    page = PAGES / f"{command}.md"
    text = page.read_text() if page.exists() else f"# {command}\n\n{BEGIN}{END}\n"
    if not _HELP.search(text):
        raise RuntimeError(f"{page} lacks the markers between which the help is written")
    return _HELP.sub(lambda _: section, text)


def main() -> None:
    """Write what lags behind; exits 1 when there is a page of no command."""
    known = commands()
    for command in known:
        page, text = PAGES / f"{command}.md", expected(command)
        if not page.exists() or page.read_text() != text:
            page.write_text(text)
            sys.stdout.write(f"docs/commands/{page.name} written\n")
    strays = {page.name for page in PAGES.glob("*.md")} - {f"{one}.md" for one in (*known, "index")}
    if strays:
        sys.exit(f"of no command that is installed: docs/commands/{', '.join(sorted(strays))}")


if __name__ == "__main__":
    main()
