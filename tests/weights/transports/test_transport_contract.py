"""What every transport of weights promises, held against each of them."""

import contextlib
import errno
import os
import re
import signal
import socket
import struct
import time
import warnings
from contextlib import closing
from functools import partial
from typing import get_args
from unittest import mock

import anyio
import msgspec
import pytest
import torch

from tests.support.errors import assert_attributes, raises
from tests.support.gpu import GPU
from tests.support.pipeline import announced, reducer_task
from tests.support.published_parts import announcement, assert_same, put, read
from tests.support.ray_clusters import in_ray, on_ray, references
from tests.support.stored_parts import find_stored, layout, segment
from tests.support.tensors import bits, identical
from tests.support.transport_processes import (
    CHUNK,
    ON_A_DEVICE,
    SOME,
    STAGES,
    Where,
    actor,
    kill,
    leaves_ray_and_comes_back,
    publishes_until,
    reads,
)
from tests.support.waits import PATIENCE, wait_until
from tests.support.weight_versions import awkward, publish, ready
from trinity_events import Synchronizer
from trinity_events.errors import (
    CorruptVersion,
    GroupBroken,
    RayUnusable,
    SharedMemoryUnusable,
    UnknownTransport,
    VersionNotStored,
    VersionVanished,
)
from trinity_events.server import open_client
from trinity_events.system.shared_memory import (
    Owner,
    available,
    sweep,
    users_folder,
)
from trinity_events.weights import (
    CudaStore,
    PartWriter,
    RayStore,
    SharedMemoryStore,
    check_fit,
    install,
    load_version,
    pull_version,
)
from trinity_events.weights.deltas.tracker import LastPublished
from trinity_events.weights.errors import CorruptManifest, CorruptPart, PartClosed
from trinity_events.weights.publishing.part_writer import manifest_digest
from trinity_events.weights.transports.cuda.layout import encode_layout
from trinity_events.weights.transports.ray.directory import (
    NAMESPACE,
    NONE,
    SHARED,
    NoPublisher,
    Objects,
    get_pointer,
)
from trinity_events.weights.transports.ray.source import RaySource
from trinity_schemas import (
    ALIGNMENT,
    PublishedPart,
    StepReady,
    TransportName,
    VersionOpened,
    VersionRetired,
    chunk_key,
    decode_envelope,
    decode_manifest,
)
from trinity_workers.config.sections.sync import SyncConfig
from trinity_workers.launch.transport import chosen_transport

pytestmark = pytest.mark.skipif(not available(), reason="the host has no shared memory as files")


RAY = pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.heavy])
TRANSPORTS = ("redis", "shm", RAY, "collective", "device", GPU)


@pytest.fixture(params=TRANSPORTS)
def where(request, weights_url, run_id):
    if request.param == "ray":
        address = request.getfixturevalue("ray_cluster")
        auth = os.environ.get("RAY_AUTH_MODE", "disabled")
        return Where("ray", weights_url, address, auth)
    return Where(request.param, weights_url, run_id=run_id)


def all_but(name, why):
    """Leave out what one of the transports does not promise, saying why."""
    left_out = pytest.param(name, marks=pytest.mark.skip(reason=why))
    params = [left_out if transport == name else transport for transport in TRANSPORTS]
    return pytest.mark.parametrize("where", params, indirect=True)


@pytest.fixture
def shm(weights_url):
    return Where("shm", weights_url)


@pytest.fixture
def opened():
    """Opens stores, and closes them at the end."""
    stores = []

    def open_store(where, *, reads=False):
        stores.append(where.store(reads=reads))
        return stores[-1]

    yield open_store
    for store in reversed(stores):
        store.close()


@pytest.fixture
def ours(opened, where):
    """The publisher's end."""
    return opened(where)


@pytest.fixture
def theirs(opened, where):
    """The reader's end."""
    return opened(where, reads=True)


def exchange(part, change):
    """Put something else in the place of a part's object, which itself cannot be changed."""
    import ray

    directory = ray.get_actor(get_pointer(part), NAMESPACE)
    manifest, objects = ray.get(directory.find.remote(part))
    [reference] = objects.references
    other = change(ray.get(reference).copy())
    put = ray.put(other)
    ray.get(directory.add_part.remote(part, NONE, manifest, Objects([put], [len(other)])))
    return put


def received(reader):
    """What an explorer of a collective group has of the newest version."""
    _, buffer = reader._staging._newest
    return buffer


def files_of(store) -> SharedMemoryStore:
    """Where a store has the files of its parts."""
    return store._files if isinstance(store, CudaStore) else store


@pytest.mark.parametrize("chunk_bytes", [64, 4096, None])
def test_every_kind_of_tensor_travels_bit_for_bit(ours, theirs, part, chunk_bytes):
    sent = list(awkward().items())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(read(theirs, part.run_id, put(ours, part, sent, chunk_bytes)), sent)


def test_a_part_of_no_bytes_travels(ours, theirs, part):
    sent = [("nothing", torch.empty(0, 3))]
    assert_same(read(theirs, part.run_id, put(ours, part, sent)), sent)
    assert_same(read(theirs, part.run_id, put(ours, part._replace(step=2), [])), [])


