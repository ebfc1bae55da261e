"""Draws docs/demo.svg: the end of a demo, and what status shows of it, as they print them.

Usage: python docs/picture.py [--steps N]

Runs a demo to its end, in a folder of its own: two minutes on two cores.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from terminal_pictures import drawn, printed

PICTURE = Path(__file__).parent / "demo.svg"
RUN = "grpo-words"


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
    PICTURE.write_text(drawn(shown, home))


if __name__ == "__main__":
    main()
