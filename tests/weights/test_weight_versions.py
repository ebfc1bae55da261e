"""Weight versions over a real server: whole or invisible, bit for bit."""

import contextlib
import pickle

import anyio
import pytest
import torch
from msgspec.structs import replace
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from tests.support.errors import raises
from tests.support.pipeline import announced, folded, outcomes, reducer_task, reports_accepted
from tests.support.tensors import identical
from tests.support.waits import PATIENCE
from tests.support.weight_versions import awkward, publish, ready
from trinity_events import Synchronizer
from trinity_events.errors import CorruptVersion, VersionNotStored, VersionVanished
from trinity_events.weights import (
    PartRef,
    PartWriter,
    RedisChunkStore,
    SharedMemoryStore,
    adopt,
)
from trinity_events.weights.errors import (
    AbsentTensor,
    CorruptChunk,
    CorruptManifest,
    FreedTensor,
    TransportRefused,
    UnfillableTensor,
    UnfitTensor,
    UnpublishableDtype,
    UnpublishableName,
)
from trinity_events.weights.tensors import dtype_name
from trinity_schemas import (
    VersionRetired,
    WeightsApplied,
    chunk_key,
    decode_envelope,
    decode_manifest,
    manifest_key,
)


async def test_every_kind_of_tensor_travels_bit_for_bit(trainer, explorer, log):
    sent = awkward()
    publish(trainer, sent, 3)
    with explorer.pull(await ready(log, 3)) as version:
        received = dict(version.tensors())
        assert list(received) == list(sent)
        for name, tensor in sent.items():
            assert received[name].dtype == tensor.dtype
            assert received[name].shape == tensor.shape
            assert identical(received[name], tensor), name


async def test_applying_installs_in_place_and_reports_what_is_served(trainer, explorer, log):
    model, source = torch.nn.Linear(8, 4), torch.nn.Linear(8, 4)
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    publish(trainer, dict(source.named_parameters()), 1)
    event = await ready(log, 1)
    phases = explorer.apply(model, event)
    assert identical(model.weight, source.weight)
    assert identical(model.bias, source.bias)
    assert [parameter.data_ptr() for parameter in model.parameters()] == addresses
    explorer.flush()
    await reports_accepted(log)
    applied = [decode_envelope(entry.payload) for entry in await log.read()][-1]
    assert isinstance(applied.event, WeightsApplied)
    assert (applied.producer.role, applied.producer.rank) == ("explorer", 1)
    assert applied.event.digest == event.version_digest
    assert applied.event.phases == phases


async def test_a_version_is_invisible_before_it_is_committed(trainer, log):
    trainer.open_version(1)
    trainer.publish([("a", torch.ones(100))], 1)
    trainer.flush()
    await folded(log)
    assert await outcomes(log) == []
    trainer.commit(1)
    await ready(log, 1)


async def test_a_chunk_that_was_changed_is_never_installed(trainer, explorer, log, weights_client):
    model = torch.nn.Linear(32, 4)
    before = model.weight.clone()
    publish(trainer, dict(torch.nn.Linear(32, 4).named_parameters()), 1)
    event = await ready(log, 1)
    key = chunk_key(explorer.run_id, event.epoch, 1, 0, 2)
    weights_client.setrange(key, 5, b"\x55")
    with raises(CorruptVersion, rank=0, chunk=2):
        explorer.apply(model, event)
    assert identical(model.weight, before)


async def test_a_truncated_chunk_is_never_installed(trainer, explorer, log, weights_client):
    publish(trainer, {"a": torch.ones(100)}, 1)
    event = await ready(log, 1)
    weights_client.set(chunk_key(explorer.run_id, event.epoch, 1, 0, 1), b"short")
    with raises(CorruptVersion, rank=0, chunk=1), explorer.pull(event):
        pass