def test_a_model_is_the_same_bytes_whatever_lay_there_before(ours, theirs, part):
    odd = [(f"t{size}", torch.full((size,), 7, dtype=torch.uint8)) for size in (1, 63, 64, 65, 0)]
    digests = set()
    for step in range(5):
        at = part._replace(step=step)
        put(ours, at, odd, chunk_bytes=96)
        with contextlib.closing(theirs.open(at)) as source:
            manifest = decode_manifest(source.manifest)
        assert all(entry.offset % ALIGNMENT == 0 for entry in manifest.tensors)
        digests.add(tuple(chunk.digest for chunk in manifest.chunks))
        ours.delete(at)
        put(ours, at, [("full", torch.full((400,), 255, dtype=torch.uint8))])
        ours.delete(at)
    assert len(digests) == 1


@all_but("collective", "rank 0 alone is in a collective group, and sends full tensors")
def test_the_parts_of_all_ranks_make_one_version(ours, opened, where, theirs, part):
    second = opened(where)  # another process, as it were
    writers = [
        PartWriter(store, part._replace(rank=rank)) for rank, store in enumerate((ours, second))
    ]
    for (name, tensor), writer in zip(SOME, writers * 3, strict=True):
        writer.add(name, tensor)
    event = announcement(part, *(writer.seal() for writer in writers))
    assert sorted(read(theirs, part.run_id, event)) == [name for name, _ in SOME]


def test_a_part_that_is_not_sealed_is_not_there(ours, theirs, part):
    writer = PartWriter(ours, part, CHUNK)
    for name, tensor in SOME:
        writer.add(name, tensor)
        assert theirs.open(part) is None
    event = announcement(part, writer.seal())
    assert_same(read(theirs, part.run_id, event), SOME)


def test_a_version_that_is_not_there_is_an_error_that_says_so(ours, theirs, part, where):
    event = put(ours, part)
    ours.delete(part)
    if where.name == "collective":  # whose explorers have a version until the next is there
        put(ours, part._replace(step=2))
    with raises(VersionNotStored, version=str(part), needed_by=""):
        read(theirs, part.run_id, event)


def test_what_another_attempt_published_is_not_taken_for_what_was_announced(ours, theirs, part):
    event = put(ours, part)
    again = put(ours, part, [("other", torch.ones(3))])
    with raises(CorruptManifest, fault="digest", version=str(part)):
        read(theirs, part.run_id, event)
    assert_same(read(theirs, part.run_id, again), [("other", torch.ones(3))])


def test_a_manifest_that_asks_for_too_much_allocates_nothing(ours, theirs, part):
    lie = msgspec.msgpack.encode(
        {
            **dict(zip(("run_id", "epoch", "step", "rank"), part, strict=True)),
            "tensors": [{"name": "a", "dtype": "int8", "shape": [2**48], "offset": 0}],
            "chunks": [[2**48, "xxh3:" + "0" * 32]],
        }
    )
    ours.begin(part).seal(lie)
    published = PublishedPart(rank=0, manifest_digest=manifest_digest(lie), bytes=26)
    event = msgspec.structs.replace(announcement(part), parts=(published,))
    with raises(CorruptManifest, fault="size", size=1 << 48, announced=26):
        read(theirs, part.run_id, event)


def test_bytes_that_were_changed_are_found(ours, theirs, part, where):
    event = put(ours, part)
    if where.name == "redis":
        with open_client(where.weights_url) as client:
            client.setrange(chunk_key(*part, 2), 5, b"\x55")
    elif where.name == "ray":

        def change(data):
            data[2 * CHUNK + 5] = 0x55
            return data

        exchanged = exchange(part, change)
        assert exchanged is not None
    elif where.name == "collective":
        received(theirs)._memory[2 * CHUNK + 5] = 0x55
    elif where.name in ON_A_DEVICE:
        [room] = ours._rooms.values()
        room._blocks[0].tensor[2 * CHUNK + 5] = 0x55
    else:
        with segment(part).open("r+b") as file:
            file.seek(4096 + 2 * CHUNK + 5)
            file.write(b"\x55")
    with raises(CorruptVersion, rank=0, chunk=2):
        read(theirs, part.run_id, event)


def test_bytes_that_are_missing_are_found(ours, theirs, part, where):
    event = put(ours, part)
    if where.name == "redis":
        with open_client(where.weights_url) as client:
            client.set(chunk_key(*part, 2), b"short")
    elif where.name == "ray":
        exchanged = exchange(part, lambda data: data[: 2 * CHUNK])
        assert exchanged is not None
    elif where.name == "collective":
        received(theirs).filled = 2 * CHUNK
    elif where.name in ON_A_DEVICE:
        original = layout(part)
        [lent] = original.blocks
        lent = msgspec.structs.replace(lent, nbytes=2 * CHUNK)
        with segment(part).open("r+b") as file:
            file.seek(4096)
            file.write(encode_layout(msgspec.structs.replace(original, blocks=(lent,))))
    else:
        os.truncate(segment(part), 4096 + 2 * CHUNK)
    with raises(CorruptVersion, version=str(part)):
        read(theirs, part.run_id, event)


def test_a_part_that_is_given_up_leaves_nothing_and_its_next_attempt_works(
    ours, theirs, part, where
):
    writer = PartWriter(ours, part, CHUNK)
    for name, tensor in SOME[:4]:
        writer.add(name, tensor)
    writer.discard()
    assert find_stored(where, part.run_id, reader=theirs) == []
    assert_same(read(theirs, part.run_id, put(ours, part)), SOME)


