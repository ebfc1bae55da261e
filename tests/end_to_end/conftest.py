"""Fixtures of whole runs."""

import pytest

from tests.support.run_processes import Processes


@pytest.fixture
def processes(tmp_path, run_id, redis_url, weights_url):
    started = Processes(tmp_path, run_id, redis_url, weights_url)
    yield started
    started.end()
