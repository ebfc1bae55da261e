"""Checkpoints on object storage are whole or invisible, and come back as they were."""

from __future__ import annotations

import hashlib
import re
import secrets
from pathlib import Path

import anyio
import pytest
from msgspec.structs import replace

from tests.support.errors import raises

fsspec = pytest.importorskip("fsspec")

from tests.support.checkpoint_runs import staged  # noqa: E402
from tests.support.damage import flip  # noqa: E402
from tests.support.event_histories import committed, finished, registration  # noqa: E402
from tests.support.object_servers import has_s3, s3_server  # noqa: E402
from tests.support.pipeline import reducer_task  # noqa: E402
from tests.support.waits import PATIENCE  # noqa: E402
from trinity_events.checkpoints.layout import MANIFEST, VERIFIED  # noqa: E402
from trinity_events.checkpoints.manifest import sums_below, write_manifest  # noqa: E402
from trinity_events.checkpoints.verification import CheckpointDamaged, verify_files  # noqa: E402
from trinity_events.log import AsyncPublisher, new_producer  # noqa: E402
from trinity_workers.launch.mirror import mirrored, restore  # noqa: E402
from trinity_workers.storage.object_store import SUMS, CopyDamaged, ObjectStore, ObjectStoreUnusable  # noqa: E402

pytestmark = pytest.mark.processes

RUN = "grpo-7b"


@pytest.fixture(scope="module")
def s3():
    with s3_server() as url:
        yield url


@pytest.fixture(
    params=[
        "file",
        "memory",
        pytest.param("s3", marks=pytest.mark.skipif(not has_s3, reason="needs s3fs and moto")),
    ]
)
def url(request, tmp_path):
    if request.param == "s3":
        return f"{request.getfixturevalue('s3')}/{secrets.token_hex(4)}"
    if request.param == "memory":
        return f"memory://{secrets.token_hex(4)}"
    return (tmp_path / "objects").as_uri()


@pytest.fixture
def store(url):
    return ObjectStore(url)


def checkpoint(folder: Path, step: int) -> Path:
    """A folder with files of some sizes, below one another."""
    for name, size in (("actor/model.pt", 100_000), ("actor/huggingface/config.json", 9), ("e", 0)):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes([step]) * size)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_a_checkpoint_comes_back_as_it_was_and_old_ones_go(store, tmp_path):
    store.check()
    assert (store.steps(RUN), store.newest(RUN)) == ([], None)
    saved = {step: checkpoint(tmp_path / f"saved-{step}", step) for step in (2, 4, 10)}
    for step, folder in saved.items():
        store.upload(RUN, step, folder)
        assert store.newest(RUN) == step
    assert store.fetch(RUN, 4, tmp_path / "fetched")
    assert contents(tmp_path / "fetched") == contents(saved[4])
    store.prune(RUN, 0)
    assert store.steps(RUN) == [2, 4, 10]
    store.prune(RUN, 2)
    assert store.steps(RUN) == [4, 10]
    assert not store.fetch(RUN, 2, tmp_path / "gone")
    assert not (tmp_path / "gone").exists()
    store.upload(RUN, 4, checkpoint(tmp_path / "again", 5))  # an epoch that began before it
    assert (store.newest(RUN), store.steps(RUN)) == (4, [4, 10])
    store.prune(RUN, 1)
    assert store.steps(RUN) == [4, 10], "a step of an epoch that was discarded is not the newest"


def test_a_manifest_is_that_of_the_copy_too_and_comes_back_with_the_marks(store, tmp_path):
    folder = checkpoint(tmp_path / "saved" / "global_step_1", 1)
    write_manifest(folder, sums_below([folder], folder))
    digest = hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()
    (folder / VERIFIED).write_text(f'{{"epoch":1,"step":1,"manifest":"sha256:{digest}"}}')
    store.upload(RUN, 1, folder)
    assert store.fetch(RUN, 1, tmp_path / "fetched")
    assert contents(tmp_path / "fetched") == contents(folder)
    assert verify_files(tmp_path / "fetched")


