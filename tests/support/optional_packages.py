"""Tests of a folder that need a package, skipped where it is not installed."""

from collections.abc import Iterable
from importlib.util import find_spec

import pytest


def skip_without(package: str, items: Iterable[pytest.Item], *, folder: str, reason: str) -> None:
    """Mark the tests of a folder as skipped, if a package that they need is not installed."""
    if find_spec(package) is None:
        skip = pytest.mark.skip(reason=reason)
        for item in items:
            if f"{folder}/" in item.path.as_posix():
                item.add_marker(skip)
