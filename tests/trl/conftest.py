"""TRL's trainer, whose loss is compared with ours."""

from __future__ import annotations

from importlib.util import find_spec

import pytest


def pytest_collection_modifyitems(items):
    if find_spec("trl") is None:
        skip = pytest.mark.skip(reason="TRL is not installed: run make verl")
        for item in items:
            if "tests/trl/" in item.path.as_posix():
                item.add_marker(skip)
