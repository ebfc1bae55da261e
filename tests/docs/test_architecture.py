"""Claims about the walks of docs/architecture.md: their files exist, and they grow no longer."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("trinity_events", "workers/trinity_workers")
WALKS = {
    "From a finished save to `step-ready`": 12,
    "A tensor from engine to model": 15,
    "The call, the announcement and the report of a version": 7,
    "A prompt from the task to the training batch": 20,
}
"""Most files of each walk, those in brackets included."""


def walk(title: str) -> list[str]:
    page = (ROOT / "docs" / "architecture.md").read_text()
    section = page.partition(f"## {title}\n")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    assert rows
    return [path for row in rows for path in re.findall(r"`([\w/]+\.py)`", row)]


@pytest.mark.parametrize("title", WALKS)
def test_every_file_of_a_walk_is_there_and_it_has_no_more_than_before(title: str) -> None:
    paths = walk(title)
    missing = [path for path in paths if not any((ROOT / top / path).is_file() for top in PACKAGES)]
    assert missing == []
    assert len(set(paths)) <= WALKS[title]
