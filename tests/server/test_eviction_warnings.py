"""Servers that may drop keys are warned of."""

import os
import subprocess
import sys

import pytest

from tests.support.redis_servers import cluster, servers
from tests.support.waits import child
from trinity_events import training_run
from trinity_events.server import WEIGHTS_SERVER, connect, warn_of_eviction

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def evicting(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evicting")
    with servers(folder, 1, "--maxmemory-policy", "allkeys-lru") as [server]:
        yield server


TOLD = "may drop keys of the log once its memory is full (maxmemory-policy allkeys-lru): set maxm"


@pytest.mark.processes
def test_a_reducer_warns_of_a_server_with_an_eviction_policy(evicting, tmp_path):
    arguments = ("reducer", "--redis-url", evicting.url, "--checkpoint-root", str(tmp_path))
    with child(
        [sys.executable, "-m", "trinity_events", *arguments],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ,
    ) as reducer:
        assert any(TOLD in line for line in reducer.stderr)


def test_a_training_loop_is_warned_of_it_too(evicting, run_id, caplog):
    with training_run(run_id, redis_url=evicting.url):
        assert TOLD in caplog.text
    assert evicting.url in caplog.text


async def test_of_a_cluster_each_node_counts(tmp_path, caplog):
    with cluster(tmp_path) as nodes:
        async with connect(nodes[0].url) as client:
            await warn_of_eviction(client, nodes[0].url)
            assert caplog.text == ""
            with nodes[2].client() as admin:
                admin.config_set("maxmemory-policy", "volatile-ttl")
            await warn_of_eviction(client, nodes[0].url)
            assert "maxmemory-policy volatile-ttl" in caplog.text


async def test_nothing_is_warned_of_where_nothing_is_evicted(redis_url, evicting, caplog):
    async with connect(redis_url) as client:
        await warn_of_eviction(client, redis_url)
    assert caplog.text == ""
    async with connect(evicting.url) as client:
        await warn_of_eviction(client, evicting.url, setting=WEIGHTS_SERVER)
    assert "may drop weight chunks" in caplog.text