@all_but("collective", "what explorers have whole is not asked back: it is never announced")
def test_a_part_that_is_discarded_after_all_is_gone(ours, theirs, part, where):
    writer = PartWriter(ours, part)
    writer.add("a", torch.ones(3))
    writer.seal()
    writer.discard()
    assert theirs.open(part) is None
    assert find_stored(where, part.run_id) == []


def test_retired_versions_are_freed_and_their_memory_is_used_again(ours, theirs, part, where):
    used = set()
    for step in range(20):
        event = put(ours, part._replace(step=step), [("a", torch.full((3000,), float(step)))])
        ours.delete(part._replace(step=step - 2))
        assert read(theirs, part.run_id, event)["a"][0] == step
        used |= memory(where, part, theirs)
    # Of a collective group's versions an explorer has the newest alone.
    steps = {19} if where.name == "collective" else {18, 19}
    assert all(theirs.open(part._replace(step=step)) is None for step in set(range(20)) - steps)
    if where.name in {"shm", "collective", *ON_A_DEVICE}:
        assert len(used) <= 3


def memory(where, part, reader) -> set:
    """In which memory the transport has what it has of a run."""
    if where.name == "shm":
        return {path.stat().st_ino for path in users_folder().glob(f"*/{part.run_id}~*")}
    if where.name in ON_A_DEVICE:
        steps = {int(path.name.split("~")[2]) for path in find_stored(where, part.run_id)}
        layouts = [layout(part._replace(step=step)) for step in steps]
        return {lent.handle for stored_layout in layouts for lent in stored_layout.blocks}
    return (
        {id(received(reader))}
        if where.name == "collective"
        else set(find_stored(where, part.run_id))
    )


def test_a_version_stays_as_it_is_while_it_is_held(ours, theirs, part):
    event = put(ours, part)
    with pull_version(theirs, part.run_id, event) as version:
        ours.delete(part)
        for step in range(2, 20):
            put(ours, part._replace(step=step), [("other", torch.rand(6000))])
            ours.delete(part._replace(step=step))
        assert_same(dict(version.tensors()), SOME)


@all_but("collective", "a version that explorers have is theirs: nothing retires it there")
def test_a_part_that_is_retired_while_it_is_read_is_read_whole_and_freed_then(
    ours, theirs, part, where
):
    put(ours, part)
    before = references() if where.name == "ray" else 0
    source = theirs.open(part)
    ours.delete(part)
    assert theirs.open(part) is None, "nobody begins to read it any more"
    for step in range(2, 5):
        put(ours, part._replace(step=step), [("other", torch.rand(6000))])
        ours.delete(part._replace(step=step))
    manifest = decode_manifest(source.manifest)
    sizes = [chunk.nbytes for chunk in manifest.chunks]
    if where.name in ON_A_DEVICE:
        [tensor], _ = source.copy(sizes)
        data = memoryview(tensor.cpu().numpy())
    else:
        [data] = source.read(sizes, lambda *_: None)
    for entry, (_, tensor) in zip(manifest.tensors, SOME, strict=True):
        sent = bits(tensor).numpy().tobytes()
        assert data[entry.offset : entry.offset + len(sent)] == sent
    del data
    source.close()
    if where.name == "ray":
        wait_until(lambda: references() < before)
    elif where.name == "redis":
        ours.begin(part)
        assert find_stored(where, part.run_id) == []
    else:
        assert all(segment.take() for segment in files_of(ours)._idle)


def test_a_reader_that_never_ends_holds_up_nobody_else(ours, theirs, opened, where, part):
    other = opened(where, reads=True)
    if where.name == "collective":
        ours.readers = 2
    event = put(ours, part)
    with pull_version(theirs, part.run_id, event):
        for step in range(2, 20):
            newer = put(ours, part._replace(step=step))
            reader = other if where.name == "collective" else opened(where)
            assert_same(read(reader, part.run_id, newer), SOME)


@pytest.mark.processes
def test_a_version_of_another_process_is_read_whole(where, theirs, part):
    with actor(publishes_until, where, part, "sealed") as (_, report):
        event = announcement(part, report)
        assert_same(read(theirs, part.run_id, event), SOME)
        model = torch.nn.Module()
        model.layer = torch.nn.ParameterDict({str(at): torch.zeros(1000) for at in range(6)})
        load_version(theirs, part.run_id, event, model)
        for name, tensor in SOME:
            assert identical(model.get_parameter(name), tensor)


@pytest.mark.processes
@pytest.mark.parametrize("stage", STAGES)
def test_a_publisher_that_is_killed_leaves_a_whole_version_or_none_and_no_memory(
    where, theirs, opened, part, stage
):
    if where.name == "ray" and stage in {"begun", "midway"}:
        pytest.skip("nothing of a part is in Ray before all of it is put")
    assert theirs.open(part) is None  # the reader has cleared up already
    with actor(publishes_until, where, part, stage) as (process, report):
        kill(process)
        source = theirs.open(part)
        if where.name in {"ray", *ON_A_DEVICE}:  # a sealed part may be found, but its owner is dead
            assert source is None or stage == "sealed"
            source = None
        else:
            assert (source is not None) == (stage == "sealed")
        if source is not None:
            source.close()
            assert_same(read(theirs, part.run_id, announcement(part, report)), SOME)
    # Whoever uses the host next clears up.
    if where.name == "collective":
        assert find_stored(where, part.run_id, reader=theirs) == (
            [part] if stage == "sealed" else []
        )
    assert opened(where).open(part._replace(step=9)) is None
    if where.name in {"shm", *ON_A_DEVICE}:
        assert find_stored(where, part.run_id, process.pid) == []
    elif where.name == "ray":
        wait_until(lambda: in_ray(part.run_id) == [])
    else:
        with open_client(where.weights_url) as client:
            keys = client.keys(f"trinity-weights:{{{part.run_id}*")
            assert all(client.ttl(key) > 0 for key in keys), "they expire"
            assert keys or stage == "begun"
    assert_same(read(theirs, part.run_id, put(opened(where), part)), SOME)


