"""Pictures of a terminal: what commands print, drawn as SVG that loads nothing from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

COLUMNS = 118
"""Width of a picture, in characters."""
_LOADED_FONTS = re.compile(r"\s*@font-face \{.*?\}", re.DOTALL)
"""Rich and Textual would have them loaded from elsewhere."""


def environment(home: Path, columns: int = COLUMNS) -> dict[str, str]:
    """Return the environment of a command in a folder of its own, without the caller's servers."""
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("TRINITY_")},
        "TRINITY_HOME": str(home),
        "COLUMNS": str(columns),
        "TERM": "xterm-256color",
    }


def printed(home: Path, *command: str, columns: int = COLUMNS) -> str:
    """Return what a command prints to a terminal of the picture's width, with its colours."""
    terminal, end = os.openpty()
    with subprocess.Popen(  # noqa: S603
        [sys.executable, "-m", "trinity_events", *command],
        env=environment(home, columns),
        stdout=end,
        stderr=subprocess.PIPE,
    ) as process:
        os.close(end)
        parts = []
        while part := _read(terminal):
            parts.append(part)
        _, error = process.communicate()
    os.close(terminal)
    if process.returncode != 0:
        sys.exit(error.decode())
    return b"".join(parts).decode().replace("\r\n", "\n")


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # Linux's end of a terminal that nothing holds open
        return b""


def drawn(
    shown: list[tuple[str, str]], home: Path, *, name: str = "demo", columns: int = COLUMNS
) -> str:
    """Return the picture of commands with what they printed, as if in the default folder.

    Args:
        shown: Each command with its output.
        home: Folder of the run, which the picture does not name.
        name: Prefix of the picture's identifiers, unique on a page.
        columns: Width in characters.
    """
    console = Console(record=True, width=columns, file=Path(os.devnull).open("w"))  # noqa: SIM115
    for command, output in shown:
        console.print(Text(f"$ {command}", style="bold"))
        plain = output.replace(f"TRINITY_HOME={home} ", "").replace(str(home), "~/.trinity-events")
        console.print(Text.from_ansi(plain))
    picture = console.export_svg(title="trinity-events", theme=MONOKAI, unique_id=name)
    return without_fonts(picture)


def without_fonts(picture: str) -> str:
    """Return a picture without the fonts that it would load: the reader's own take their place."""
    return _LOADED_FONTS.sub("", picture)
