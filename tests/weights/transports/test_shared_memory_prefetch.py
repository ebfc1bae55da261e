"""Parts in shared memory that are verified while they are still being written."""

from contextlib import closing

import anyio
import pytest
import torch

from tests.support.errors import raises
from tests.support.pipeline import reducer_task
from tests.support.prefetching import CHUNKS, follower_of, reading, write
from tests.support.published_parts import announcement, assert_same, read
from tests.support.stored_parts import find_stored
from tests.support.tensors import identical
from tests.support.transport_processes import (
    CHUNK,
    SOME,
    Where,
    actor,
    kill,
    publishes_until,
    reads_along,
)
from tests.support.waits import PATIENCE, until, wait_until
from tests.support.weight_versions import ready
from trinity_events.errors import CorruptVersion
from trinity_events.system.shared_memory import (
    available,
    read_beside,
    users_folder,
)
from trinity_events.weights import PartWriter, SharedMemoryStore
from trinity_events.weights.transports.shared_memory.reading import PartPrefetch
from trinity_schemas import decode_manifest
from trinity_workers.explorer.run_follower import followed_run

pytestmark = pytest.mark.skipif(not available(), reason="the host has no shared memory as files")


def test_what_was_digested_before_it_was_sealed_is_not_digested_again(
    shared_memory_stores, part, digested
):
    ours, theirs = shared_memory_stores
    with reading(theirs, [part]) as prefetch:
        writer = write(PartWriter(ours, part, CHUNK))
        [path] = users_folder().glob(f"*/{'~'.join(map(str, part))}~writing")
        assert path.exists()
        wait_until(lambda: follower_of(theirs) == CHUNKS)
        assert prefetch.ended is None
        report = writer.seal()
    assert_same(read(theirs, part.run_id, announcement(part, report)), SOME)
    assert digested == [report.bytes - CHUNKS * CHUNK], "the last alone, which is short"


@pytest.mark.parametrize("chunk", [300_000, 512 << 10, 3 << 20])
def test_no_chunk_of_a_first_version_is_cut_short_where_its_segment_grows(
    shared_memory_stores, part, digested, chunk
):
    ours, theirs = shared_memory_stores
    large = torch.rand(5, 1 << 19)
    for step, by in (1, 0.5), (2, 1.5):  # the segment of the second is of the size that it needs
        now = part._replace(step=step)
        with reading(theirs, [now]):
            writer = PartWriter(ours, now, chunk)
            for number, tensor in enumerate(large + by, start=1):
                writer.add(f"layer.{number}", tensor)
                whole = number * tensor.nbytes // chunk
                wait_until(lambda whole=whole: follower_of(theirs) == whole)
            report = writer.seal()
        with closing(theirs.open(now)) as source:
            sizes = [chunk.nbytes for chunk in decode_manifest(source.manifest).chunks]
        assert set(sizes[:-1]) == {chunk}, step
        tensors = read(theirs, now.run_id, announcement(now, report))
        assert identical(torch.stack(list(tensors.values())), large + by)
        shorter = [size for size in sizes[-1:] if size != chunk]
        assert digested == shorter, "a reader saw to the whole ones while they were written"
        digested.clear()


def test_a_reader_that_meets_its_writer_in_the_lock_looks_again(
    shared_memory_stores, part, monkeypatch
):
    (ours, theirs), met = shared_memory_stores, []

    def meeting(descriptor):
        if not met:  # the writer holds it while it looks whether anybody reads
            met.append(descriptor)
            raise BlockingIOError
        read_beside(descriptor)

    monkeypatch.setattr(f"{PartPrefetch.__module__}.read_beside", meeting)
    with reading(theirs, [part]) as reading_ahead:
        writer = write(PartWriter(ours, part, CHUNK))
        wait_until(lambda: follower_of(theirs) == CHUNKS)
        writer.seal()
    assert met and reading_ahead.ended == "sealed"


def test_all_ranks_are_read_along_at_once(shared_memory_stores, part, digested):
    ours, theirs = shared_memory_stores
    second = SharedMemoryStore()
    parts = [part, part._replace(rank=1)]
    with reading(theirs, parts) as prefetch:
        reports = [write(PartWriter(ours, parts[0], CHUNK)).seal()]
        other = [(f"other.{name}", tensor) for name, tensor in SOME]
        reports.append(write(PartWriter(second, parts[1], CHUNK), other).seal())
    assert prefetch.ended == "sealed"
    tensors = read(theirs, part.run_id, announcement(part, *reports))
    assert len(tensors) == 2 * len(SOME)
    second.close()