@pytest.mark.processes
def test_a_reader_that_is_killed_while_it_reads_leaves_nothing_stuck(ours, theirs, part, where):
    sends = where.name == "collective"  # to who is there, instead of keeping it
    if not sends:
        put(ours, part)
    before = references() if where.name == "ray" else 0
    with actor(reads, where._replace(lease=1.0), part) as (process, got_it):
        assert got_it
        if sends:
            ours.readers = 2
            put(ours, part)
            ours.readers = 1
        ours.delete(part)
        kill(process)
    if where.name == "redis":  # its lease ends by the server's clock
        wait_until(
            lambda: ours.begin(part._replace(step=2)) and not find_stored(where, part.run_id)
        )
    if where.name == "ray":  # the object is freed, though who read it never let go
        wait_until(lambda: references() < before)
    for step in range(2, 6):
        event = put(ours, part._replace(step=step))
        assert_same(read(theirs, part.run_id, event), SOME)
        ours.delete(part._replace(step=step))
    if where.name in {"shm", *ON_A_DEVICE}:
        assert len(files_of(ours)._idle) == 1, "the one that it read is used again"


# --- Ray's object store alone -----------------------------------------------------------------


def test_versions_cross_from_node_to_node_both_ways(ray_cluster, opened, weights_url, far, part):
    here = opened(Where("ray", weights_url, ray_cluster))
    event = msgspec.msgpack.decode(on_ray(far.put.remote(part)), type=StepReady)
    assert_same(read(here, part.run_id, event), SOME)
    other = part._replace(step=2, epoch=2)
    back = put(here, other)
    arrays = on_ray(far.read.remote(other, msgspec.msgpack.encode(back)))
    assert_same({name: torch.tensor(array) for name, array in arrays.items()}, SOME)


def test_a_part_in_several_objects_of_ray_travels_and_no_tensor_lies_in_two(
    ray_cluster, opened, weights_url, part
):
    sizes = (100, 180, 5, 0, 700, 3, 256, 2000, 1)
    sent = [(f"t{size}", torch.rand(size).to(torch.float16)) for size in sizes]
    ours = RayStore(object_bytes=1024)
    event = put(ours, part, sent, chunk_bytes=None)
    theirs = opened(Where("ray", weights_url, ray_cluster))
    lengths = theirs.open(part)._objects.sizes
    assert len(lengths) > 3
    assert max(lengths) >= 4000, "the largest is in one that is larger than others"
    with pull_version(theirs, part.run_id, event) as version:
        views = dict(version.tensors())
        [(_, there)] = version.parts
        assert views["t2000"].data_ptr() in [piece.data_ptr() for piece in there._pieces]
    assert_same(read(theirs, part.run_id, event), sent)
    applied = torch.nn.ParameterDict({name: torch.zeros_like(tensor) for name, tensor in sent})
    with pull_version(theirs, part.run_id, event) as version:
        install(check_fit(applied, version))
    loaded = torch.nn.ParameterDict({name: torch.zeros_like(tensor) for name, tensor in sent})
    load_version(theirs, part.run_id, event, loaded)
    for name, tensor in sent:
        assert identical(applied[name], tensor)
        assert identical(loaded[name], tensor)
    ours.close()


def test_behind_a_large_tensor_of_an_odd_size_views_stay_views(ray_cluster, part):
    sent = [("odd", torch.full((2001,), 7, dtype=torch.uint8)), ("a", torch.rand(100))]
    with closing(RayStore(object_bytes=1024)) as store:
        event = put(store, part, sent)
        with pull_version(store, part.run_id, event) as version:
            [(manifest, buffer)] = version.parts
            views = dict(version.tensors())
            assert identical(views["a"], sent[1][1])
            assert views["a"].data_ptr() == buffer.address(manifest.tensors[1].offset, 400)
            del views


def of_three_objects(objects):
    references, sizes = objects
    yield Objects(references, [sizes[0] + 1, sizes[1] - 1, *sizes[2:]])
    yield Objects(references[:-1], sizes)
    yield Objects([references[0], *references[:-1]], sizes)
    yield Objects(references[:-1], sizes[:-1])
    yield Objects([*references, references[0]], [*sizes, 0])
    yield Objects(references, [*sizes[:-1], 1 << 60])


def test_objects_that_are_not_cut_as_the_chunks_are_are_corrupt(
    ray_cluster, opened, weights_url, part
):
    import ray

    ours = RayStore(object_bytes=1024)
    event = put(ours, part, [(name, torch.rand(250)) for name in "abc"], chunk_bytes=None)
    theirs = opened(Where("ray", weights_url, ray_cluster))
    directory = ray.get_actor(get_pointer(part), NAMESPACE)
    manifest, objects = ray.get(directory.find.remote(part))
    assert len(objects.references) == 3
    for wrong in of_three_objects(objects):
        ray.get(directory.add_part.remote(part, NONE, manifest, wrong))
        for selection in (None, {"c": None}):
            with (
                raises(CorruptPart, fault="objects", version=str(part)),
                pull_version(theirs, part.run_id, event, selection),
            ):
                pass
    ray.get(directory.add_part.remote(part, NONE, manifest, objects))
    assert len(read(theirs, part.run_id, event)) == 3
    ours.close()


