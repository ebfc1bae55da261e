"""Shards of which only what changed travels: taken whole and in part, of ranks that differ."""

import logging
import threading

import pytest
import torch

from tests.support.errors import raises
from tests.support.pipeline import reducer_task
from tests.support.published_parts import announcement
from tests.support.shards import verified
from tests.support.tensors import identical
from tests.support.transport_processes import Where
from tests.support.waits import PATIENCE
from tests.support.weight_versions import ready
from trinity_events.errors import VersionNotStored
from trinity_events.system.shared_memory import available
from trinity_events.weights import (
    PartRef,
    PartWriter,
    check_fit,
    install,
    pull_version,
)
from trinity_events.weights.applying.deltas import InstalledBases
from trinity_events.weights.deltas.tracker import LastPublished
from trinity_events.weights.errors import ModelDiffers
from trinity_events.weights.slices import ShardOffset, TensorSlice
from trinity_schemas import VersionPartPublished, decode_envelope
from trinity_workers.engines.base import LocalShard
from trinity_workers.helpers import PublishSnapshot
from trinity_workers.helpers.publishing import ModelWeights

CHUNK = 1024
logger = logging.getLogger(__name__)
SHARED = pytest.mark.skipif(not available(), reason="the host has no shared memory as files")


class Rank:
    """One of two that publish a model's tensors: rows, columns, and one tensor alone."""

    def __init__(self, store, part, cut=24):
        self.store, self.part, self.cut = store, part, cut
        self.last = LastPublished(100)
        self.lasting = True

    def shards(self, tensors):
        cuts = {"rows": (0, self.cut), "columns": (1, 7), "odd": (0, 40)}
        for name, tensor in tensors.items():
            if name not in cuts:
                if self.part.rank == 1:
                    yield name, tensor, None
                continue
            dim, cut = cuts[name]
            begin, size = (0, cut) if self.part.rank == 0 else (cut, tensor.shape[dim] - cut)
            begins = tuple(begin if axis == dim else 0 for axis in range(tensor.dim()))
            yield name, tensor.narrow(dim, begin, size), ShardOffset(begins, tuple(tensor.shape))

    def publish(self, tensors, step):
        part = self.part._replace(step=step)
        self.last.begin(part, lambda _: self.lasting)
        writer = PartWriter(self.store, part, CHUNK, last=self.last)
        for shard in self.shards(tensors):
            writer.add(*shard)
        self.report = writer.seal()
        return self.report


@pytest.fixture(params=["redis", pytest.param("shm", marks=SHARED)])
def where(request, weights_url):
    return Where(request.param, weights_url)


@pytest.fixture
def stores(where):
    """Those of two publishing ranks, and a reader's."""
    made = [where.store() for _ in range(3)]
    yield made
    for store in made:
        store.close()


@pytest.fixture
def ranks(stores, run_id):
    return [Rank(stores[rank], PartRef(run_id, 1, 0, rank)) for rank in range(2)]


@pytest.fixture
def checked(monkeypatch):
    """Sizes of what a pull verified."""
    return verified(monkeypatch)


def start():
    """Tensors of several dtypes, one with elements that are not equal to themselves."""
    odd = torch.full((101,), float("nan"))
    return {
        "rows": torch.randn(64, 96).bfloat16(),
        "columns": torch.randn(50, 30),
        "odd": odd,
        "alone": torch.randint(-9, 9, (3000,), dtype=torch.int8),
        "still": torch.rand(700),
    }


def changed(tensors, seed):
    """The same with a few elements of all but one tensor turned."""
    generator = torch.Generator().manual_seed(seed)
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    for name, tensor in copies.items():
        if name == "still":
            continue
        raw = tensor.view(-1).view(torch.uint8)
        raw[torch.rand(raw.numel(), generator=generator) < 0.01] ^= 0x21
    return copies


def model_of(tensors):
    return torch.nn.ParameterDict(
        {
            name: torch.nn.Parameter(torch.zeros_like(tensor), requires_grad=False)
            for name, tensor in tensors.items()
        }
    )


