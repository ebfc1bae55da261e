"""Draws docs/demo.svg: the end of a demo, and what status shows of it, as they print them.

Usage: python docs/picture.py [--steps N]

Runs a demo to its end, in a folder of its own: two minutes on two cores.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

PICTURE = Path(__file__).parent / "demo.svg"
RUN = "grpo-words"
_COLUMNS = 118
_LOADED_FONTS = re.compile(r"\s*@font-face \{.*?\}", re.DOTALL)
"""Rich would have them loaded from elsewhere."""


def printed(home: Path, *command: str) -> str:
    """Return what a command prints to a terminal of the picture's width, with its colours."""
    terminal, end = os.openpty()
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("TRINITY_")},
        "TRINITY_HOME": str(home),
        "COLUMNS": str(_COLUMNS),
        "TERM": "xterm-256color",
    }
    with subprocess.Popen(  # noqa: S603
        [sys.executable, "-m", "trinity_events", *command],
        env=environment,
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


def drawn(shown: list[tuple[str, str]], home: str) -> str:
    """Return the picture of commands with what they printed, as if in the default folder."""
    console = Console(record=True, width=_COLUMNS, file=Path(os.devnull).open("w"))  # noqa: SIM115
    for command, output in shown:
        console.print(Text(f"$ {command}", style="bold"))
        console.print(
            Text.from_ansi(
                output.replace(f"TRINITY_HOME={home} ", "").replace(home, "~/.trinity-events")
            )
        )
    picture = console.export_svg(title="trinity-events", theme=MONOKAI, unique_id="demo")
    return _LOADED_FONTS.sub("", picture)


def main() -> None:
    """Run the demo, and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", default="150")
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        home = Path(folder)
        demo = ("demo", "--run", RUN, "--steps", steps, "--explorers", "2")
        shown = [
            (" ".join(("trinity-events", *command)), printed(home, *command))
            for command in (demo, ("status", RUN))
        ]
    PICTURE.write_text(drawn(shown, str(home)))


if __name__ == "__main__":
    main()