def test_a_part_that_was_given_up_writes_into_no_other(ray_cluster, opened, weights_url, part):
    ours = RayStore(object_bytes=1 << 20)
    given_up = PartWriter(ours, part)
    given_up.add("a", torch.zeros(10))
    tensor = torch.rand(100)
    writer = PartWriter(ours, part._replace(step=2))
    writer.add("b", tensor)
    given_up.add("a2", torch.full((100,), 7.0))
    event = announcement(part._replace(step=2), writer.seal())
    theirs = opened(Where("ray", weights_url, ray_cluster))
    assert_same(read(theirs, part.run_id, event), [("b", tensor)])
    ours.close()


def test_what_ray_was_told_of_in_vain_is_deleted(ray_cluster, part, monkeypatch):
    ours = RayStore()
    writer = PartWriter(ours, part)
    writer.add("a", torch.rand(100))
    point = mock.Mock(side_effect=OSError("the key-value store is gone"))
    monkeypatch.setattr("trinity_events.weights.transports.ray.store.set_pointer", point)
    with pytest.raises(OSError, match="is gone"):
        writer.seal()
    writer.discard()
    assert in_ray(part.run_id) == []
    monkeypatch.undo()
    put(ours, part)
    assert in_ray(part.run_id) == [part]
    ours.close()


def test_a_publisher_that_ray_has_half_forgotten_is_gone(ray_cluster, part, monkeypatch):
    with closing(RayStore()) as store:
        put(store, part)

        def of_no_class(*_, **__):
            raise AssertionError("Expected str or bytes, got <class 'NoneType'>")

        with monkeypatch.context() as patch:  # for milliseconds after its process was killed
            patch.setattr("ray.get_actor", of_no_class)
            assert store.open(part) is None
            assert_attributes(store.missing(part), version=str(part), fault="ray")
        reader = store.open(part)
        assert reader is not None
        reader.close()


def test_a_store_that_is_closed_hides_nothing_of_another_one_that_took_its_place(ray_cluster, part):
    first, other = RayStore(), RayStore()
    second = part._replace(step=2)
    with closing(RayStore()) as theirs:
        put(first, part), put(other, second)
        first.close()
        assert theirs.open(second) is not None
        assert theirs.open(part) is None
        other.close()
        assert_attributes(theirs.missing(second), version=str(second), fault="ray")
        with raises(NoPublisher, fault="absent", run_id=second.run_id, rank=second.rank):
            get_pointer(second)


@pytest.mark.processes
def test_a_publisher_may_leave_its_cluster_and_come_back_and_starts_no_other_one(
    ray_cluster, opened, weights_url, part
):
    where = Where("ray", weights_url, ray_cluster, os.environ.get("RAY_AUTH_MODE", "disabled"))
    theirs = opened(where)
    with actor(leaves_ray_and_comes_back, where, part) as (_, (fault, outside, report)):
        assert fault == "left"
        assert not outside
        third = part._replace(step=3)
        assert_same(read(theirs, part.run_id, announcement(third, report)), SOME)
        assert in_ray(part.run_id) == [third]


def test_an_actor_that_one_store_lost_is_not_ended_by_another(ray_cluster, part):
    first, other = RayStore(), RayStore()
    before = SHARED._actor, SHARED._users
    other_part = part._replace(rank=1)
    try:
        put(first, part), put(other, other_part)
        SHARED.lost(first._directory[0])
        first._directory = None
        again = part._replace(step=2)
        put(first, again)
        other.close()
        assert first.open(again) is not None
        first.close()
    finally:
        SHARED._actor, SHARED._users = before


def test_of_rays_objects_only_those_are_read_that_have_something_of_what_is_wanted(
    ray_cluster, opened, weights_url, part, monkeypatch
):
    sent = [(name, torch.rand(1000)) for name in "abc"]
    ours = RayStore(object_bytes=1024)
    event = put(ours, part, sent, chunk_bytes=None)
    theirs = opened(Where("ray", weights_url, ray_cluster))
    references = []
    monkeypatch.setattr(
        RaySource,
        "_as_they_come",
        lambda self, remaining, come=RaySource._as_they_come: (
            references.extend(remaining) or come(self, remaining)
        ),
    )
    with pull_version(theirs, part.run_id, event, {"b": None}) as version:
        [(name, received)] = version.tensors()
        assert name == "b"
        assert identical(received, sent[1][1])
    assert 0 < len(references) < len(theirs.open(part)._objects.references) / 2
    ours.close()


@pytest.mark.parametrize("full", ["ObjectStoreFullError", "OutOfDiskError"])
def test_what_ray_could_not_put_is_told_and_cannot_be_found(ray_cluster, part, monkeypatch, full):
    ours = RayStore(object_bytes=1024)
    full = getattr(ours._ray.exceptions, full)("no room")
    monkeypatch.setattr(ours._putter, "_ray", mock.Mock(put=mock.Mock(side_effect=full)))
    with raises(RayUnusable, fault="full", version=str(part)):
        put(ours, part, [("a", torch.rand(10_000))], chunk_bytes=None)
    assert ours.open(part) is None
    monkeypatch.undo()
    put(ours, part, chunk_bytes=None)
    assert ours.open(part) is not None, "its rooms can be used again"
    ours.close()


