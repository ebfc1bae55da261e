"""Fixtures that several files of tests/weights share."""

from types import SimpleNamespace

import pytest

from tests.support.pipeline import reducer_task
from tests.support.transport_processes import CHUNK, Where
from tests.support.waits import PATIENCE
from trinity_events import Synchronizer
from trinity_events.server import open_client
from trinity_events.system.shared_memory import available
from trinity_events.weights import SharedMemoryStore
from trinity_events.weights.tensors import copy_bytes
from trinity_workers.config.sections.sync import SyncConfig
from trinity_workers.explorer.installer import VersionPrefetcher


@pytest.fixture
def shared_memory_stores():
    made = [SharedMemoryStore() for _ in range(2)]
    yield made
    for store in made:
        store.close()


@pytest.fixture
def prefetching_ends(publisher, redis_url, weights_url, run_id):
    """Trainer, explorer, and the explorer's prefetcher."""
    trainer = Synchronizer(
        run_id,
        publisher.epoch,
        redis_url=redis_url,
        weights_url=weights_url,
        transport="shm",
        chunk_bytes=CHUNK,
    )
    explorer = Synchronizer(run_id, 0, redis_url=redis_url, weights_url=weights_url)
    config = SimpleNamespace(
        run_id=run_id, epoch=publisher.epoch, redis_url=redis_url, sync=SyncConfig(timeout=PATIENCE)
    )
    yield trainer, explorer, VersionPrefetcher(config, explorer)
    trainer.close()
    explorer.close()


@pytest.fixture(
    params=[
        "redis",
        *(
            pytest.param(name, marks=pytest.mark.skipif(not available(), reason="none"))
            for name in ("shm", "device")
        ),
    ]
)
def shard_stores(request, weights_url):
    """Those of two publishing ranks, and a reader's."""
    made = [Where(request.param, weights_url).store() for _ in range(3)]
    yield made
    for store in made:
        store.close()


@pytest.fixture
def weights_client(weights_url):
    with open_client(weights_url) as connected:
        yield connected


@pytest.fixture
async def trainer(publisher, redis_url, weights_url, run_id):
    """Publishes as rank 0, with a reducer running."""
    made = Synchronizer(
        run_id, publisher.epoch, redis_url=redis_url, weights_url=weights_url, chunk_bytes=64
    )
    async with reducer_task(redis_url, run_id):
        yield made
    made.close()


@pytest.fixture
def explorer(redis_url, weights_url, run_id):
    made = Synchronizer(
        run_id, 0, redis_url=redis_url, weights_url=weights_url, role="explorer", rank=1
    )
    yield made
    made.close()


@pytest.fixture
def copied(monkeypatch):
    """Sizes of what was copied into the model from what was published."""
    sizes = []

    def counting(target, source, nbytes):
        sizes.append(nbytes)
        copy_bytes(target, source, nbytes)

    monkeypatch.setattr("trinity_events.weights.applying.speculative_load.copy_bytes", counting)
    return sizes