async def test_a_manifest_that_was_swapped_is_not_believed(trainer, explorer, log, weights_client):
    publish(trainer, {"a": torch.ones(100)}, 1)
    publish(trainer, {"a": torch.zeros(100)}, 2)
    event = await ready(log, 2)
    epoch, run_id = event.epoch, explorer.run_id
    other = weights_client.get(manifest_key(run_id, epoch, 1, 0))
    weights_client.set(manifest_key(run_id, epoch, 2, 0), other)
    refused = raises(CorruptManifest, rank=0, fault="digest")
    with refused, explorer.pull(event):
        pass


async def test_a_version_that_is_gone_is_an_error_that_says_so(
    trainer, explorer, log, weights_client
):
    publish(trainer, {"a": torch.ones(100)}, 1)
    event = await ready(log, 1)
    weights_client.delete(chunk_key(explorer.run_id, event.epoch, 1, 0, 3))
    with raises(VersionVanished, fault="chunk", chunk=3), explorer.pull(event):
        pass
    weights_client.delete(manifest_key(explorer.run_id, event.epoch, 1, 0))
    refused = raises(VersionNotStored, fault="server")
    with refused, explorer.pull(event):
        pass


async def test_retired_versions_are_freed_and_the_newest_two_stay(
    trainer, explorer, log, weights_client
):
    for step in range(6):
        publish(trainer, {"a": torch.full((100,), float(step))}, step)
        await ready(log, step)
    with anyio.fail_after(PATIENCE):
        while not any(
            isinstance(event, VersionRetired) and event.step == 3
            for event in await announced(log, 1)
        ):
            await anyio.sleep(0.01)
    trainer.publication(6).begin()  # whoever publishes next frees first
    keys = weights_client.keys(f"trinity-weights:{{{explorer.run_id}.*")
    steps = {key.decode().split("}")[0].split(".")[-2] for key in keys}
    assert steps == {"4", "5"}
    assert all(weights_client.ttl(key) > 0 for key in keys), "orphans expire"


async def test_what_does_not_fit_changes_nothing_and_names_the_tensor(trainer, explorer, log):
    model = torch.nn.Linear(8, 4)
    before = model.weight.clone()
    good = dict(torch.nn.Linear(8, 4).named_parameters())
    wrong = (
        ({**good, "extra": torch.ones(1)}, AbsentTensor, "model", "extra"),
        ({"weight": good["weight"]}, AbsentTensor, "version", "bias"),
        ({**good, "bias": torch.ones(5)}, UnfitTensor, "form", "bias"),
        ({**good, "weight": good["weight"].bfloat16()}, UnfitTensor, "dtype", "weight"),
    )
    for step, (tensors, error, fault, tensor) in enumerate(wrong):
        publish(trainer, tensors, step)
        event = await ready(log, step)
        with raises(error, fault=fault, tensor=tensor):
            explorer.apply(model, event)
    assert identical(model.weight, before)


async def test_tied_parameters_need_one_tensor(trainer, explorer, log):
    model = torch.nn.ModuleDict({name: torch.nn.Linear(4, 4, bias=False) for name in "ab"})
    model["b"].weight = model["a"].weight
    publish(trainer, {"a.weight": torch.ones(4, 4)}, 1)
    explorer.apply(model, await ready(log, 1))
    assert identical(model["b"].weight, torch.ones(4, 4))


async def test_tied_parameters_that_come_under_both_names_are_compared_before_they_are_loaded(
    trainer, explorer, log
):
    model = torch.nn.ModuleDict({name: torch.nn.Linear(4, 4, bias=False) for name in "ab"})
    model["b"].weight = model["a"].weight
    for step, other in ((1, 1.0), (2, 2.0), (3, 1.0)):
        tensors = {"a.weight": torch.full((4, 4), 1.0), "b.weight": torch.full((4, 4), other)}
        publish(trainer, tensors, step)
        event = await ready(log, step)
        if other == 1.0:
            explorer.load(model, event)
        else:
            with raises(UnfillableTensor, fault="tied", tensor="a.weight", other="b.weight"):
                explorer.load(model, event)
        assert identical(model["b"].weight, torch.ones(4, 4))