@pytest.mark.processes
def test_a_writer_that_is_killed_is_given_up_within_the_deadline_and_leaves_nothing(
    part, shared_memory_stores
):
    ours, theirs = shared_memory_stores
    with (
        actor(publishes_until, Where("shm", ""), part, "midway") as (process, _),
        reading(theirs, [part], deadline=1.0) as prefetch,
    ):
        kill(process)
    assert prefetch.ended == "late"
    assert part not in theirs._seen
    assert theirs.open(part) is None
    ours.open(part)  # whoever uses the host next clears up
    assert find_stored(Where("shm", ""), part.run_id, process.pid) == []


def test_what_was_seen_of_a_part_that_is_given_up_does_not_count(shared_memory_stores, part):
    ours, theirs = shared_memory_stores
    other = [(name, tensor + 1) for name, tensor in SOME]
    with reading(theirs, [part]) as prefetch:
        first = write(PartWriter(ours, part, CHUNK), other)
        wait_until(lambda: follower_of(theirs) == CHUNKS)
        first.discard()
        report = write(PartWriter(ours, part, CHUNK)).seal()
    assert prefetch.ended == "sealed"
    assert_same(read(theirs, part.run_id, announcement(part, report)), SOME)


def test_a_segment_that_is_read_along_is_not_begun_anew(shared_memory_stores, part):
    ours, theirs = shared_memory_stores
    first = write(PartWriter(ours, part, CHUNK))
    follower = PartPrefetch(part, theirs._newest_first, theirs._map)
    assert follower.advance()
    first.discard()
    [segment] = ours._idle
    assert not segment.take()
    follower.close()
    assert segment.take()


@pytest.mark.processes
def test_a_reader_that_is_killed_while_it_reads_along_holds_nothing(shared_memory_stores, part):
    ours, _ = shared_memory_stores
    writer = write(PartWriter(ours, part, CHUNK))
    with actor(reads_along, Where("shm", ""), part) as (process, _):
        writer.discard()
        assert not ours._idle[0].take()
        kill(process)
    assert ours._idle[0].take()


def test_a_reader_that_was_stopped_verifies_the_rest_when_it_pulls(
    shared_memory_stores, part, digested
):
    ours, theirs = shared_memory_stores
    writer = write(PartWriter(ours, part, CHUNK), SOME[:3])
    with reading(theirs, [part]) as prefetch:
        wait_until(lambda: follower_of(theirs) == 12_000 // CHUNK)
        prefetch.stop.set()
    assert prefetch.ended == "stopped"
    report = write(writer, SOME[3:]).seal()
    assert_same(read(theirs, part.run_id, announcement(part, report)), SOME)
    assert len(digested) == CHUNKS + 1 - 12_000 // CHUNK


def test_what_was_digested_too_early_is_digested_again_and_what_is_broken_is_found(
    shared_memory_stores, part
):
    ours, theirs = shared_memory_stores
    writer = write(PartWriter(ours, part, CHUNK))
    with reading(theirs, [part]):
        wait_until(lambda: follower_of(theirs) == CHUNKS)
        report = writer.seal()
    theirs._seen[part].digests[2] = "xxh3:" + "0" * 32
    event = announcement(part, report)
    assert_same(read(theirs, part.run_id, event), SOME)
    [path] = users_folder().glob(f"*/{'~'.join(map(str, part))}")
    with path.open("r+b") as file:
        file.seek(4096 + 2 * CHUNK + 5)
        file.write(b"\x55")
    with raises(CorruptVersion, rank=0, chunk=2):
        read(theirs, part.run_id, event)


async def test_an_explorer_reads_along_what_the_log_says_is_begun(
    prefetching_ends, redis_url, run_id, log, digested
):
    trainer, explorer, prefetcher = prefetching_ends
    async with (
        reducer_task(redis_url, run_id),
        followed_run(run_id, redis_url) as run,
        prefetcher.listening(run),
    ):
        with anyio.fail_after(PATIENCE):
            trainer.open_version(1)
            part = trainer.publication(1)
            write(part.begin())
            stores = explorer._session.stores.opened
            await until(lambda: "shm" in stores and follower_of(stores["shm"]) == CHUNKS)
            part.publish()
            trainer.commit(1)
            event = await ready(log, 1)
            async with prefetcher.paused():
                with explorer.pull(event) as version:
                    assert_same(dict(version.tensors()), SOME)
        assert len(digested) == 1
