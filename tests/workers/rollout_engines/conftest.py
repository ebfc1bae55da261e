"""A trainer that publishes versions, and the synchronizer of an explorer."""

from contextlib import closing

import pytest

from tests.support.pipeline import reducer_task


@pytest.fixture
async def trainer(redis_url, run_id, tmp_path, publisher):
    from trinity_events import Synchronizer  # torch is for the tests that need it

    async with reducer_task(redis_url, run_id, tmp_path):
        with closing(
            Synchronizer(run_id, publisher.epoch, redis_url=redis_url, weights_url=redis_url)
        ) as synchronizer:
            yield synchronizer


@pytest.fixture
def follower(redis_url, run_id):
    from trinity_events import Synchronizer

    with closing(
        Synchronizer(run_id, 0, redis_url=redis_url, weights_url=redis_url, role="explorer")
    ) as synchronizer:
        yield synchronizer
