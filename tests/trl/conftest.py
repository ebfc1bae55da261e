"""TRL's trainer, whose loss is compared with ours."""

from __future__ import annotations

from tests.support.optional_packages import skip_without


def pytest_collection_modifyitems(items):
    reason = "TRL is not installed: run make verl"
    skip_without("trl", items, folder="tests/trl", reason=reason)