def test_a_file_that_was_changed_since_it_was_saved_is_not_mirrored(store, tmp_path):
    folder = checkpoint(tmp_path / "global_step_1", 1)
    write_manifest(folder, sums_below([folder], folder))
    flip(folder / "actor" / "model.pt")
    with raises(ObjectStoreUnusable, reason=re.compile("was changed since it was saved$")):
        store.upload(RUN, 1, folder)
    (folder / "actor" / "model.pt").unlink()
    with pytest.raises(CheckpointDamaged) as raised:
        store.upload(RUN, 1, folder)
    assert raised.value.path == folder / "actor" / "model.pt"
    assert store.steps(RUN) == []


def test_what_was_not_copied_to_its_end_is_invisible(store, tmp_path, monkeypatch):
    folder = checkpoint(tmp_path / "saved", 1)
    store.upload(RUN, 1, folder)
    put = ObjectStore._put

    def fails_at_the_model(self, file, target):
        if file.name == "model.pt":
            raise OSError("the network is gone")
        return put(self, file, target)

    monkeypatch.setattr(ObjectStore, "_put", fails_at_the_model)
    for step in (1, 2):
        with raises(ObjectStoreUnusable, what=re.compile(RUN), reason="the network is gone"):
            store.upload(RUN, step, folder)
    assert (store.steps(RUN), store.newest(RUN)) == ([], None)
    assert not store.fetch(RUN, 1, tmp_path / "fetched")


@pytest.mark.parametrize("name", ["actor/model.pt", "../outside", "/etc/outside"])
def test_what_is_not_the_copied_file_is_refused(store, tmp_path, name):
    store.upload(RUN, 1, checkpoint(tmp_path / "saved", 1))
    files, root = fsspec.core.url_to_fs(store._url)
    at = f"{root}/{RUN}/global_step_1"
    sums = files.cat_file(f"{at}/{SUMS}").decode()
    if name == "actor/model.pt":
        files.pipe_file(f"{at}/{name}", b"other bytes")
        message = "is not the file that was copied"
    else:
        files.pipe_file(f"{at}/{SUMS}", sums.replace("actor/model.pt", name).encode())
        message = "is not a path inside a checkpoint"
    with raises(CopyDamaged, reason=re.compile(message)):
        store.fetch(RUN, 1, tmp_path / "deep" / "fetched")
    assert not (tmp_path / "deep" / "fetched").exists()
    assert not (tmp_path / "outside").exists()


def test_a_protocol_that_there_is_not_and_a_place_that_refuses_are_one_sentence(tmp_path):
    with raises(ObjectStoreUnusable, url="nope://a", reason=re.compile("nope")):
        ObjectStore("nope://a")
    (tmp_path / "file").touch()
    with raises(ObjectStoreUnusable, what="cannot be written to"):
        ObjectStore(f"{tmp_path}/file/below").check()


async def test_a_ready_checkpoint_is_mirrored_and_fetched_where_its_folder_is_lost(
    make_config, publisher, log, redis_url, run_id, tmp_path, url
):
    config = make_config(checkpoints={"mirror": url}, sync={"timeout": PATIENCE}, steps=3)
    actor = AsyncPublisher(log, publisher.epoch, new_producer("actor"))
    both = registration("state_dict"), registration("checkpoint")
    async with reducer_task(redis_url, run_id, tmp_path):
        with anyio.fail_after(PATIENCE):
            async with mirrored(config):
                for kind, name in (("state_dict", "model.pt"), ("checkpoint", "optim.pt")):
                    path = f"{staged(3)}/actor/{name}"
                    file = config.checkpoint_folder / path
                    file.parent.mkdir(parents=True, exist_ok=True)
                    file.write_text(name)
                    await actor.publish(finished(3, kind=kind, path=path, nbytes=len(name)))
                await publisher.publish(committed(3, "checkpoint", *both))
                while not (config.folder_of(3) / "actor" / "optim.pt").exists():
                    await anyio.sleep(0.01)
    saved = config.folder_of(3)
    expected = contents(saved)
    assert ObjectStore(url).newest(run_id) == 3
    saved.rename(tmp_path / "lost")
    await restore(replace(config, resumed_step=3))
    assert contents(saved) == expected