async def test_a_module_under_two_names_takes_its_buffers_under_both_or_one(trainer, explorer, log):
    shared = torch.nn.BatchNorm1d(3)
    model = torch.nn.ModuleDict({"a": shared, "b": shared})
    sent = {
        name: torch.full_like(tensor, step)
        for step, (name, tensor) in enumerate(model.state_dict().items())
        if name.startswith("a.")
    }
    both = sent | {name.replace("a.", "b."): tensor for name, tensor in sent.items()}
    for step, tensors in enumerate((both, sent)):
        torch.nn.init.zeros_(shared.running_mean)
        publish(trainer, tensors, step)
        explorer.apply(model, await ready(log, step))
        assert all(identical(tensor, both[name]) for name, tensor in model.state_dict().items())


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")  # torch's own
@pytest.mark.parametrize("how", ["apply", "load", "adopt"])
async def test_a_model_that_is_compiled_or_wrapped_takes_versions_by_plain_names(
    trainer, explorer, log, how
):
    plain = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    sent = {name: torch.ones_like(tensor) for name, tensor in plain.state_dict().items()}
    publish(trainer, sent, 1)
    event = await ready(log, 1)
    compiled = torch.compile(torch.nn.Sequential(plain[0], checkpoint_wrapper(plain[1])))
    assert "_orig_mod.1._checkpoint_wrapped_module.weight" in dict(compiled.named_parameters())
    if how == "adopt":
        with explorer.pull(event) as version:
            adopt(compiled, version)
            assert all(identical(tensor, sent[name]) for name, tensor in plain.state_dict().items())
    else:
        getattr(explorer, how)(compiled, event)
        assert all(identical(tensor, sent[name]) for name, tensor in plain.state_dict().items())
        publish(trainer, dict(compiled.named_parameters()) | dict(compiled.named_buffers()), 2)
        getattr(explorer, how)(compiled, await ready(log, 2))


async def test_without_urls_the_embedded_servers_are_used_and_chunks_are_in_no_file(
    publisher, log, client, weights_client, redis_url, run_id
):
    ours, theirs = Synchronizer(run_id, publisher.epoch), Synchronizer(run_id, 0, role="explorer")
    async with reducer_task(redis_url, run_id):
        publish(ours, {"weight": torch.ones(2, 2), "bias": torch.ones(2)}, 1)
        model = torch.nn.Linear(2, 2)
        theirs.apply(model, await ready(log, 1))
        assert identical(model.weight, torch.ones(2, 2))
    for synchronizer in (pickle.loads(pickle.dumps(ours)), ours, theirs):
        synchronizer.close()
    chunks = f"trinity-weights:{{{run_id}.*"
    assert weights_client.keys(chunks) and not await client.keys(chunks)


def test_a_transport_that_there_is_not_is_refused_when_it_is_named(run_id):
    with raises(TransportRefused, fault="name", transport="auto"):
        Synchronizer(run_id, 1, transport="auto")


@pytest.mark.parametrize(("name", "shape"), [("", (1,)), ("n" * 257, (1,)), ("deep", (1,) * 33)])
async def test_what_readers_would_refuse_is_refused_by_who_publishes(trainer, name, shape):
    with raises(UnpublishableName, name=name, dimensions=len(shape)):
        trainer.publish([(name, torch.zeros(shape))], 1)


def test_a_dtype_that_cannot_travel_is_refused():
    with raises(UnpublishableDtype, fault="tensor", dtype="torch.complex128"):
        dtype_name(torch.complex128)


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_tensor_that_wraps_another_travels_by_its_elements(wrapped, part):
    """Such as what torch's collectives return before they end, and what quantizes as it goes."""
    sent = torch.arange(600_000.0)
    with contextlib.closing(SharedMemoryStore()) as store:
        writer = PartWriter(store, part, tensor_digests=True)
        tensor = AsyncCollectiveTensor(sent)
        writer.add("w", torch.nn.Parameter(tensor) if wrapped else tensor)
        writer.seal()
        with contextlib.closing(store.open(part)) as source:
            assert bytes(source.data) == sent.numpy().tobytes()


