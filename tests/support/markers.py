"""Markers that follow from fixtures, and the check that a test is marked for what it starts."""

from __future__ import annotations

import functools
import importlib.util
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

OF_FIXTURES = {
    "redis_url": ("server",),
    "weights_url": ("server",),
    "cli": ("processes",),
    "rank_processes": ("processes", "heavy"),
    "ray_cluster": ("ray", "heavy"),
}
"""Fixture to the markers of the tests that use it, themselves or by another fixture."""


def mark_by_fixtures(items: Iterable[pytest.Item]) -> None:
    """Add the markers of the fixtures that all tests share; all others are written by hand."""
    for item in items:
        for fixture in OF_FIXTURES.keys() & set(getattr(item, "fixturenames", ())):
            for marker in OF_FIXTURES[fixture]:
                item.add_marker(marker)


HEAVY_WORD = re.compile(
    r"\b(heavy|ray_cluster|rank_processes|rank_group|engine_ranks|converting)\b"
)
"""The marker, and the fixtures that add it: a file without any of them has no heavy test."""
ALL_HEAVY = re.compile(r"^pytestmark = .*\bheavy\b", re.MULTILINE)


def has_none_for(expression: str, text: str) -> bool:
    """Return whether an expression of markers leaves out all tests of a file with this text.

    Only expressions that begin as those of ``make test`` do are looked at.
    """
    if expression.startswith("heavy"):
        return not HEAVY_WORD.search(text)
    return expression.startswith("not heavy") and bool(ALL_HEAVY.search(text))


def check_heavy_words(items: Iterable[pytest.Item]) -> None:
    """Refuse a heavy test in a file that the heavy tests of ``make test`` would leave out."""
    heavy = {item.path: item.nodeid for item in items if item.get_closest_marker("heavy")}
    for path, test in heavy.items():
        if has_none_for("heavy", path.read_text()):
            raise pytest.UsageError(f"{test} is heavy, and no word of its file says so")


class StartedProcesses:
    """Processes that a test starts, itself or in its fixtures, without the marker that says so."""

    def __init__(self) -> None:
        self._markers: frozenset[str] = frozenset()
        self.unmarked: dict[str, str] = {}
        """Missing marker to the first command for which it is missing."""

    def begin(self, markers: Iterable[str]) -> None:
        """Begin a test that has these markers."""
        self._markers, self.unmarked = frozenset(markers), {}

    def record(self, command: Any) -> None:
        """Record a command that is started."""
        words = [command] if isinstance(command, str | bytes | Path) else list(command)
        if words[0] == "uname":  # platform's, which libraries ask as they are imported
            return
        needed = needed_marker([str(word) for word in words])
        if needed not in self._markers:
            self.unmarked.setdefault(needed, " ".join(map(str, words))[:200])

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record in the block what this process starts; what its children start is not seen."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(subprocess.Popen, "__init__", self._recording(subprocess.Popen.__init__))
            patch.setattr(BaseProcess, "start", self._recording(BaseProcess.start))
            yield

    def _recording(self, start: Callable[..., None]) -> Callable[..., None]:
        def recorded(process: Any, *args: Any, **keywords: Any) -> None:
            self.record(args[0] if args else keywords.get("args", [type(process).__name__]))
            start(process, *args, **keywords)

        return recorded


def needed_marker(words: list[str]) -> str:
    """Return the marker that a test needs that starts a command."""
    if any(word.startswith(ray_folder()) for word in words):
        return "ray"
    if "server" in Path(words[0]).name or any("server/reaper.py" in word for word in words):
        return "server"
    return "processes"


@functools.cache
def ray_folder() -> str:
    """Return the folder of the package, wherever it is installed, without importing it."""
    spec = importlib.util.find_spec("ray")
    assert spec is not None
    assert spec.origin is not None
    return f"{Path(spec.origin).parent}/"
