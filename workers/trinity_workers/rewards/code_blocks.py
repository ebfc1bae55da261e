"""Python code of an answer, found by a parser of Markdown.

`code_runner.py` chooses among the blocks: it may parse code, for it runs within limits.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from markdown_it import MarkdownIt

_PYTHON = re.compile(r"[{.\s]*(?:i?python|py)(?![a-z-])", re.IGNORECASE)
"""Info strings such as `python3`, `Python`, `{.python}` and `py title=x`, but not `pycon`."""
_MARKDOWN = re.compile(r"[{.\s]*(?:markdown|md)\b", re.IGNORECASE)
# Sessions of the interpreter, which show the use of a program and are none.
_TRANSCRIPT = re.compile(r"\s*>>>")
_REASONED = re.compile(r"</think(?:ing)?>", re.IGNORECASE)
_FENCE_IN_LINE = re.compile(
    r"^(?=[^`\n]*[^\W\d_])([^`\n]*[^`\s])[ \t]*(```+[\w{.+-]*}?[ \t]*)$", re.MULTILINE
)
"""Fence behind text, such as `Code: ```python`, which models write and CommonMark has not."""
_DEEPEST = 3
"""Blocks of Markdown within one another; each is parsed again."""


def find_code(text: str) -> list[str]:
    """Return the blocks of code in an answer, oldest first; the last one is the program.

    They are the fenced blocks of Python, else those without a language, else those of any. An
    answer without a fence is one block. Reasoning before `</think>` does not count.
    """
    text = _REASONED.split(text)[-1]
    blocks = list(_fenced(text, _DEEPEST))
    code = (
        [content for info, content in blocks if _PYTHON.match(info)]
        or [content for info, content in blocks if not info]
        or [content for _, content in blocks]
    )
    if not code:
        return [text]
    return [block for block in code if not _TRANSCRIPT.match(block)] or code


def _fenced(text: str, deepest: int) -> Iterator[tuple[str, str]]:
    """Yield the info string and the content of each fenced block, also within other blocks."""
    # Split before it is parsed (decision 32).
    text = _FENCE_IN_LINE.sub(r"\1\n\2", text)
    for token in _parser().parse(text):
        info = token.info.strip()
        if token.type == "fence" and not (_MARKDOWN.match(info) and deepest):
            yield info, textwrap.dedent(token.content)
        elif token.type in {"fence", "code_block"} and deepest:
            # A fence that is indented by four spaces is the content of an indented block.
            yield from _fenced(textwrap.dedent(token.content), deepest - 1)


@cache
def _parser() -> MarkdownIt:
    from markdown_it import MarkdownIt  # for runs whose answers are code

    # Without HTML, blocks of which hide fences (<details>), and without what no code needs.
    return MarkdownIt("commonmark").disable(["html_block", "reference", "inline"])