def published(ranks, tensors, step):
    reports = [rank.publish(tensors, step) for rank in ranks]
    return announcement(ranks[0].part._replace(step=step), *reports)


def apply(stores, run_id, model, event, installed, selection=None):
    """As an explorer does; returns the bytes that were read."""
    have = installed.fulls(model)
    with pull_version(stores[-1], run_id, event, selection, have) as version:
        install(check_fit(model, version))
        installed.record(model, event, version)
        return version.bytes


def assert_has(model, tensors):
    for name, tensor in tensors.items():
        assert identical(model[name].detach(), tensor), name


def test_two_ranks_shards_as_deltas_are_bit_for_bit_what_whole_versions_would_be(
    ranks, stores, run_id
):
    tensors = start()
    steady, have, read = model_of(tensors), InstalledBases(), []
    for step in range(5):
        event = published(ranks, tensors, step)
        read.append(apply(stores, run_id, steady, event, have))
        assert_has(steady, tensors)
        late = model_of(tensors)
        apply(stores, run_id, late, event, InstalledBases())
        assert_has(late, tensors)
        with pull_version(stores[-1], run_id, event) as version:
            assert_has(dict(version.tensors()), tensors)
        assert all((rank.report.delta is not None) == (step > 0) for rank in ranks)
        tensors = changed(tensors, step)
    assert all(size < read[0] / 2 for size in read[1:])


def test_of_deltas_a_part_is_wanted_across_ranks_and_no_more_than_it_needs_is_read(
    ranks, stores, run_id, checked
):
    tensors = start()
    published(ranks, tensors, 0)
    tensors = changed(tensors, 1)
    event = published(ranks, tensors, 1)
    selection = {
        "rows": TensorSlice((20, 30), (10, 40)),
        "columns": TensorSlice((5, 0), (9, 7)),
        "still": None,
    }
    expected = {
        "rows": tensors["rows"][20:30, 30:70],
        "columns": tensors["columns"][5:14, :7],
        "still": tensors["still"],
    }
    model = model_of({**expected, "alone": torch.zeros(3)})
    apply(stores, run_id, model, event, InstalledBases(), selection)
    assert_has(model, expected)
    assert (model["alone"] == 0).all(), "what was not asked for is left alone"
    whole = sum(tensor.nbytes for tensor in tensors.values())
    assert 0 < sum(checked) < whole
    with pull_version(stores[-1], run_id, event, selection) as version:
        pulled = dict(version.tensors())
    assert pulled.keys() == expected.keys()
    assert_has(pulled, expected)
    checked.clear()
    apply(stores, run_id, model, event, InstalledBases(), {"still": None})
    assert sum(checked) < tensors["still"].nbytes + 3 * CHUNK


def test_ranks_that_cut_a_tensor_elsewhere_send_it_whole(ranks, stores, run_id):
    tensors = start()
    model, have = model_of(tensors), InstalledBases()
    apply(stores, run_id, model, published(ranks, tensors, 0), have)
    for rank in ranks:
        rank.cut = 30
    for step in (1, 2):
        tensors = changed(tensors, step)
        event = published(ranks, tensors, step)
        apply(stores, run_id, model, event, have)
        assert_has(model, tensors)
        if step == 1:
            reports = [rank.report.delta for rank in ranks]
            assert [report.dense for report in reports] == [1, 1], "the rest was cut as before"
    assert [rank.report.delta for rank in ranks] == [None, None]