def test_a_room_that_there_was_no_memory_for_is_not_lost(ray_cluster, part):
    ours = RayStore(object_bytes=1 << 62)
    for _ in range(3):
        with pytest.raises(MemoryError):
            put(ours, part, chunk_bytes=None)
    ours._object_bytes = 1024
    put(ours, part, chunk_bytes=None)
    ours.close()


def test_a_publisher_on_another_node_that_is_killed_is_told_from_a_retired_version(
    ray_cluster, opened, weights_url, far, part
):
    here = opened(Where("ray", weights_url, ray_cluster))
    first = msgspec.msgpack.decode(on_ray(far.put.remote(part, 1.0)), type=StepReady)
    second = part._replace(step=2)
    on_ray(far.put.remote(second, 2.0))
    retired = part._replace(step=3)
    on_ray(far.put.remote(retired, 3.0))
    on_ray(far.delete.remote(retired))
    assert here.open(retired) is None
    assert_attributes(here.missing(retired), version=str(retired), fault="retired from ray")
    source, waiting = here.open(part), here.open(second)
    [data] = source.read([4 << 20], lambda *_: None)
    os.kill(on_ray(far.pid.remote()), signal.SIGKILL)
    wait_until(lambda: in_ray(part.run_id) == [])
    with raises(VersionVanished, fault="publisher", version=str(second)):
        waiting.read([4 << 20], lambda *_: None)
    assert bytes(data[:4]) == bytes(data[-4:]) == struct.pack("<f", 1.0), "what was read stays"
    with raises(VersionNotStored, fault="ray", version=str(part)):
        read(here, part.run_id, first)
    source.close()
    waiting.close()


def test_a_publisher_keeps_few_parts_when_nobody_retires_any(
    ray_cluster, opened, weights_url, part
):
    from trinity_events.weights.transports.ray.store import MOST_KEPT

    here = opened(Where("ray", weights_url, ray_cluster))
    events = [put(here, part._replace(step=step)) for step in range(MOST_KEPT + 3)]
    assert len(find_stored(Where("ray", ""), part.run_id)) == MOST_KEPT
    with raises(VersionNotStored, fault="retired from ray"):
        read(here, part.run_id, events[2])
    assert_same(read(here, part.run_id, events[3]), SOME)


def test_a_publishers_actor_that_hangs_is_not_taken_for_a_retired_version(
    ray_cluster, opened, weights_url, part
):
    here = opened(Where("ray", weights_url, ray_cluster))
    event = put(here, part)
    pid = on_ray(here._directory[1].__ray_call__.remote(lambda _: os.getpid()))
    os.kill(pid, signal.SIGSTOP)
    try:
        fault = {"fault": "ray actor", "deadline": 0.5}
        with closing(RayStore(deadline=0.5)) as hasty, raises(VersionNotStored, **fault):
            read(hasty, part.run_id, event)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert_same(read(here, part.run_id, event), SOME)


def test_what_is_no_bytes_is_not_read(ray_cluster, opened, weights_url, part):
    here = opened(Where("ray", weights_url, ray_cluster))
    event = put(here, part)
    exchanged = exchange(part, lambda data: data.astype("int16"))
    assert exchanged is not None
    with raises(VersionVanished, fault="object", version=str(part)):
        read(here, part.run_id, event)


def test_without_a_cluster_ray_is_refused_with_the_way_out(monkeypatch):
    ray = pytest.importorskip("ray")

    def alone(**_):
        raise ConnectionError("no cluster")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", alone)
    with raises(RayUnusable, fault="no cluster", reason="no cluster"):
        RayStore()


def test_a_cluster_that_is_gone_is_told_at_once(monkeypatch):
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", mock.Mock(side_effect=AssertionError("it tries for long")))
    with socket.create_server(("127.0.0.1", 0)) as gone:
        address = "{}:{}".format(*gone.getsockname())
    monkeypatch.setenv("RAY_ADDRESS", address)
    with raises(RayUnusable, fault="no cluster", reason=re.compile(f"^{address} ")):
        RayStore()


# --- shared memory alone ----------------------------------------------------------------------


def test_an_older_version_makes_room_when_nobody_retires_any(opened, shm, part):
    ours, theirs = opened(shm), opened(shm)
    events = [put(ours, part._replace(step=step)) for step in range(12)]
    assert len(find_stored(shm, part.run_id)) == 8
    with raises(VersionNotStored, fault="retired from shared memory"):
        read(theirs, part.run_id, events[3])
    assert_same(read(theirs, part.run_id, events[4]), SOME)


def test_memory_of_a_publisher_that_ended_is_let_go_of_before_the_next_version_is_there(
    opened, part
):
    theirs = opened(Where("shm", ""))
    for ends in (1, 2, 3):
        with closing(SharedMemoryStore()) as ours:
            assert_same(read(theirs, part.run_id, put(ours, part._replace(epoch=ends))), SOME)
            assert len(theirs._mappings) == 1
    assert theirs.open(part._replace(epoch=4)) is None
    assert not theirs._mappings


