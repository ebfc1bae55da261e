"""Versions of another dtype than the model's: what travels, what is installed, what is refused."""

from contextlib import closing

import pytest
import torch

from tests.support.errors import raises
from tests.support.pipeline import reducer_task, reports_accepted
from tests.support.published_parts import announcement
from tests.support.shards import module_of, publish, rows
from tests.support.tensors import identical
from tests.support.weight_versions import ready
from trinity_events.weights import (
    PartWriter,
    ShardOffset,
    Synchronizer,
    check_fit,
    install,
    load_version,
    pull_version,
)
from trinity_events.weights.errors import UnfitTensor, UnpublishableDtype
from trinity_events.weights.publishing.part_writer import UnpublishableTensor
from trinity_events.weights.tensors import as_bytes
from trinity_schemas import VersionPartPublished, WeightsApplied, decode_envelope


def model(dtype, seed=0):
    """A model with a buffer of whole numbers, which are never converted."""
    torch.manual_seed(seed)
    made = torch.nn.Sequential(torch.nn.Linear(256, 40), torch.nn.Linear(40, 3)).to(dtype)
    made.register_buffer("steps", torch.tensor([seed, 7]))
    return made


def has(module, source):
    """Return True for the values of another module, in the module's own dtypes."""
    state, given = module.state_dict(), source.state_dict()
    return all(identical(tensor, given[name].to(tensor.dtype)) for name, tensor in state.items())


def published(trainer, source, step, **options):
    trainer.open_version(step)
    report = trainer.publish(source.state_dict(), step, **options)
    trainer.commit(step)
    return report


async def test_a_version_travels_in_the_dtype_that_is_asked_for(trainer, explorer, log):
    source, serving = model(torch.float32), model(torch.bfloat16, seed=1)
    full = published(trainer, source, 1)
    half = published(trainer, source, 2, dtype=torch.bfloat16)
    assert half.bytes < 0.55 * full.bytes
    with explorer.pull(await ready(log, 2)) as version:
        for name, tensor in version.tensors():
            expected = source.state_dict()[name]
            assert identical(tensor, expected.bfloat16() if name != "steps" else expected)
    explorer.apply(serving, await ready(log, 2))
    assert has(serving, source)
    events = [decode_envelope(entry.payload).event for entry in await log.read()]
    sizes = [event.bytes for event in events if isinstance(event, VersionPartPublished)]
    assert sizes == [full.bytes, half.bytes]


@pytest.mark.parametrize("how", ["apply", "load"])
async def test_another_dtype_is_refused_with_the_way_out_and_taken_where_that_is_asked_for(
    trainer, explorer, log, how
):
    source, serving = model(torch.float32), model(torch.bfloat16, seed=1)
    published(trainer, source, 1)
    event, before = await ready(log, 1), serving[0].weight.clone()
    take = getattr(explorer, how)
    with raises(UnfitTensor, fault="dtype", dtype="torch.bfloat16"):
        take(serving, event)
    assert identical(serving[0].weight, before)
    take(serving, event, cast=True)
    assert has(serving, source)
    explorer.flush()
    await reports_accepted(log)
    events = [decode_envelope(entry.payload).event for entry in await log.read()]
    [applied] = [event for event in events if isinstance(event, WeightsApplied)]
    assert applied.digest == event.version_digest, "of what travelled"


@pytest.mark.parametrize("how", ["apply", "load"])
async def test_what_is_no_floating_point_tensor_is_never_converted(trainer, explorer, log, how):
    source, serving = model(torch.float32), model(torch.float32, seed=1)
    published(trainer, source, 1)
    serving.steps = serving.steps.int()
    with raises(UnfitTensor, fault="form", tensor="steps", dtype="torch.int32"):
        getattr(explorer, how)(serving, await ready(log, 1), cast=True)


@pytest.mark.parametrize("how", ["apply", "load"])
async def test_deltas_and_digests_of_tensors_go_with_conversion(
    redis_url, weights_url, publisher, log, run_id, explorer, how
):
    trainer = Synchronizer(
        run_id,
        publisher.epoch,
        redis_url=redis_url,
        weights_url=weights_url,
        full_every=10,
        tensor_digests=True,
    )
    source, serving = model(torch.float32), model(torch.float32, seed=1)
    take = getattr(explorer, how)
    async with reducer_task(redis_url, run_id):
        with closing(trainer):
            published(trainer, source, 1)
            take(serving, await ready(log, 1))
            assert has(serving, source)
            for step in (2, 3, 4):
                # From the second on the model is of another dtype than what deltas rest on.
                serving.bfloat16()
                with torch.no_grad():
                    source[0].weight[step] += 1
                assert published(trainer, source, step).delta is not None
                take(serving, await ready(log, step), cast=True)
                assert has(serving, source)
            serving.float()
            take(serving, await ready(log, 4))
            assert has(serving, source)


async def test_what_is_read_along_after_a_conversion_is_taken_whole(trainer, explorer, log):
    source, serving = model(torch.float32), model(torch.float32, seed=1)
    published(trainer, source, 1)
    explorer.load(serving, await ready(log, 1))
    serving.bfloat16()
    for step in (2, 3):
        with torch.no_grad():
            source[0].weight += 1
        published(trainer, source, step)
        explorer.load(serving, await ready(log, step), cast=True)
        assert has(serving, source)


def test_shards_and_boxes_of_them_are_converted_on_every_transport(shard_stores, part):
    weight, bias = torch.rand(30, 24), torch.rand(5)
    shards = rows(weight, 11)
    event = publish(
        shard_stores, part, [("weight", *shards[0]), ("bias", bias)], [("weight", *shards[1])]
    )
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        module = module_of(weight=(30, 24), bias=(5,)).to(dtype)
        with pull_version(shard_stores[-1], part.run_id, event) as version:
            with raises(UnfitTensor, fault="dtype", dtype=str(dtype)):
                check_fit(module, version)
            install(check_fit(module, version, cast=True))
        assert identical(module["weight"], weight.to(dtype))
        assert identical(module["bias"], bias.to(dtype))
        loaded = module_of(weight=(30, 24), bias=(5,)).to(dtype)
        with raises(UnfitTensor, fault="dtype", dtype=str(dtype)):
            load_version(shard_stores[-1], part.run_id, event, loaded)
        load_version(shard_stores[-1], part.run_id, event, loaded, cast=True)
        assert identical(loaded["weight"], weight.to(dtype))
        assert identical(loaded["bias"], bias.to(dtype))


def test_shards_travel_in_the_dtype_that_is_asked_for(shard_stores, part):
    weight = torch.rand(30, 24)
    reports = []
    for rank, (tensor, *place) in enumerate(rows(weight, 11)):
        to = part._replace(rank=rank)
        writer = PartWriter(shard_stores[rank], to, 64, dtype=torch.float16, tensor_digests=True)
        writer.add("weight", tensor, ShardOffset(*place))
        reports.append(writer.seal())
    assert sum(report.bytes for report in reports) == weight.nbytes / 2
    with pull_version(shard_stores[-1], part.run_id, announcement(part, *reports)) as version:
        assert identical(dict(version.tensors())["weight"].cpu(), weight.half())


def test_a_client_publishes_in_its_dtype_through_helpers_too(redis_url, weights_url, run_id):
    made = Synchronizer(
        run_id, 1, redis_url=redis_url, weights_url=weights_url, dtype=torch.float16
    )
    for synchronizer in (made, made.bind("actor", 0)):
        writer = synchronizer.publication(1).begin()
        writer.add("weight", torch.rand(300, 10))
        assert writer.seal().bytes == 6000
        synchronizer.close()


RARE = {
    "float8_e8m0fnu": torch.tensor([0.5, 1.0, 2.0]).to(torch.float8_e8m0fnu),
    "float8_e4m3fnuz": torch.ones(4).to(torch.float8_e4m3fnuz),
    "float8_e5m2fnuz": torch.ones(4).to(torch.float8_e5m2fnuz),
    "float4_e2m1fn_x2": torch.arange(8, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
    "uint16": torch.tensor([0, 1, 65535], dtype=torch.int32).to(torch.uint16),
    "uint32": torch.tensor([0, 2**32 - 1]).to(torch.uint32),
    "uint64": torch.tensor([0, -1]).view(torch.uint64),
    "complex64": torch.polar(torch.ones(4), torch.arange(4.0)).conj(),
}


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_dtypes_of_quantised_weights_and_of_rotary_buffers_arrive_bit_for_bit(
    shard_stores, part, dtype
):
    writer = PartWriter(shard_stores[0], part, dtype=dtype)
    for name, tensor in RARE.items():
        writer.add(name, tensor)
    event = announcement(part, writer.seal())
    module = torch.nn.Module()
    for name, tensor in RARE.items():
        converted = dtype is not None and "nuz" in name
        module.register_buffer(name, torch.zeros_like(tensor.bfloat16() if converted else tensor))
    load_version(shard_stores[-1], part.run_id, event, module)
    for name, tensor in RARE.items():
        arrived = getattr(module, name)
        assert as_bytes(arrived) == as_bytes(tensor.to(arrived.dtype)), name
        assert arrived.dtype == (tensor.dtype if dtype is None or "nuz" not in name else dtype)


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.ones(2, dtype=torch.complex128), "its dtype is torch.complex128"),
        (torch.empty(2, device="meta"), "it is on the meta device"),
        (torch.eye(2).to_sparse(), "its layout is torch.sparse_coo"),
    ],
)
def test_a_tensor_that_cannot_be_published_is_refused_by_its_name(
    shard_stores, part, tensor, reason
):
    writer = PartWriter(shard_stores[0], part)
    with pytest.raises(UnpublishableTensor) as caught:
        writer.add("layer.weight", tensor)
    assert (caught.value.name, caught.value.reason) == ("layer.weight", reason)


def test_a_dtype_that_holds_no_weights_is_refused(shard_stores, part):
    with raises(UnpublishableDtype, fault="chosen", dtype="torch.int8"):
        PartWriter(shard_stores[0], part, dtype=torch.int8)
