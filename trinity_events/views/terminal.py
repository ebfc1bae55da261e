"""The one place through which text reaches a terminal.

Escape sequences in names and messages, which any writer of a run can choose, are shown there and
never obeyed.
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
"""Control characters other than line feed and tab, and those that turn the direction of text."""
_NEW_CELL = re.compile("[\t\n]")


def visible(text: str, *, lines: bool = True) -> str:
    r"""Return the text with control characters written out, as \x1b.

    Args:
        text: The text, as anyone may have chosen it.
        lines: Whether it may have several lines and tabs; else they are written out, too.
    """
    shown = _OBEYED.sub(_written_out, text)
    return shown if lines else _NEW_CELL.sub(_written_out, shown)


def _written_out(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()


def say(text: str, *, lines: bool = True, file: TextIO | None = None) -> None:
    """Print text on standard output, or to a file; ``lines`` as in :func:`visible`."""
    print(visible(text, lines=lines), file=file)


def tell(text: str) -> None:
    """Print lines on standard error."""
    print(visible(text), file=sys.stderr)


class Terminal(Console):
    """A console whose own styles are all that a terminal obeys; text is no markup.

    Args:
        stderr: Whether it writes to standard error.
        width: Columns; those of the terminal when left out.
        file: Where it writes instead.
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
            if segment.control:
                yield segment
            else:
                yield Segment(visible(segment.text), segment.style)


class LogFormatter(logging.Formatter):
    """Formats log records; what they quote is shown, and never obeyed."""

    def format(self, record: logging.LogRecord) -> str:
        """Format a record and its traceback."""
        return visible(super().format(record))