def test_the_segments_of_a_publisher_are_bounded(part):
    ours, theirs = SharedMemoryStore(most=3), SharedMemoryStore()
    sources = []
    for step in range(3):
        put(ours, part._replace(step=step))
        sources.append(theirs.open(part._replace(step=step)))
    with raises(SharedMemoryUnusable, fault="in use", segments=3):
        put(ours, part._replace(step=3))
    sources[1].close()
    assert_same(read(theirs, part.run_id, put(ours, part._replace(step=3))), SOME)
    for source in sources:
        source.close()
    theirs.close()
    ours.close()
    assert not list(users_folder().glob(f"*/{part.run_id}~*"))


@pytest.mark.parametrize("name", ["shm", RAY])
def test_what_a_version_rests_on_is_not_dropped_before_it(name, part, request, opened):
    address = request.getfixturevalue("ray_cluster") if name == "ray" else ""
    kind = partial(RayStore, most=3) if name == "ray" else partial(SharedMemoryStore, most=3)
    where = Where(name, "", address, os.environ.get("RAY_AUTH_MODE", "disabled"))
    theirs = opened(where)
    last, tensor = LastPublished(full_every=100), torch.rand(10_000)
    with closing(kind()) as ours:
        for step in range(1, 8):
            tensor[step] = step
            now = part._replace(step=step)
            last.begin(now, lambda candidate: ours.open(candidate) is not None)
            writer = PartWriter(ours, now, last=last)
            writer.add("a", tensor)
            event = announcement(now, writer.seal())
            assert identical(read(theirs, part.run_id, event)["a"], tensor), step
        assert now._replace(step=2) not in ours._bases, "others are dropped all the same"


@pytest.mark.parametrize("name", ["shm", RAY])
def test_all_ranks_of_a_version_may_be_one_process(name, part, request, opened):
    address = request.getfixturevalue("ray_cluster") if name == "ray" else ""
    kind = RayStore if name == "ray" else SharedMemoryStore
    where = Where(name, "", address, os.environ.get("RAY_AUTH_MODE", "disabled"))
    theirs = opened(where)
    with closing(kind(most=2)) as ours:
        for step in range(1, 4):
            reports = []
            for rank in range(5):
                writer = PartWriter(ours, part._replace(step=step, rank=rank), CHUNK)
                writer.add(f"rank.{rank}", torch.full((100,), float(step)))
                reports.append(writer.seal())
            tensors = read(theirs, part.run_id, announcement(part._replace(step=step), *reports))
            assert len(tensors) == 5
            assert all(
                identical(tensor, torch.full((100,), float(step))) for tensor in tensors.values()
            )


def test_an_attempt_that_is_given_up_takes_nothing_of_an_earlier_one_with_it(opened, shm, part):
    ours, theirs = opened(shm), opened(shm)
    event = put(ours, part)
    again = PartWriter(ours, part, CHUNK)
    again.add(*SOME[0])
    again.discard()
    put(ours, part._replace(step=part.step + 1))
    assert_same(read(theirs, part.run_id, event), SOME)


def test_memory_that_an_attempt_took_in_vain_is_given_back(part, opened, shm):
    ours, theirs = opened(shm), opened(shm)
    put(ours, part)
    before = shared_bytes()
    writer = PartWriter(ours, part._replace(step=2), CHUNK)
    writer.add("large", torch.rand(1 << 22))
    assert shared_bytes() > before + (16 << 20)
    writer.discard()
    assert shared_bytes() < before + (4 << 20)
    assert_same(read(theirs, part.run_id, put(ours, part._replace(step=3))), SOME)


def shared_bytes():
    """What segments of this process take."""
    own = users_folder().glob(f"{os.getpid()}-*/*")
    return sum(path.stat().st_blocks * 512 for path in own)


def test_a_part_that_was_left_open_is_given_up_by_the_next(opened, shm, part):
    ours, theirs = opened(shm), opened(shm)
    abandoned = PartWriter(ours, part, CHUNK)
    abandoned.add(*SOME[0])
    assert_same(read(theirs, part.run_id, put(ours, part._replace(step=2))), SOME)
    with raises(PartClosed, version=str(part)):
        abandoned.seal()


def test_a_segment_grows_with_the_model_and_shrinks_with_it(opened, shm, part):
    ours, theirs = opened(shm), opened(shm)
    for step, count in enumerate((1000, 3_000_000, 10, 2_000_000)):
        sent = [("a", torch.arange(count))]
        here = part._replace(step=step)
        assert_same(read(theirs, part.run_id, put(ours, here, sent, None)), sent)
        assert segment(here).stat().st_size < 8 * count + (2 << 20)
        ours.delete(here)


def test_full_shared_memory_is_an_error_that_says_what_to_do(opened, shm, part, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "no space left")

    store = opened(shm)
    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        with raises(SharedMemoryUnusable, fault="full"):
            put(store, part)
    assert_same(read(opened(shm), part.run_id, put(store, part)), SOME)


def test_a_folder_that_others_may_write_to_is_not_used(tmp_path, part):
    users_folder(tmp_path).mkdir()
    users_folder(tmp_path).chmod(0o777)
    with raises(SharedMemoryUnusable, fault="foreign", folder=users_folder(tmp_path)):
        put(SharedMemoryStore(tmp_path), part)
    fake = users_folder(tmp_path) / "1-fake"
    fake.mkdir()
    os.mkfifo(fake / "~".join(map(str, part)))  # who opened it would wait for ever
    assert SharedMemoryStore(tmp_path).open(part) is None
    assert fake.exists()


