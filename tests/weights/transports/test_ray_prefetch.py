"""Parts in Ray's object store that are verified while their objects are still being put."""

import os
from contextlib import closing

import msgspec
import pytest
import torch

from tests.support.errors import raises
from tests.support.prefetching import has, load, reading, write
from tests.support.published_parts import announcement, assert_same, read
from tests.support.ray_clusters import on_ray, references
from tests.support.tensors import identical
from tests.support.transport_processes import Where, actor, kill, publishes_until
from tests.support.waits import wait_until
from trinity_events.weights import PartWriter, RayStore
from trinity_events.weights.applying.speculative_load import SpeculativeLoad
from trinity_events.weights.errors import CorruptManifest
from trinity_events.weights.transports.ray.directory import NONE, Directory, Objects, PutAttempt
from trinity_events.weights.transports.ray.prefetch import RayPartPrefetch
from trinity_schemas import decode_manifest

pytestmark = [pytest.mark.ray, pytest.mark.heavy]

CHUNK = 1000
TENSORS = [(f"layer{number}", torch.rand(400)) for number in range(9)]
"""Of 1,600 bytes: two of them, and no third, are an object of 4,000."""
OBJECTS = 5


@pytest.fixture
def stores(ray_cluster):
    made = [RayStore(object_bytes=4000) for _ in range(2)]
    yield made
    for store in made:
        store.close()


def written(store, part, tensors=TENSORS):
    return write(PartWriter(store, part, CHUNK), tensors)


def changed(by=1.0):
    return [(name, tensor + by) for name, tensor in TENSORS]


@pytest.fixture
def followed(monkeypatch):
    """The followers of all parts that are read along."""
    made = []
    begin = RayPartPrefetch.__init__

    def noted(self, *args):
        begin(self, *args)
        made.append(self)

    monkeypatch.setattr(RayPartPrefetch, "__init__", noted)
    return made


def here(followed):
    """Objects that the newest follower has digested to their ends."""
    fetched = list(followed[-1].fetched.values()) if followed else []
    return sum(len(part.digests) == len(list(part.chunks())) for part in fetched)


def test_what_was_digested_before_it_was_sealed_is_not_digested_again(
    stores, part, digested, followed
):
    ours, theirs = stores
    with reading(theirs, [part]) as prefetch:
        writer = written(ours, part)
        wait_until(lambda: here(followed) == OBJECTS - 1)
        assert prefetch.ended is None and theirs.open(part) is None
        report = writer.seal()
    assert prefetch.ended == "sealed"
    assert_same(read(theirs, part.run_id, announcement(part, report)), TENSORS)
    assert digested == []
    assert_same(read(theirs, part.run_id, announcement(part, report)), TENSORS)
    assert len(digested) == report.chunks, "what was read along is held until it is read once"


def test_a_version_is_read_along_on_another_node(ray_cluster, stores, part, far):
    ours, _ = stores
    along = far.along.remote(part)
    report = written(ours, part).seal()
    assert on_ray(along) == "sealed"
    event = msgspec.msgpack.encode(announcement(part, report))
    arrays = on_ray(far.read.remote(part, event))
    assert_same({name: torch.tensor(array) for name, array in arrays.items()}, TENSORS)


def test_a_model_at_rest_has_a_version_before_it_is_sealed(stores, part, copied, followed):
    ours, theirs = stores
    module, ahead = (
        torch.nn.ParameterDict({n: torch.zeros_like(t) for n, t in TENSORS}),
        SpeculativeLoad(),
    )
    ahead.record(module, load(theirs, module, ahead, part, written(ours, part).seal()))
    part = part._replace(step=2)
    with reading(theirs, [part], on_part=ahead.begin(module)):
        writer = written(ours, part, changed())
        wait_until(lambda: here(followed) == OBJECTS - 1)
        assert identical(module["layer7"], TENSORS[7][1] + 1)
        assert identical(module["layer8"], TENSORS[8][1]), "its object is not put yet"
        report = writer.seal()
    assert sum(copied) == sum(tensor.nbytes for _, tensor in TENSORS)
    copied.clear()
    load(theirs, module, ahead, part, report)
    assert copied == [] and has(module, changed())


def test_all_ranks_are_read_along_at_once(stores, part, digested):
    ours, theirs = stores
    parts = [part, part._replace(rank=1)]
    with reading(theirs, parts) as prefetch:
        reports = [written(ours, parts[0]).seal()]
        other = [(f"other.{name}", tensor) for name, tensor in TENSORS]
        reports.append(written(ours, parts[1], other).seal())
    assert prefetch.ended == "sealed"
    assert len(read(theirs, part.run_id, announcement(part, *reports))) == 2 * len(TENSORS)
    assert digested == []


