"""Error replies of a server that is there: told as they are, with the way out."""

import re

import pytest

from tests.support.errors import raises
from tests.support.event_histories import committed
from tests.support.redis_servers import servers
from tests.support.scripted_server import scripted_server
from tests.support.waits import PATIENCE
from trinity_events.errors import DeadlineExceeded, EventsMissing, PublishError, ServerRefuses
from trinity_events.log import Publisher, SyncEventLog, new_producer, open_run
from trinity_events.log.redis.error_replies import reply_text
from trinity_events.log.retry import is_transient
from trinity_events.server import Deadline, connect, connect_sync, open_client

pytestmark = pytest.mark.server

NOWHERE = 1
GIVEN_UP = 4.0
"""Seconds after which clients have given up on a replica, which may become a primary."""
REFUSING = {
    "OOM command not allowed .*: it is full; raise its maxmemory": ("CONFIG SET", "maxmemory", 1),
    "READONLY You can't write .*: it is a replica; name the": ("REPLICAOF", "127.0.0.1", NOWHERE),
    "NOREPLICAS Not enough .*: it waits for": ("CONFIG SET", "min-replicas-to-write", 1),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with servers(tmp_path_factory.mktemp("refusing"), 1) as [started]:
        yield started


@pytest.mark.parametrize("truth", REFUSING)
async def test_what_a_server_refuses_is_told_with_its_code_and_the_way_out(server, run_id, truth):
    with open_client(server.url) as admin:
        publisher = Publisher(SyncEventLog(open_client(server.url), run_id), 1, new_producer("a"))
        patience = GIVEN_UP if "READONLY" in truth else 0.5
        admin.execute_command(*REFUSING[truth])
        try:
            with raises(PublishError, reason=re.compile(truth)):
                async with connect(server.url) as client:
                    await open_run(client, run_id, deadline=patience)
            publisher.publish(committed(1))
            with raises(EventsMissing, reason=re.compile(truth)):
                publisher.flush(patience)
        finally:
            admin.replicaof("NO", "ONE")
            admin.execute_command("CONFIG SET", "maxmemory", 0)
            admin.execute_command("CONFIG SET", "min-replicas-to-write", 0)
            publisher.flush(PATIENCE)
            publisher.log.close()


@pytest.mark.parametrize(
    ("reply", "truth"),
    [
        (
            "LOADING Redis is loading the dataset in memory",
            "LOADING Redis is loading .*: it is reading its data; wait until it has",
        ),
        (
            "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
            "MASTERDOWN Link .*: it is a replica",
        ),
        ("ERR max number of clients reached", "max number of clients reached"),
    ],
)
async def test_a_server_that_refuses_every_command_is_there(reply, truth):
    with scripted_server(lambda _: f"-{reply}\r\n".encode()) as url:
        with raises(ServerRefuses, where=url, reason=re.compile(f"^{truth}")):
            connect_sync(url, patience=0.1).__enter__()
        with raises(ServerRefuses, where=url, reason=re.compile(f"^{truth}")):
            async with connect(url, patience=0.1):
                pass


async def test_a_wait_that_ends_says_that_the_server_refuses_and_not_that_it_is_away(server):
    async def write():
        with open_client(server.url) as client:
            client.set("key", "value")

    with open_client(server.url) as admin:
        admin.config_set("maxmemory", 1)
        try:
            with raises(DeadlineExceeded, deadline=0.2, reason=re.compile(r"refuses \(OOM ")):
                await Deadline(0.2, "nothing was written").retry(write)
        finally:
            admin.config_set("maxmemory", 0)


async def test_a_place_in_a_script_is_not_told(server):
    with open_client(server.url) as admin:
        admin.config_set("maxmemory", 1)
        try:
            script = admin.register_script("return redis.call('SET', KEYS[1], 'value')")
            with pytest.raises(Exception, match="user_script") as caught:
                script(keys=["key"])
        finally:
            admin.config_set("maxmemory", 0)
    assert is_transient(caught.value)
    assert reply_text(caught.value).endswith("it is full; raise its maxmemory, or remove data")
    assert "user_script" not in reply_text(caught.value)