def test_a_header_that_lies_is_not_believed(opened, shm, part):
    ours, theirs = opened(shm), opened(shm)
    event = put(ours, part)
    with segment(part).open("r+b") as file:
        file.seek(8)
        file.write((2**60).to_bytes(8, "little"))
    with raises(CorruptPart, fault="contents", version=str(part)):
        read(theirs, part.run_id, event)
    ours.delete(part)
    assert ours._idle[0].take(), "who refused it does not hold it"


def test_readers_cannot_write_to_what_they_read(opened, shm, part):
    ours, theirs = opened(shm), opened(shm)
    put(ours, part)
    source = theirs.open(part)
    [data] = source.read([24_000], lambda *_: None)
    assert data.readonly
    source.close()


def test_a_sweep_leaves_the_living_alone(tmp_path):
    owner = Owner(tmp_path)
    made = users_folder(tmp_path) / ".half-made"
    made.mkdir()
    assert sweep(tmp_path) == []
    os.utime(made, (time.time() - 3600,) * 2)
    assert sweep(tmp_path) == [made]
    os.close(owner._lock)  # as when its process ends
    assert sweep(tmp_path) == [owner.folder]
    assert list(users_folder(tmp_path).iterdir()) == []


def test_a_reader_on_another_host_is_told_where_the_weights_are(opened, shm, part, tmp_path):
    event = put(opened(shm), part)
    elsewhere = SharedMemoryStore(tmp_path)
    with raises(VersionNotStored, fault="shared memory", place=str(tmp_path)):
        read(elsewhere, part.run_id, event)


# --- which is taken ---------------------------------------------------------------------------


@pytest.fixture
async def trainer(publisher, redis_url, weights_url, run_id):
    urls = {"redis_url": redis_url, "weights_url": weights_url}
    made = Synchronizer(run_id, publisher.epoch, transport="shm", **urls)
    async with reducer_task(redis_url, run_id):
        yield made
    made.close()


@pytest.fixture
def explorer(redis_url, run_id):
    made = Synchronizer(run_id, 0, redis_url=redis_url, weights_url="unix:///nowhere")
    yield made
    made.close()


async def test_the_log_says_how_a_version_travels_and_explorers_follow_it(trainer, explorer, log):
    model, source = torch.nn.Linear(8, 4), torch.nn.Linear(8, 4)
    publish(trainer, dict(source.named_parameters()), 1)
    event = await ready(log, 1)
    assert event.transport == "shm"
    events = [decode_envelope(entry.payload).event for entry in await log.read()]
    assert [event.transport for event in events if isinstance(event, VersionOpened)] == ["shm"]
    explorer.apply(model, event)
    assert identical(model.weight, source.weight)


async def test_versions_in_shared_memory_are_freed_once_retired(trainer, explorer, log, run_id):
    for step in range(6):
        publish(trainer, {"a": torch.full((100,), float(step))}, step)
        with explorer.pull(await ready(log, step)) as version:
            assert dict(version.tensors())["a"][0] == step
    with anyio.fail_after(PATIENCE):
        while not any(
            isinstance(event, VersionRetired) and event.step == 3
            for event in await announced(log, 1)
        ):
            await anyio.sleep(0.01)
    trainer.publication(6).begin()  # whoever publishes next frees first
    steps = {path.name.split("~")[2] for path in users_folder().glob(f"*/{run_id}~*")}
    assert steps == {"4", "5"}
    trainer.close()
    assert not list(users_folder().glob(f"*/{run_id}~*"))


async def test_a_transport_that_is_not_known_is_an_error_that_names_it(explorer, trainer, log):
    publish(trainer, {"a": torch.ones(3)}, 1)
    event = msgspec.structs.replace(await ready(log, 1), transport="pigeon")
    refused = raises(UnknownTransport, transport="pigeon", transports=get_args(TransportName))
    with refused, explorer.pull(event):
        pass


WHERE = "trinity_workers.launch.transport"


@pytest.mark.parametrize(
    ("free", "here", "transport", "why"),
    [
        (64 << 30, True, "shm", "every explorer is on this host"),
        (64 << 20, True, "ray", "every explorer is in this Ray cluster, and less than 1 GiB"),
        (64 << 30, False, "redis", "explorers may be on any host"),
    ],
)
def test_the_best_transport_is_taken_by_where_explorers_are(
    monkeypatch, free, here, transport, why
):
    monkeypatch.setattr(f"{WHERE}.free_bytes", lambda: free)
    chosen = chosen_transport(SyncConfig(), explorers_here=here)
    assert chosen.name == transport
    assert chosen.reason.startswith(why)


def test_what_was_asked_for_is_taken_or_refused_with_the_way_out(monkeypatch):
    shm, ray, nccl = (
        SyncConfig(transport="shm"),
        SyncConfig(transport="ray"),
        SyncConfig(method="nccl"),
    )
    for name in ("shm", "redis"):
        assert chosen_transport(SyncConfig(transport=name), explorers_here=False).name == name
    assert chosen_transport(nccl, explorers_here=False).name == "collective"
    assert chosen_transport(ray, explorers_here=True).name == "ray"
    with raises(RayUnusable, fault="outside"):
        chosen_transport(ray, explorers_here=False)
    monkeypatch.setattr(f"{WHERE}.available", lambda: False)
    with raises(SharedMemoryUnusable, fault="chosen"):
        chosen_transport(shm, explorers_here=True)
    monkeypatch.setattr("torch.distributed.is_available", lambda: False)
    with raises(GroupBroken, fault="torch"):
        chosen_transport(nccl, explorers_here=True)