@pytest.mark.parametrize("elements", [3, 600_000])
def test_a_tensor_whose_memory_was_freed_is_refused(elements, weights_client, part):
    tensor = torch.ones(elements)
    tensor.untyped_storage().resize_(0)
    writer = PartWriter(RedisChunkStore(weights_client), part)
    with raises(FreedTensor, tensor="w"):
        writer.add("w", tensor)


async def test_a_synchronizer_is_picklable_and_connects_where_it_is_used(trainer, explorer, log):
    copy = pickle.loads(pickle.dumps(trainer))
    publish(copy, {"a": torch.ones(3)}, 1)
    copy.close()
    event = await ready(log, 1)
    with explorer.pull(event) as version:
        assert version.bytes == 12
    assert trainer.bind("actor", 2).producer.rank == 2


def test_a_client_of_another_process_differs_in_role_and_rank_alone(run_id):
    ours = Synchronizer(run_id, 3, transport="shm", chunk_bytes=64, full_every=4, lease=9.0)
    bound = ours.bind("actor", 2)
    assert bound.settings == replace(ours.settings, role="actor", rank=2) != ours.settings
    assert pickle.loads(pickle.dumps(bound)).settings == bound.settings


def test_a_part_holds_one_chunk_in_memory(weights_client, run_id):
    store = RedisChunkStore(weights_client)
    writer = PartWriter(store, PartRef(run_id, 1, 1, 0), chunk_bytes=1024)
    writer.add("big", torch.arange(10_000, dtype=torch.uint8))
    report = writer.seal()
    assert (report.bytes, report.chunks) == (10_000, 10)
    manifest = decode_manifest(store.open(PartRef(run_id, 1, 1, 0)).manifest)
    assert [chunk.nbytes for chunk in manifest.chunks] == [1024] * 9 + [784]


async def test_an_adapter_is_published_and_applied_alone(trainer, explorer, log):
    model = torch.nn.ModuleDict({name: torch.nn.Linear(4, 4) for name in ("base", "lora")})
    before = model["base"].weight.clone()
    adapter = {
        f"lora.{name}": torch.rand_like(parameter)
        for name, parameter in model["lora"].named_parameters()
    }
    trainer.open_version(1)
    trainer.publish(adapter.items(), 1, subset=True)
    trainer.commit(1)
    explorer.apply(model, await ready(log, 1))
    assert identical(model["base"].weight, before)
    assert identical(model["lora"].weight, adapter["lora.weight"])
    # Without saying so, a version that lacks tensors is refused.
    publish(trainer, adapter, 2)
    with raises(AbsentTensor, tensor="base.weight", fault="version"):
        explorer.apply(model, await ready(log, 2))


async def test_an_explorer_that_joins_loads_a_version_straight_into_its_model_and_says_so(
    trainer, explorer, log, weights_client
):
    source, module = torch.nn.Linear(40, 30), torch.nn.Linear(40, 30)
    publish(trainer, dict(source.named_parameters()), 1)
    event = await ready(log, 1)
    explorer.load(module, event)
    assert identical(module.weight, source.weight)
    explorer.flush()
    await reports_accepted(log)
    events = [decode_envelope(entry.payload).event for entry in await log.read()]
    [applied] = [event for event in events if isinstance(event, WeightsApplied)]
    assert (applied.digest, applied.bytes) == (event.version_digest, 4 * 31 * 40 - 40)
    weights_client.setrange(chunk_key(explorer.run_id, event.epoch, 1, 0, 0), 5, b"\x55")
    with raises(CorruptChunk, rank=0, chunk=0, harm="the model has some of it"):
        explorer.load(module, event)
