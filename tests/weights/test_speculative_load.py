"""Models at rest that are filled with a version while it is still being published."""

from contextlib import closing
from threading import Event

import anyio
import pytest
import torch
from msgspec.structs import replace

from tests.support.errors import raises
from tests.support.pipeline import reducer_task
from tests.support.prefetching import CHUNKS, follower_of, has, load, reading, write
from tests.support.published_parts import announcement
from tests.support.shards import rows
from tests.support.tensors import identical
from tests.support.transport_processes import CHUNK, SOME, Where
from tests.support.waits import PATIENCE, wait_until
from tests.support.weight_versions import ready
from trinity_events.errors import CorruptVersion
from trinity_events.system.shared_memory import available
from trinity_events.weights import (
    PartRef,
    PartWriter,
    SharedMemoryStore,
    check_fit,
    install,
    load_version,
    pull_version,
)
from trinity_events.weights.applying.speculative_load import SpeculativeLoad
from trinity_events.weights.errors import UnfillableTensor, UnfitTensor
from trinity_events.weights.slices import ShardOffset
from trinity_events.weights.transports.shared_memory.reading import DATA
from trinity_schemas import VersionOpened, decode_manifest
from trinity_workers.explorer.run_follower import followed_run

pytestmark = pytest.mark.skipif(not available(), reason="the host has no shared memory as files")


def empty():
    layers = {name.removeprefix("layer."): torch.zeros_like(tensor) for name, tensor in SOME}
    return torch.nn.ModuleDict({"layer": torch.nn.ParameterDict(layers)})


@pytest.fixture
def model(shared_memory_stores, part):
    """A model that has a version, and what knows where the next one belongs."""
    ours, theirs = shared_memory_stores
    module = empty()
    ahead = SpeculativeLoad()
    report = write(PartWriter(ours, part, CHUNK)).seal()
    filled = load_version(theirs, part.run_id, announcement(part, report), module)
    ahead.record(module, filled.manifests)
    return module, ahead


def changed(by=1.0):
    return [(name, tensor + by) for name, tensor in SOME]


def test_a_model_has_a_version_before_it_is_sealed_but_for_the_last_chunk(
    shared_memory_stores, model, part, copied
):
    (ours, theirs), (module, ahead) = shared_memory_stores, model
    part = part._replace(step=2)
    squared = (module.get_parameter("layer.3") ** 2).sum()
    with reading(theirs, [part], on_part=ahead.begin(module)) as prefetch:
        writer = write(PartWriter(ours, part, CHUNK), changed())
        wait_until(lambda: has(module, changed()[:-1]))
        assert not has(module, changed())
        assert prefetch.ended is None
        report = writer.seal()
    load(theirs, module, ahead, part, report)
    assert has(module, changed())
    assert sum(copied) == sum(tensor.nbytes for _, tensor in SOME), "nothing is copied twice"
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squared.backward()


def test_the_shards_of_all_ranks_are_taken_as_they_come(shared_memory_stores, part, copied):
    (ours, theirs), ahead = shared_memory_stores, SpeculativeLoad()
    weight, module = torch.rand(64, 33), torch.nn.ParameterDict({"weight": torch.zeros(64, 33)})
    with closing(SharedMemoryStore()) as second:
        for step in (1, 2):
            parts = [part._replace(step=step, rank=rank) for rank in (0, 1)]
            copied.clear()
            with reading(theirs, parts, on_part=ahead.begin(module)):
                writers = [
                    PartWriter(store, ref, 256)
                    for store, ref in zip((ours, second), parts, strict=True)
                ]
                for writer, (tensor, *place) in zip(writers, rows(weight + step, 20), strict=True):
                    writer.add("weight", tensor, ShardOffset(*place))
                if step == 2:  # of 2,640 and 5,808 bytes, in chunks of 256
                    wait_until(lambda: sum(copied) == (10 + 22) * 256)
                event = announcement(parts[0], *[writer.seal() for writer in writers])
            loaded = load_version(theirs, part.run_id, event, module, ahead=ahead)
            ahead.record(module, loaded.manifests)
            assert identical(module["weight"], weight + step)
    assert sum(copied) == weight.nbytes, "nothing is copied twice"


def test_a_model_that_has_a_tensor_twice_takes_nothing_since_what_comes_has_to_be_compared(
    shared_memory_stores, part
):
    ours, theirs = shared_memory_stores
    module, ahead = empty(), SpeculativeLoad()
    tied, writer = module["layer"], PartWriter(ours, part, CHUNK)
    [first, *_] = tied.keys()
    tied["again"] = tied[first]
    write(writer).add("layer.again", dict(SOME)[f"layer.{first}"])
    with pull_version(theirs, part.run_id, announcement(part, writer.seal())) as version:
        install(check_fit(module, version))
        ahead.record(module, [manifest for manifest, _ in version.parts])
    assert ahead.begin(module) is None


def test_a_version_that_lies_otherwise_than_the_one_before_is_loaded_anew(
    shared_memory_stores, model, part
):
    (ours, theirs), (module, ahead) = shared_memory_stores, model
    part = part._replace(step=2)
    with reading(theirs, [part], on_part=ahead.begin(module)):
        report = write(PartWriter(ours, part, CHUNK), changed()[::-1]).seal()
    load(theirs, module, ahead, part, report)
    assert has(module, changed())


def test_a_model_that_has_lost_its_memory_takes_nothing_and_says_so(model):
    module, ahead = model
    module.to("meta")
    with raises(UnfillableTensor, fault="meta"):
        ahead.begin(module)
    assert not ahead.written_names


def test_another_version_than_the_one_that_was_taken_is_loaded_whole(
    shared_memory_stores, model, part
):
    (ours, theirs), (module, ahead) = shared_memory_stores, model
    second, third = part._replace(step=2), part._replace(step=3)
    report = write(PartWriter(ours, second, CHUNK), changed(1.0)).seal()
    with reading(theirs, [third], on_part=ahead.begin(module)):
        write(PartWriter(ours, third, CHUNK), changed(2.0)).seal()
    assert not has(module, changed(1.0))
    load(theirs, module, ahead, second, report)
    assert has(module, changed(1.0))


def test_what_was_taken_of_a_part_that_was_given_up_is_taken_anew(
    shared_memory_stores, model, part
):
    (ours, theirs), (module, ahead) = shared_memory_stores, model
    part = part._replace(step=2)
    with reading(theirs, [part], on_part=ahead.begin(module)):
        writer = write(PartWriter(ours, part, CHUNK), changed(1.0))
        wait_until(lambda: follower_of(theirs) == CHUNKS)
        writer.discard()
        wait_until(lambda: theirs.followers[0].seen is None)
        report = write(PartWriter(ours, part, CHUNK), changed(2.0)).seal()
    load(theirs, module, ahead, part, report)
    assert has(module, changed(2.0))


def test_what_was_taken_and_is_not_what_was_published_is_found(shared_memory_stores, model, part):
    (ours, theirs), (module, ahead) = shared_memory_stores, model
    part = part._replace(step=2)
    with reading(theirs, [part], on_part=ahead.begin(module)):
        writer = write(PartWriter(ours, part, CHUNK), changed())
        wait_until(lambda: follower_of(theirs) == CHUNKS)
        report = writer.seal()
    # Digested too early: taken too early, too.
    theirs._seen[part].digests[2] = "xxh3:" + "0" * 32
    with torch.no_grad():
        for parameter in module.parameters():
            parameter[::7] = -1.0
    load(theirs, module, ahead, part, report)
    # Chunk 2 begins in layer.2, whose neighbours take 4,032 bytes each.
    layer, expected = module.get_parameter("layer.2"), changed()[2][1]
    assert layer[0] == -1.0 and identical(layer[32:], expected[32:])
    path = next(iter(theirs._newest_first("~".join(map(str, part)))))
    with path.open("r+b") as file:
        file.seek(DATA + 2 * CHUNK + 5)
        file.write(b"\x55")
    with raises(CorruptVersion, rank=0, chunk=2):
        load(theirs, module, ahead, part, report)


def test_a_module_that_has_other_memory_meanwhile_is_filled_there(
    shared_memory_stores, model, part
):
    (ours, theirs), (module, ahead) = shared_memory_stores, model
    for step in (2, 3):
        here, before = part._replace(step=step), module.get_parameter("layer.0").data
        module.get_parameter("layer.0").data = torch.zeros(1000)
        with reading(theirs, [here], on_part=ahead.begin(module)):
            report = write(PartWriter(ours, here, CHUNK), changed(step)).seal()
        load(theirs, module, ahead, here, report)
        assert has(module, changed(step)) and not identical(before, changed(step)[0][1])


def test_a_module_whose_elements_lie_otherwise_is_not_filled_before(model, part):
    module, ahead = model
    module.get_parameter("layer.0").data = torch.zeros(2000)[::2]
    assert ahead.begin(module) is None
    assert SpeculativeLoad().begin(module) is None, "nothing is known of it"


def test_what_was_taken_counts_only_where_the_module_still_is(shared_memory_stores, model, part):
    (ours, theirs), (module, ahead) = shared_memory_stores, model
    layer = module.get_parameter("layer.1")
    for step in (2, 3):
        here = part._replace(step=step)
        with reading(theirs, [here], on_part=ahead.begin(module)):
            writer = write(PartWriter(ours, here, CHUNK), changed(step))
            wait_until(lambda: follower_of(theirs) == CHUNKS)
            report = writer.seal()
        if step == 2:
            layer.data = torch.zeros(1000)
            load(theirs, module, ahead, here, report)
            assert has(module, changed(step))
        else:
            layer.data = layer.data.view(40, 25)
            with raises(UnfitTensor, tensor="layer.1", in_model="torch.float32 [40, 25]"):
                load(theirs, module, ahead, here, report)


def test_chunks_that_are_shorter_than_their_writer_said_are_loaded_anew(shared_memory_stores, part):
    """As where a segment was too small: its writer had memory up to there."""
    ours, theirs = shared_memory_stores
    ours._last_size = 4 << 20
    tensors = [("a", torch.rand(400_000)), ("b", torch.rand(300_000))]
    module, ahead = (
        torch.nn.ParameterDict({n: torch.zeros_like(t) for n, t in tensors}),
        SpeculativeLoad(),
    )
    ahead.record(
        module, load(theirs, module, ahead, part, write(PartWriter(ours, part), tensors).seal())
    )
    ours._last_size = 1 << 20  # as after a smaller version
    part, more = part._replace(step=2), [(name, tensor + 1) for name, tensor in tensors]
    with reading(theirs, [part], on_part=ahead.begin(module)):
        writer = write(PartWriter(ours, part), more)
        wait_until(lambda: follower_of(theirs) >= 4)
        report = writer.seal()
    load(theirs, module, ahead, part, report)
    sizes = {chunk.nbytes for chunk in decode_manifest(theirs.open(part).manifest).chunks[:-1]}
    assert len(sizes) > 1
    assert all(identical(module[name], tensor) for name, tensor in more)


def test_what_was_taken_is_not_what_another_transport_has(
    shared_memory_stores, model, part, weights_url
):
    (ours, theirs), (module, ahead) = shared_memory_stores, model
    part, redis = part._replace(step=2), Where("redis", weights_url).store()
    report = write(PartWriter(redis, part, CHUNK), changed(2.0)).seal()
    with reading(theirs, [part], on_part=ahead.begin(module)):
        writer = write(PartWriter(ours, part, CHUNK), changed(1.0))
        wait_until(lambda: follower_of(theirs) == CHUNKS)
        writer.seal()
    load(redis, module, ahead, part, report)
    redis.close()
    assert has(module, changed(2.0))


def test_nothing_is_taken_from_who_is_not_known_or_says_odd_things(model, part):
    module, ahead = model
    on_part = ahead.begin(module)
    for rank, index, nbytes in ((1, 0, CHUNK), (0, 0, 1), (0, 0, CHUNK + 1), (0, 99, CHUNK)):
        on_part(part._replace(rank=rank))(index, memoryview(b"\x55" * nbytes))
    assert has(module, SOME) and not ahead.written_names


def test_what_counts_as_digested_was_taken(shared_memory_stores, model, part):
    (ours, theirs), (module, ahead) = shared_memory_stores, model
    part, on_part = part._replace(step=2), ahead.begin(module)

    def failing(part):
        take = on_part(part)

        def one_only(index, data):
            if index:
                raise OSError("midway")
            take(index, data)

        return one_only

    writer = write(PartWriter(ours, part, CHUNK), changed())
    with pytest.raises(OSError, match="midway"):
        theirs.prefetch([part], Event(), 10.0, failing)
    load(theirs, module, ahead, part, writer.seal())
    assert has(module, changed())


@pytest.mark.parametrize("how", ["load", "apply"])
def test_an_adapter_makes_no_model_whole_that_was_filled_before(prefetching_ends, how):
    """What it does not bring may be of anything."""
    trainer, explorer, _ = prefetching_ends
    module = empty()

    def announced(step, tensors, **how):
        report = trainer.publish(tensors, step, **how)
        event = announcement(PartRef(trainer.run_id, trainer.epoch, step, 0), report)
        return replace(event, transport="shm")

    explorer.load(module, announced(1, SOME))
    explorer.load(module, announced(2, changed()[:1], subset=True))
    assert has(module, [*changed()[:1], *SOME[1:]])
    explorer.load(module, announced(3, SOME))
    opened, stop = VersionOpened(step=4, ranks=(0,), transport="shm"), Event()
    writer = trainer.publication(4, subset=True).begin()
    for name, tensor in changed()[:2]:
        writer.add(name, tensor)  # where a full version would be
    assert explorer.prefetch(trainer.epoch, opened, stop, 0.2, module) == "late"
    writer.discard()
    event = announced(4, changed()[:1], subset=True)
    with raises(UnfillableTensor, fault="torn", tensor="layer.1"):
        getattr(explorer, how)(module, event)
    getattr(explorer, how)(module, announced(5, changed()))
    getattr(explorer, how)(module, announced(6, SOME[:1], subset=True))
    assert has(module, [*SOME[:1], *changed()[1:]])


async def test_an_explorer_that_waits_is_filled_with_what_the_log_says_is_begun(
    prefetching_ends, redis_url, run_id, log
):
    trainer, explorer, prefetcher = prefetching_ends
    module = empty()
    async with reducer_task(redis_url, run_id), followed_run(run_id, redis_url) as run:
        trainer.open_version(1)
        trainer.publish(SOME, 1)
        trainer.commit(1)
        explorer.apply(module, await ready(log, 1))
        with anyio.fail_after(PATIENCE):
            async with prefetcher.listening(run):
                with prefetcher.into(module):
                    trainer.open_version(2)
                    part = trainer.publication(2)
                    write(part.begin(), changed())
                    while not has(module, changed()[:-1]):
                        await anyio.sleep(0.01)
                    assert not has(module, changed())
                    part.publish()
                    trainer.commit(2)
                    event = await ready(log, 2)
                async with prefetcher.paused():
                    explorer.load(module, event)
        assert has(module, changed())