def test_a_version_may_be_a_delta_of_one_rank_and_full_of_another(ranks, stores, run_id):
    tensors = start()
    model, have = model_of(tensors), InstalledBases()
    apply(stores, run_id, model, published(ranks, tensors, 0), have)
    ranks[1].lasting = False
    for step in (1, 2):
        tensors = changed(tensors, step)
        event = published(ranks, tensors, step)
        apply(stores, run_id, model, event, have)
        assert_has(model, tensors)
        assert [rank.report.delta is None for rank in ranks] == [False, step == 1]
        ranks[1].lasting = True
    assert [rank.report.delta.base.step for rank in ranks] == [0, 1]
    stores[1].delete(ranks[1].part._replace(step=1))
    part = ranks[1].part
    missing, delta = part._replace(step=1), part._replace(step=2)
    with raises(VersionNotStored, version=str(missing), needed_by=str(delta)):
        apply(stores, run_id, model_of(tensors), event, InstalledBases())


def test_a_shard_that_the_model_has_not_is_found_before_anything_changes(ranks, stores, run_id):
    tensors = start()
    model, have = model_of(tensors), InstalledBases()
    apply(stores, run_id, model, published(ranks, tensors, 0), have)
    later = changed(tensors, 1)
    same = (later["columns"] == tensors["columns"]).nonzero()[-1]
    model["columns"][tuple(same)] += 1  # where no delta would overwrite it
    before = {name: parameter.detach().clone() for name, parameter in model.items()}
    tensors = later
    event = published(ranks, tensors, 1)
    with raises(ModelDiffers, fault="delta", tensor="columns"):
        apply(stores, run_id, model, event, have)
    assert_has(model, before)
    apply(stores, run_id, model, event, InstalledBases())
    assert_has(model, tensors)


@SHARED
def test_a_delta_that_is_read_along_is_what_was_published(run_id, checked):
    stores = [Where("shm", "").store() for _ in range(3)]
    ranks = [Rank(stores[rank], PartRef(run_id, 1, 0, rank)) for rank in range(2)]
    tensors = start()
    model, have = model_of(tensors), InstalledBases()
    apply(stores, run_id, model, published(ranks, tensors, 0), have)
    parts = [rank.part._replace(step=1) for rank in ranks]
    stop, ended = threading.Event(), []
    thread = threading.Thread(target=lambda: ended.append(stores[-1].prefetch(parts, stop, 30)))
    thread.start()
    try:
        tensors = changed(tensors, 1)
        event = published(ranks, tensors, 1)
        thread.join(PATIENCE)
        apply(stores, run_id, model, event, have)
        assert ended == ["sealed"]
        assert_has(model, tensors)
    finally:
        stop.set()
        thread.join(PATIENCE)
        for store in stores:
            store.close()


# --- through the log --------------------------------------------------------------------------


async def test_snapshots_of_shards_travel_as_deltas_and_are_taken_whole_or_in_part(
    make_synchronizer, log, redis_url, run_id
):
    trainer, explorer = make_synchronizer(), make_synchronizer("explorer", 1)
    # The helpers publish no weights that are not finite; a negative zero has bits of its own too.
    snapshots, tensors = PublishSnapshot(20), start() | {"odd": torch.full((101,), -0.0)}
    model, sliced = model_of(tensors), model_of({"rows": torch.zeros(10, 96).bfloat16()})
    async with reducer_task(redis_url, run_id):
        for step in range(4):
            shards = [
                LocalShard(name, tensor, tuple(tensor.shape), (0,) * tensor.dim())
                for name, tensor in tensors.items()
            ]
            weights = ModelWeights(full=tensors.items, shards=lambda shards=shards: shards)
            snapshots.publish(weights, trainer, step, logger)
            trainer.commit(step)
            snapshots.wait()
            event = await ready(log, step)
            explorer.apply(model, event)
            assert_has(model, tensors)
            if step == 2:
                explorer.apply(sliced, event, {"rows": TensorSlice((3, 0), (10, 96))})
                assert_has(sliced, {"rows": tensors["rows"][3:13]})
            tensors = changed(tensors, step)
        snapshots.close()
        trainer.flush()
    events = [decode_envelope(entry.payload).event for entry in await log.read()]
    parts = [event for event in events if isinstance(event, VersionPartPublished)]
    assert [published.delta is None for published in parts] == [True, False, False, False]
