"""Checkpoints on a server of S3's protocol that checks signatures, goes away and comes back."""

from __future__ import annotations

import re
import secrets

import anyio
import pytest
from msgspec.structs import replace

from tests.support.checkpoint_runs import staged
from tests.support.errors import raises
from tests.support.event_histories import committed, finished, registration
from tests.support.object_servers import environment, guarded_s3_server, has_s3
from tests.support.pipeline import reducer_task
from tests.support.waits import PATIENCE, until
from trinity_events.log import AsyncPublisher, new_producer
from trinity_workers.launch.mirror import mirrored
from trinity_workers.launch.resume import held_checkpoint
from trinity_workers.storage.object_store import SUMS, ObjectStore, ObjectStoreUnusable

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not has_s3, reason="needs s3fs and moto: run make setup"),
]


@pytest.fixture(scope="module")
def server():
    with guarded_s3_server() as made:
        yield made


@pytest.fixture
def relay(server):
    return server[0]


@pytest.fixture
def url(server):
    """A folder of its own in the bucket, for clients with the right key."""
    relay, key = server
    with environment(relay.url, key):
        yield f"s3://checkpoints/{secrets.token_hex(4)}"


@pytest.mark.parametrize(
    ("which", "reason"),
    [
        ("nobody's", "The AWS Access Key Id you provided does not exist in our records"),
        ("wrong", "The request signature we calculated does not match"),
        ("none", "Unable to locate credentials"),
    ],
)
def test_credentials_that_are_not_the_servers_are_one_sentence(server, which, reason):
    relay, (name, secret) = server
    key = {"nobody's": ("someone", secret), "wrong": (name, "guessed"), "none": None}[which]
    with (
        environment(relay.url, key),
        raises(
            ObjectStoreUnusable, url="s3://checkpoints/team", reason=re.compile(f"^{reason}")
        ) as refused,
    ):
        ObjectStore("s3://checkpoints/team").check()
    sentence = str(refused.value)
    assert "\n" not in sentence and secret not in sentence and "guessed" not in sentence


def test_a_bucket_that_is_not_there_is_refused_and_not_made(url):
    for _ in range(2):
        with raises(ObjectStoreUnusable, url="s3://chekpoints/a", what="cannot be written to"):
            ObjectStore("s3://chekpoints/a").check()


class Training:
    """What the ranks of a run say of their checkpoints, and the files that they write."""

    def __init__(self, config, publisher, log):
        self._config = config
        self._trainer = publisher
        self._actor = AsyncPublisher(log, publisher.epoch, new_producer("actor"))

    async def save(self, step: int) -> None:
        names = {"state_dict": "model.pt", "checkpoint": "optim.pt"}
        for kind, name in names.items():
            path = f"{staged(step)}/actor/{name}"
            file = self._config.checkpoint_folder / path
            file.parent.mkdir(parents=True, exist_ok=True)
            nbytes = file.write_bytes(name.encode() * 50_000)
            await self._actor.publish(finished(step, kind=kind, path=path, nbytes=nbytes))
        registered = [registration(kind) for kind in names]
        await self._trainer.publish(committed(step, "checkpoint", *registered))


async def test_a_copy_that_its_server_leaves_in_the_middle_is_not_there_and_a_fresh_machine_resumes(
    make_config, publisher, log, redis_url, run_id, tmp_path, relay, url, monkeypatch, caplog
):
    config = make_config(checkpoints={"mirror": url}, sync={"timeout": PATIENCE}, steps=3)
    training = Training(config, publisher, log)
    put = ObjectStore._put

    def server_leaves_at_the_second_file(self, file, target):
        if "global_step_2" in str(target) and file.name == "optim.pt":
            relay.down()
        return put(self, file, target)

    monkeypatch.setattr(ObjectStore, "_put", server_leaves_at_the_second_file)
    store = ObjectStore(url)
    store.check()

    async def copied(step: int) -> None:
        await until(lambda: anyio.to_thread.run_sync(lambda: store.newest(run_id) == step))

    async with reducer_task(redis_url, run_id, tmp_path):
        with anyio.fail_after(2 * PATIENCE):
            async with mirrored(config):
                await training.save(1)
                await copied(1)
                await training.save(2)
                await until(lambda: "the checkpoint of step 2 is not mirrored" in caplog.text)
                relay.up()
                assert store._files.ls(f"{store._folder(run_id, 2)}/actor"), "it had begun"
                assert not store._files.exists(f"{store._folder(run_id, 2)}/{SUMS}")
                assert (store.newest(run_id), store.steps(run_id)) == (1, [1])
                assert not store.fetch(run_id, 2, tmp_path / "half")
                await training.save(3)
                await copied(3)
    assert store.steps(run_id) == [1, 3]
    expected = _contents(config.folder_of(3))

    fresh = tmp_path / "fresh"
    there = replace(config, checkpoint_folder=fresh / run_id, resumed_step=3)
    async with reducer_task(redis_url, run_id, fresh):
        with anyio.fail_after(PATIENCE):
            async with held_checkpoint(there, fresh):
                assert _contents(there.resumed_folder) == expected


def _contents(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }
