"""Versions of which only what changed travels: what is installed is what a full one brings."""

import time
from unittest import mock

import msgspec
import pytest
import torch

from tests.support.errors import raises
from tests.support.pipeline import reducer_task, reports_accepted
from tests.support.published_parts import announcement
from tests.support.stored_parts import find_stored
from tests.support.tensors import identical
from tests.support.transport_processes import SOME, Where, actor, kill
from tests.support.weight_versions import awkward, publish, ready
from trinity_events.analysis.summary import Summarizer
from trinity_events.errors import VersionNotStored
from trinity_events.log import Stream
from trinity_events.weights import (
    PartRef,
    PartWriter,
    check_fit,
    install,
    load_version,
    pull_version,
)
from trinity_events.weights.applying.deltas import InstalledBases
from trinity_events.weights.deltas import tracker
from trinity_events.weights.deltas.tracker import LastPublished
from trinity_events.weights.errors import AbsentTensor, CorruptTensor, ModelDiffers, UnfitTensor
from trinity_schemas import ALIGNMENT, VersionPartPublished, WeightsApplied, decode_envelope

CHUNK = 4096


class Holder(torch.nn.Module):
    """A model of any tensors, of zeros."""

    def __init__(self, tensors):
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name.replace(".", "_"), torch.zeros_like(tensor))

    def apply(self, store, run_id, ready, installed):
        """As an explorer does; returns the bytes that were read."""
        with pull_version(store, run_id, ready, have=installed.fulls(self)) as version:
            install(check_fit(self, version))
            installed.record(self, ready, version)
            return version.bytes


class Trainer:
    """Publishes versions of some tensors on a store."""

    def __init__(self, store, part, full_every=100):
        self.store, self.part = store, part
        self.last = LastPublished(full_every)
        self.lasting = True

    def publish(self, tensors, step):
        part = self.part._replace(step=step)
        self.last.begin(part, lambda _: self.lasting)
        writer = PartWriter(self.store, part, CHUNK, last=self.last)
        for name, tensor in tensors.items():
            writer.add(name.replace(".", "_"), tensor)
        self.report = writer.seal()
        return announcement(part, self.report)


@pytest.fixture(params=["redis", "shm"])
def where(request, weights_url):
    return Where(request.param, weights_url)


@pytest.fixture
def ours(where):
    made = where.store()
    yield made
    made.close()


@pytest.fixture
def theirs(where):
    made = where.store()
    yield made
    made.close()


@pytest.fixture
def trainer(ours, run_id):
    return Trainer(ours, PartRef(run_id, 1, 1, 0))


def some_changed(tensors, seed, share=0.05):
    """The tensors with a few of their bits turned, at places of their own each time."""
    generator = torch.Generator().manual_seed(seed)
    changed = {}
    for name, tensor in tensors.items():
        flat = tensor.clone().contiguous().reshape(-1)
        if flat.numel() and flat.dtype is not torch.bool:
            raw = flat.view(torch.uint8)
            where = torch.rand(raw.numel(), generator=generator) < share
            raw[where] ^= 0x41
        changed[name] = flat.reshape(tensor.shape)
    return changed


def large() -> dict[str, torch.Tensor]:
    """Of every kind, and large enough that what changed is less than the whole."""
    tensors = awkward()
    for name, tensor in list(tensors.items()):
        if name.startswith("dtype.") and tensor.dtype is not torch.bool:
            tensors[name] = tensor.repeat(40, 5)
    tensors["not a number"] = torch.full((3000,), float("nan"))
    tensors["minus zero"] = torch.full((3000,), -0.0)
    tensors["never changed"] = torch.rand(500)
    return tensors


def assert_has(module, tensors):
    for name, tensor in tensors.items():
        buffer = module.get_buffer(name.replace(".", "_"))
        assert buffer.dtype == tensor.dtype
        assert identical(buffer, tensor), name


def test_a_chain_of_deltas_is_bit_for_bit_what_full_versions_would_be(trainer, theirs, run_id):
    tensors = large()
    steady, jumps = Holder(tensors), Holder(tensors)
    have, jumped = InstalledBases(), InstalledBases()
    read, whole = [], []
    for step in range(8):
        event = trainer.publish(tensors, step)
        read.append(steady.apply(theirs, run_id, event, have))
        whole.append(sum(tensor.nbytes for tensor in tensors.values()))
        assert_has(steady, tensors)
        late = Holder(tensors)
        late.apply(theirs, run_id, event, InstalledBases())
        assert_has(late, tensors)
        if step in (1, 4, 7):
            jumps.apply(theirs, run_id, event, jumped)
            assert_has(jumps, tensors)
        with pull_version(theirs, run_id, event) as version:
            for name, tensor in version.tensors():
                assert identical(tensor, steady.get_buffer(name)), name
        tensors = some_changed(tensors, step, 0.01)
        tensors["never changed"] = steady.get_buffer("never changed").clone()
        tensors["minus zero"][step] = 0.0
        tensors["minus zero"][max(0, step - 1)] = -0.0  # as it was: it travels all the same
    assert whole[0] <= read[0] < whole[0] + len(tensors) * ALIGNMENT
    assert all(0 < size < whole[0] / 2 for size in read[1:])
    delta = trainer.report.delta
    assert delta.skip >= 1
    assert delta.dense >= 1
    assert delta.delta >= 5


def test_what_changed_and_changed_back_is_right_for_whoever_saw_it_change(trainer, theirs, run_id):
    first = {"a": torch.arange(1000.0)}
    model, have = Holder(first), InstalledBases()
    model.apply(theirs, run_id, trainer.publish(first, 0), have)
    second = {"a": first["a"].clone()}
    second["a"][7] = -1
    model.apply(theirs, run_id, trainer.publish(second, 1), have)
    model.apply(theirs, run_id, trainer.publish(first, 2), have)
    assert_has(model, first)
    assert trainer.report.delta.changed == 1


def test_a_tensor_is_dense_delta_or_skipped_by_what_of_it_changed(trainer):
    tensors = {name: torch.zeros(10_000, dtype=torch.bfloat16) for name in ("most", "few", "none")}
    trainer.publish(tensors, 0)
    tensors["most"] += 1
    tensors["few"][:30] += 1
    manifest = msgspec.msgpack.decode(trainer.publish(tensors, 1) and manifest_of(trainer, 1))
    encodings = {entry["name"]: entry.get("encoding", "dense") for entry in manifest["tensors"]}
    assert encodings == {"most": "dense", "few": "delta", "none": "skip"}
    delta = trainer.report.delta
    assert (delta.dense, delta.delta, delta.skip) == (1, 1, 1)
    assert (delta.changed, delta.elements, delta.whole) == (30, 20_000, 60_000)
    assert trainer.report.bytes < 20_200


def manifest_of(trainer, step):
    source = trainer.store.open(trainer.part._replace(step=step))
    try:
        return source.manifest
    finally:
        source.close()


def test_a_version_of_which_all_changed_is_a_full_one(trainer, theirs, run_id):
    for step in range(3):
        event = trainer.publish({"a": torch.full((1000,), float(step))}, step)
        assert trainer.report.delta is None
        assert trainer.report.bytes == 4000
        with pull_version(theirs, run_id, event) as version:
            assert version.bases == (None,)
    small = {"a": torch.full((1000,), 2.0)}
    small["a"][3] = 0
    trainer.publish(small, 4)
    assert trainer.report.delta.base.step == 2, "which is what others rest on from then on"


def fulls(trainer, tensors, steps, *, change=True):
    """Which of the versions were full."""
    full_steps = []
    for step in steps:
        if change:
            tensors["a"][step] += 1
        trainer.publish(tensors, step)
        if trainer.report.delta is None:
            full_steps.append(step)
    return full_steps


def test_every_so_many_versions_one_is_full(ours, run_id):
    trainer = Trainer(ours, PartRef(run_id, 1, 1, 0), full_every=3)
    assert fulls(trainer, {"a": torch.zeros(1000)}, range(7)) == [0, 3, 6]


def test_a_full_one_comes_when_the_deltas_took_as_many_bytes_as_it_does(trainer):
    tensors = {"a": torch.zeros(1000, dtype=torch.bfloat16)}
    is_full = []
    for step in range(8):
        tensors["a"][step * 100 : step * 100 + 90] += 1
        trainer.publish(tensors, step)
        is_full.append(trainer.report.delta is None)
    assert is_full == [True, False, False, False, False, True, False, False]


def test_a_full_one_follows_a_failure_a_new_epoch_a_change_of_shape_and_a_lost_base(trainer):
    tensors = {"a": torch.zeros(1000), "b": torch.zeros(1000)}
    assert fulls(trainer, tensors, range(2)) == [0]
    trainer.last.begin(trainer.part._replace(step=2), lambda _: True)
    PartWriter(trainer.store, trainer.part._replace(step=2), CHUNK, last=trainer.last).add(
        "a", tensors["a"]
    )
    assert fulls(trainer, tensors, range(3, 5)) == [3], "one was never sealed"
    trainer.last.begin(trainer.part._replace(step=5), lambda _: True)
    PartWriter(trainer.store, trainer.part._replace(step=5), CHUNK, last=trainer.last).discard()
    assert fulls(trainer, tensors, range(6, 8)) == [6], "one was given up"
    trainer.part = trainer.part._replace(epoch=2)
    assert fulls(trainer, tensors, range(8, 10)) == [8]
    tensors["b"] = torch.zeros(999)
    assert fulls(trainer, tensors, range(10, 13)) == [11], "b was dense in 10, and new"
    del tensors["b"]
    assert fulls(trainer, tensors, range(13, 16)) == [14]
    trainer.lasting = False
    assert fulls(trainer, tensors, range(16, 18)) == [16, 17]


def test_no_version_rests_on_itself_or_on_a_later_one(trainer):
    tensors = {"a": torch.zeros(1000)}
    assert fulls(trainer, tensors, (5, 5, 4, 6)) == [5, 5, 4]


def test_a_model_that_has_not_what_it_should_is_not_touched(trainer, theirs, run_id):
    tensors = large()
    model, have = Holder(tensors), InstalledBases()
    model.apply(theirs, run_id, trainer.publish(tensors, 0), have)
    with torch.no_grad():
        model.get_buffer("never changed").add_(1)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    changed = some_changed(tensors, 1)
    changed["never changed"] = tensors["never changed"]
    event = trainer.publish(changed, 1)
    with raises(ModelDiffers, fault="delta", tensor="never changed"):
        model.apply(theirs, run_id, event, have)
    assert_has(model, before)
    model.apply(theirs, run_id, event, InstalledBases())
    assert_has(model, changed)


def test_a_delta_that_makes_something_else_is_refused_and_the_model_stays(trainer, theirs, run_id):
    tensors = {"a": torch.zeros(1000), "b": torch.zeros(1000)}
    model, have = Holder(tensors), InstalledBases()
    model.apply(theirs, run_id, trainer.publish(tensors, 0), have)
    new = {name: tensor.clone() for name, tensor in tensors.items()}
    new["a"][1] = new["b"][2] = 1
    lie = "xxh3:" + "0" * 32
    digest = mock.Mock(side_effect=["xxh3:" + "1" * 32, lie])
    with mock.patch.object(tracker, "digest", digest):
        event = trainer.publish(new, 1)
    for error, installed in ((ModelDiffers, have), (CorruptTensor, InstalledBases())):
        with raises(error, fault="delta", tensor="a"):
            model.apply(theirs, run_id, event, installed)
    refused = raises(CorruptTensor, fault="delta", tensor="a")
    with pull_version(theirs, run_id, event) as version, refused:
        dict(version.tensors())
    assert_has(model, tensors)


def test_a_model_of_other_shapes_is_refused_before_anything(trainer, theirs, run_id):
    event = trainer.publish({"a": torch.zeros(10)}, 0)
    with raises(UnfitTensor, fault="form", tensor="a", in_model="torch.float32 [9]"):
        Holder({"a": torch.zeros(9)}).apply(theirs, run_id, event, InstalledBases())


def test_what_a_delta_rests_on_must_be_there_and_full(trainer, ours, theirs, run_id):
    tensors = {"a": torch.zeros(1000)}
    trainer.publish(tensors, 0)
    tensors["a"][0] = 1
    event = trainer.publish(tensors, 1)
    ours.delete(trainer.part._replace(step=0))
    model = Holder(tensors)
    missing = trainer.part._replace(step=0)
    with raises(VersionNotStored, version=str(missing), needed_by=str(trainer.part)):
        model.apply(theirs, run_id, event, InstalledBases())
    assert_has(model, {"a": torch.zeros(1000)})


def test_a_model_whose_memory_is_not_in_order_is_patched_too(trainer, theirs, run_id):
    tensors = {"a": torch.arange(1000.0).reshape(20, 50)}
    model, have = Holder(tensors), InstalledBases()
    model.a = torch.zeros(50, 20).t()
    for step in range(2):
        tensors["a"][3, step] = -1
        model.apply(theirs, run_id, trainer.publish(tensors, step), have)
    assert trainer.report.delta is not None
    assert identical(model.a, tensors["a"])


def test_a_tensor_out_of_order_that_was_made_for_inference_is_patched_too(trainer, theirs, run_id):
    tensors = {"a": torch.rand(200), "b": torch.rand(40, 50), "c": torch.rand(200)}
    model, have = Holder(tensors), InstalledBases()
    with torch.inference_mode():
        model.b = torch.zeros(50, 40).t()
    for step in range(2):
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        for tensor in tensors.values():
            tensor[0] = step
        model.apply(theirs, run_id, trainer.publish(tensors, step), have)
    assert trainer.report.delta is not None
    assert_has(model, tensors)


def test_one_element_of_any_stride_travels_as_a_delta_and_is_loaded(trainer, theirs, run_id):
    model = Holder({"a": torch.zeros(3)[::3], "b": torch.zeros(500)})
    for step in range(2):
        tensors = {"a": torch.full((2,), float(step))[::2], "b": torch.zeros(500)}
        event = trainer.publish(tensors, step)
        model.apply(theirs, run_id, event, InstalledBases())
        assert model.a.item() == step
    assert trainer.report.delta is not None
    target = torch.nn.ParameterDict({"a": torch.zeros(2)[::2], "b": torch.zeros(500)})
    full = trainer.publish({"a": torch.full((4,), 7.0)[::4], "c": torch.zeros(1)}, 2)
    with raises(AbsentTensor, fault="model", tensor="c"):
        load_version(theirs, run_id, full, target)
    load_version(theirs, run_id, full, target, selection={"a": None})
    assert target["a"].item() == 7


