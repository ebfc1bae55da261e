"""Output to terminals, which shows control characters instead of sending them.

Every text passes here, since any writer of a run can put escape sequences into names and messages.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterable
from typing import TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

_OBEYED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]", re.UNICODE
)
"""Control characters except line feed and tab, and characters that change text direction."""
_NEW_CELL = re.compile("[\t\n]")


def visible(text: str, *, lines: bool = True) -> str:
    r"""Return the text with control characters written out, as \x1b.

    Args:
        text: The text, from any writer.
        lines: True to keep line feeds and tabs; False to write them out, too.
    """
    # Also characters that turn the direction of text, by which a line may read as another one.
    shown = _OBEYED.sub(_written_out, text)
    return shown if lines else _NEW_CELL.sub(_written_out, shown)


def _written_out(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode()


def print_out(text: str, *, lines: bool = True, file: TextIO | None = None) -> None:
    """Print text on standard output, or to a file; ``lines`` as in :func:`visible`."""
    print(visible(text, lines=lines), file=file)


def print_err(text: str) -> None:
    """Print lines on standard error."""
    print(visible(text), file=sys.stderr)


class Terminal(Console):
    """Console that sends its own styles alone; text is no markup.

    Args:
        stderr: True to write to standard error.
        width: Columns; by default those of the terminal.
        file: File to write to instead.
    """

    def __init__(
        self, *, stderr: bool = False, width: int | None = None, file: TextIO | None = None
    ) -> None:
        super().__init__(
            stderr=stderr, width=width, file=file, highlight=False, markup=False, emoji=False
        )

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Render, and write out the control characters of all text."""
        for segment in super().render(renderable, options):
            # Rich's own, such as movements of the cursor: text has none after visible().
            if segment.control:
                yield segment
            else:
                yield Segment(visible(segment.text), segment.style)


class LogFormatter(logging.Formatter):
    """Formatter of log records, which writes out control characters."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the text of a record and its traceback."""
        return visible(super().format(record))