def test_what_was_seen_of_a_part_that_is_given_up_does_not_count(stores, part, digested, followed):
    ours, theirs = stores
    with reading(theirs, [part]) as prefetch:
        first = written(ours, part, changed())
        wait_until(lambda: here(followed) == OBJECTS - 1)
        first.discard()
        wait_until(lambda: here(followed) == 0)
        report = written(ours, part).seal()
    assert prefetch.ended == "sealed"
    assert_same(read(theirs, part.run_id, announcement(part, report)), TENSORS)
    assert digested == []


def test_a_reader_that_was_stopped_has_the_rest_come_when_it_pulls(
    stores, part, digested, followed
):
    ours, theirs = stores
    writer = written(ours, part, TENSORS[:5])
    with reading(theirs, [part]) as prefetch:
        wait_until(lambda: here(followed) == 2)
        prefetch.stop.set()
    assert prefetch.ended == "stopped"
    report = write(writer, TENSORS[5:]).seal()
    assert_same(read(theirs, part.run_id, announcement(part, report)), TENSORS)
    assert len(digested) == report.chunks - 2 * 4


def test_what_was_put_and_is_not_what_was_announced_is_found(stores, part):
    ours, theirs = stores
    with reading(theirs, [part]):
        report = written(ours, part).seal()
    with closing(theirs.open(part)) as source:
        digests = [chunk.digest for chunk in decode_manifest(source.manifest).chunks]
    with reading(theirs, [part]):
        pass
    for prefetched in theirs._seen[part].values():  # as if they were digested too early
        prefetched.digests[:] = digests[:1] * len(prefetched.digests)
    event = announcement(part, report)
    assert_same(read(theirs, part.run_id, event), TENSORS)  # digested again, and found to be right
    broken = msgspec.structs.replace(event.parts[0], manifest_digest="sha256:" + "0" * 64)
    with raises(CorruptManifest, rank=0, fault="digest"):
        read(theirs, part.run_id, msgspec.structs.replace(event, parts=(broken,)))


@pytest.mark.processes
def test_what_came_of_a_publisher_that_was_killed_is_let_go_of(
    stores, part, weights_url, ray_cluster, followed
):
    _, theirs = stores
    where = Where("ray", weights_url, ray_cluster, os.environ.get("RAY_AUTH_MODE", "disabled"))
    with (
        actor(publishes_until, where, part, "sealing") as (process, _),
        reading(theirs, [part]) as prefetch,
    ):
        wait_until(lambda: here(followed) == 1)
        kill(process)
        wait_until(lambda: here(followed) == 0)
        prefetch.stop.set()
    assert prefetch.ended == "stopped"
    assert theirs._seen[part] == {}
    assert theirs.open(part) is None


def test_what_was_read_along_and_never_became_whole_is_let_go_of(stores, part, followed):
    ours, theirs = stores
    before = references()
    with reading(theirs, [part]) as prefetch:
        writer = written(ours, part)
        wait_until(lambda: here(followed) == OBJECTS - 1)
        prefetch.stop.set()
    writer.discard()
    with reading(theirs, [part._replace(step=2)]) as prefetch:
        prefetch.stop.set()
    del writer
    followed.clear()
    wait_until(lambda: references() <= before)


async def test_what_is_said_of_a_part_may_arrive_in_any_order(part):
    """As with actors of which several calls are under way at once."""
    directory, objects = Directory(), Objects(["a", "b"], [1, 2])
    first, second = PutAttempt(1, CHUNK), PutAttempt(2, CHUNK)
    directory.add_object(part, second, 1, Objects(["b"], [2]))
    directory.add_object(part, first, 0, Objects(["x"], [1]))
    directory.give_up(part, first)
    assert await directory.follow(part, second, 0, 0.0) == (second, ([], []), False)
    directory.add_object(part, second, 0, Objects(["a"], [1]))
    assert await directory.follow(part, NONE, 0, 60.0) == (second, objects, False)
    directory.give_up(part, second)
    directory.add_object(part, second, 2, Objects(["c"], [3]))
    assert await directory.follow(part, second, 2, 60.0) == (NONE, ([], []), False)
    third = PutAttempt(3, CHUNK)
    directory.add_part(part, third, b"manifest", objects)
    directory.add_object(part, third, 0, Objects(["a"], [1]))
    assert await directory.follow(part, third, 1, 60.0) == (third, (["b"], [2]), True)
    directory.forget(part)
    assert await directory.follow(part, third, 2, 60.0) == (NONE, ([], []), False)
