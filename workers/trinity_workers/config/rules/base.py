"""Types that all rules share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

FormatField = Callable[[str], str]
"""Formats the path of a field for a sentence: as an option, a key of a file, or in Markdown."""
Contradictions = Iterator[tuple[tuple[str, ...], str]]
"""Paths of the fields that contradict each other, and a sentence with the way out."""