def publishes_a_delta_until(pipe, where, part):
    """Publish a full version and half of a delta, and stop for ever."""
    trainer = Trainer(where.store(), part._replace(step=0))
    tensors = dict(SOME)
    full = trainer.publish(tensors, 0)
    trainer.last.begin(part, lambda _: True)
    writer = PartWriter(trainer.store, part, 64, last=trainer.last)
    for name, tensor in SOME[:4]:
        writer.add(name, torch.cat((tensor[:-50] + 0, tensor[-50:] + 1)))
    pipe.send(msgspec.to_builtins(full))
    time.sleep(600)


@pytest.mark.processes
def test_a_publisher_that_is_killed_within_a_delta_leaves_nothing_of_it(where, run_id):
    part = PartRef(run_id, 1, 1, 0)
    with actor(publishes_a_delta_until, where, part) as (process, _):
        kill(process)
    reader = where.store()
    try:
        assert reader.open(part) is None
        if where.name == "shm":
            assert find_stored(where, run_id, process.pid) == []
        again = Trainer(reader, part)
        again.publish(dict(SOME), 2)
        assert again.report.delta is None, "whoever takes its place begins with a full version"
    finally:
        reader.close()


# --- through the log --------------------------------------------------------------------------


async def test_joiners_at_any_time_get_every_version_and_the_log_says_how_it_travelled(
    make_synchronizer, log, redis_url, run_id
):
    trainer, steady = make_synchronizer(), make_synchronizer("explorer", 1)
    tensors, model = {"a": torch.zeros(4000), "b": torch.rand(100)}, None
    async with reducer_task(redis_url, run_id):
        for step in range(10):
            tensors["a"][step * 3 : step * 3 + 20] += 1
            publish(trainer, tensors, step)
            event = await ready(log, step)
            model = model or Holder(tensors)
            steady.apply(model, event)
            assert_has(model, tensors)
            late, joined = make_synchronizer("explorer", 2), Holder(tensors)
            late.apply(joined, event)
            assert_has(joined, tensors)
            late.close()
        steady.flush()
        trainer.flush()
        await reports_accepted(log)
    published, applied, summary = [], [], Summarizer(run_id)
    for stream in Stream:
        for entry in await log.read(stream=stream):
            envelope = decode_envelope(entry.payload)
            summary.add(envelope, len(entry.payload))
            if isinstance(envelope.event, VersionPartPublished):
                published.append(envelope.event)
            elif isinstance(envelope.event, WeightsApplied) and envelope.producer.rank == 1:
                applied.append(envelope.event.bytes)
    assert [event.step for event in published if event.delta is None] == [0, 4, 8]
    assert applied == [event.bytes for event in published]
    totals = summary.summary()
    assert (totals.versions_published, totals.versions_delta) == (10, 7)
    assert totals.bytes_published == sum(applied)
    assert totals.bytes_saved == 10 * 16_400 - sum(applied)


async def test_an_explorer_whose_model_was_changed_takes_what_the_version_rests_on(
    make_synchronizer, log, redis_url, run_id
):
    trainer, explorer = make_synchronizer(), make_synchronizer("explorer", 1)
    tensors = {"a": torch.zeros(4000)}
    model = Holder(tensors)
    async with reducer_task(redis_url, run_id):
        for step in range(2):
            tensors["a"][step] = 1
            publish(trainer, tensors, step)
            explorer.apply(model, await ready(log, step))
            model.a[9] = 5
        tensors["a"][3] = 1
        publish(trainer, tensors, 2)
        explorer.apply(model, await ready(log, 2))
    assert_has(model, tensors)


async def test_a_trainer_begins_with_a_full_version_and_rests_on_none_that_is_not_ready(
    make_synchronizer, log, redis_url, run_id
):
    first, tensors = make_synchronizer(), {"a": torch.zeros(1000)}
    for step in range(2):  # nobody announces anything
        publish(first, tensors, step)
    async with reducer_task(redis_url, run_id):
        await ready(log, 1)
        publish(first, tensors, 2)
        await ready(log, 2)
        publish(make_synchronizer(), tensors, 3)
        await ready(log, 3)
    events = [decode_envelope(entry.payload).event for entry in await log.read()]
    parts = [event for event in events if isinstance(event, VersionPartPublished)]
    assert [published.delta is None for published in parts] == [True, True, False, True]
