"""Loading straight into a model that nobody serves from, with no room for the version."""

import threading

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.support.errors import raises
from tests.support.published_parts import announcement
from tests.support.shards import module_of, publish, rows, verified
from tests.support.slices import boxes_in
from tests.support.tensors import identical
from trinity_events.errors import VersionNotStored
from trinity_events.weights import (
    PartWriter,
    RedisChunkStore,
    adopt,
    check_fit,
    install,
    load_version,
    pull_version,
)
from trinity_events.weights.applying.copy_target import CopyTarget
from trinity_events.weights.applying.load import BaseRequired
from trinity_events.weights.deltas.tracker import LastPublished
from trinity_events.weights.errors import (
    AbsentTensor,
    UnassembledTensor,
    UnfillableTensor,
    UnfitTensor,
)
from trinity_events.weights.slices import TensorSlice, contiguous_runs, full_slice, intersection


@pytest.fixture
def load(shard_stores, part):
    def load(event, module, selection=None):
        loaded = load_version(shard_stores[-1], part.run_id, event, module, selection)
        if isinstance(shard_stores[-1], RedisChunkStore):
            assert shard_stores[-1]._memory._spare == [], "there was no room for the version"
        return loaded.manifests

    return load


@st.composite
def three_boxes(draw):
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=3)))
    return shape, draw(boxes_in(shape)), draw(boxes_in(shape))


@given(three_boxes(), st.sampled_from([1, 2, 4]))
def test_runs_bring_what_two_boxes_have_in_common_from_one_to_the_other(drawn, itemsize):
    shape, source_box, outer = drawn
    inner = intersection(source_box, outer)
    if inner is None:
        return
    whole_one = torch.arange(full_slice(shape).volume).reshape(shape)
    source = whole_one[source_box.inside(full_slice(shape))].contiguous().flatten()
    target = torch.full(outer.shape, -1)
    flat, last = target.view(-1), -1
    for begin, at, nbytes in contiguous_runs(source_box, outer, inner, itemsize):
        assert begin > last and not (begin % itemsize or at % itemsize or nbytes % itemsize)
        start, other, count = begin // itemsize, at // itemsize, nbytes // itemsize
        flat[other : other + count] = source[start : start + count]
        last = begin
    expected = torch.full(outer.shape, -1)
    expected[inner.inside(outer)] = whole_one[inner.inside(full_slice(shape))]
    assert identical(target, expected)


def test_shards_whole_tensors_and_odd_leaves_are_loaded_where_they_belong(shard_stores, part, load):
    weight, odd = torch.rand(50, 30), torch.randint(0, 256, (7,), dtype=torch.uint8)
    low, high = rows(weight, 31)
    columns = weight[:, :10].contiguous(), (0, 0), (50, 30)
    right = weight[:, 10:].contiguous(), (0, 10), (50, 30)
    event = publish(
        shard_stores,
        part,
        [("odd", odd), ("rows", *low), ("columns", *columns), ("none", torch.empty(0, 3))],
        [("rows", *high), ("alone", torch.tensor(2.5)), ("columns", *right)],
    )
    module = module_of(rows=(50, 30), columns=(50, 30), alone=(), none=(0, 3))
    module["odd"] = torch.nn.Parameter(torch.zeros(7, dtype=torch.uint8), requires_grad=False)
    # One whose elements lie otherwise is filled by way of memory beside it.
    module["columns"].data = torch.zeros(30, 50).t()
    squared = (module["rows"] ** 2).sum()
    loaded = load(event, module)
    assert [report.nbytes for report in loaded] == [published.bytes for published in event.parts]
    assert identical(module["rows"], weight) and identical(module["columns"], weight)
    assert identical(module["odd"], odd) and module["alone"] == 2.5
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squared.backward()


def test_a_slice_reads_the_chunks_that_it_needs_and_no_others(
    shard_stores, part, load, monkeypatch
):
    weight = torch.rand(64, 32)
    event = publish(shard_stores, part, *[[("weight", *shard)] for shard in rows(weight, 24)])
    module, sizes = module_of(weight=(10, 8)), verified(monkeypatch)
    load(event, module, {"weight": TensorSlice((20, 16), (10, 8))})
    assert identical(module["weight"], weight[20:30, 16:24])
    assert sum(sizes) == 10 * 64, "a row has two chunks, of which the slice needs one, half of it"


def test_large_tensors_come_in_pieces_of_many_chunks(shard_stores, part, load):
    tensors = [("large", torch.rand(1 << 20)), ("small", torch.rand(7)), ("odd", torch.rand(999))]
    event = publish(shard_stores, part, tensors, chunk_bytes=None)
    module = module_of(large=1 << 20, small=7, odd=999)
    load(event, module)
    for name, tensor in tensors:
        assert identical(module[name], tensor)


def test_what_does_not_fit_or_is_not_there_is_refused_before_anything_changes(
    shard_stores, part, load
):
    event = publish(shard_stores, part, [("a", torch.ones(4)), ("b", torch.ones(2))])
    outside = {"a": TensorSlice((2,), (4,))}
    for module, selection, error, fault, tensor in (
        (module_of(a=4, b=3), None, UnfitTensor, "form", "b"),
        (module_of(a=4), None, AbsentTensor, "model", "b"),
        (module_of(a=4, b=2, c=1), None, AbsentTensor, "version", "c"),
        (module_of(a=4), {"c": None}, AbsentTensor, "selection", "c"),
        (module_of(a=4), outside, UnassembledTensor, "selection", "a"),
    ):
        with raises(error, fault=fault, tensor=tensor):
            load(event, module, selection)
        assert (module["a"] == 0).all()
    for store in shard_stores:
        store.delete(part)
    with raises(VersionNotStored, version=str(part)):
        load(event, module_of(a=4, b=2))


def test_a_delta_is_not_loaded_and_nothing_changes(shard_stores, part):
    if shard_stores[0].name == "cuda-ipc":
        pytest.skip("what changed is found on the host")
    tensor, last = torch.rand(1000), LastPublished(8)
    for step in (1, 2):
        here = part._replace(step=step)
        last.begin(here, lambda _: True)
        writer = PartWriter(shard_stores[0], here, last=last)
        writer.add("a", tensor)
        event = announcement(here, writer.seal())
        tensor[0] += 1
    module = module_of(a=1000)
    with raises(BaseRequired, fault="delta"):
        load_version(shard_stores[-1], part.run_id, event, module)
    assert (module["a"] == 0).all()


def test_a_tensor_that_only_begins_where_another_does_is_not_tied_to_it(shard_stores, part, load):
    event = publish(shard_stores, part, [("head", torch.ones(2))])
    module = module_of(all=4)
    module["head"] = torch.nn.Parameter(module["all"].data[:2])
    with raises(AbsentTensor, tensor="all", fault="version"):
        load(event, module)
    module["all"].data = module["head"].data[None]
    load(event, module)
    assert (module["all"] == 1).all()


@pytest.mark.parametrize(
    ("brought", "needed", "tied"),
    [
        (lambda all_of_it: all_of_it[:, :4], lambda all_of_it: all_of_it[:4], False),
        (lambda all_of_it: all_of_it[:, :4], lambda all_of_it: all_of_it[:, :4], True),
        (lambda all_of_it: all_of_it, lambda all_of_it: all_of_it[2:, 3:], True),
        (lambda all_of_it: all_of_it.t(), lambda all_of_it: all_of_it, True),
        (lambda all_of_it: all_of_it[2:4], lambda all_of_it: all_of_it[3:5], False),
    ],
    ids=["rows and columns", "the same columns", "within", "transposed", "half"],
)
def test_tied_is_what_has_all_of_its_elements_in_what_is_brought(
    shard_stores, part, load, brought, needed, tied
):
    memory = torch.zeros(8, 8)
    module = torch.nn.ParameterDict({"a": brought(memory), "b": needed(memory)})
    event = publish(shard_stores, part, [("a", torch.ones(module["a"].shape))])
    if tied:
        load(event, module)
        assert (module["b"] == 1).all()
        return
    with raises(AbsentTensor, tensor="b", fault="version"):
        load(event, module)
    assert not memory.any()


@pytest.mark.parametrize("brought", [("a", "b"), ("a",)])
def test_a_model_without_memory_is_refused_and_not_taken_for_filled(
    shard_stores, part, load, brought
):
    event = publish(shard_stores, part, [(name, torch.ones(2)) for name in brought])
    module = module_of(a=2, b=2)
    module["b"] = torch.nn.Parameter(module["b"].to("meta"))
    with raises(UnfillableTensor, fault="meta", tensor="b"):
        load(event, module)
    with pull_version(shard_stores[-1], part.run_id, event) as version:
        for fill in (check_fit, adopt):
            with raises(UnfillableTensor, fault="meta", tensor="b"):
                fill(module, version)
    assert (module["a"] == 0).all()


def freed(tensor):
    tensor.untyped_storage().resize_(0)
    return tensor


def spread(tensor):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return distribute_tensor(tensor, init_device_mesh("cpu", (1,)), [Shard(0)])
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("made", "fault"),
    [(freed, "freed"), (spread, "spread")],
)
def test_what_cannot_be_filled_is_refused_before_anything_changes(
    shard_stores, part, load, made, fault
):
    event = publish(shard_stores, part, [("a", torch.ones(2)), ("b", torch.ones(2))])
    module = module_of(a=2)
    module["b"] = torch.nn.Parameter(made(torch.zeros(2)))
    with raises(UnfillableTensor, fault=fault, tensor="b"):
        load(event, module)
    with pull_version(shard_stores[-1], part.run_id, event) as version:
        for fill in (check_fit, adopt):
            with raises(UnfillableTensor, fault=fault, tensor="b"):
                fill(module, version)
    assert (module["a"] == 0).all()


def test_a_model_does_not_serve_what_wraps_another_tensor_from_a_version(shard_stores, part):
    event = publish(shard_stores, part, [("a", torch.ones(2)), ("b", torch.ones(2))])
    module = module_of(a=2)
    module["b"] = torch.nn.Parameter(AsyncCollectiveTensor(torch.zeros(2)))
    refused = raises(UnfillableTensor, fault="wrapper", tensor="b")
    with pull_version(shard_stores[-1], part.run_id, event) as version, refused:
        adopt(module, version)
    assert (module["a"] == 0).all()


@pytest.mark.parametrize("name", ["plain", "other"])
def test_tensors_made_in_inference_mode_are_written_to_from_outside(shard_stores, part, name):
    event = publish(shard_stores, part, [(name, torch.ones(3, 2))])
    with torch.inference_mode():
        module = torch.nn.ParameterDict(
            {"plain": torch.zeros(3, 2), "other": torch.zeros(2, 3).t()}
        )
        del module["other" if name == "plain" else "plain"]
    with pull_version(shard_stores[-1], part.run_id, event) as version:
        install(check_fit(module, version))
    assert (module[name] == 1).all()
    module[name].data.zero_()
    load_version(shard_stores[-1], part.run_id, event, module)
    assert (module[name] == 1).all()


def brought_by_a_thread(landing, data):
    half = data.numel() // 2
    flat = data.reshape(-1).view(torch.uint8)
    for at in (0, half * data.itemsize):
        nbytes = min(half * data.itemsize, len(flat) - at)
        helper = threading.Thread(target=landing.write, args=(at, flat.data_ptr() + at, nbytes))
        helper.start()
        helper.join()


def test_threads_fill_what_was_made_for_inference():
    data = torch.rand(4, 6)
    with torch.inference_mode():
        target = torch.zeros(6, 4).t()
        assert target.is_inference()
        assert not target.is_contiguous()
        brought_by_a_thread(CopyTarget(target), data)
        assert identical(target, data)


class Elsewhere(torch.Tensor):
    """Its elements are not where its address says."""

    came: list[torch.Tensor]

    def copy_(self, source):
        self.came.append(source.clone())


def test_bytes_of_a_device_reach_a_subclass_by_its_own_copy():
    Elsewhere.came = []
    data, target = torch.rand(6), torch.zeros(6).as_subclass(Elsewhere)
    landing = CopyTarget(target)
    for at in (0, 12):
        landing.copy(at, data.view(torch.uint8)[at : at + 12])
    [came] = Elsewhere.came
    assert identical(came, data)
    assert (target.as_subclass(torch.Tensor) == 0).all()


def test_what_lies_beside_a_tensor_is_on_the_host_whatever_is_the_default():
    data, target = torch.rand(4, 6), torch.zeros(6, 4).t()
    with torch.device("meta"):
        brought_by_a_thread(CopyTarget(target), data)
        landing = CopyTarget(target)
        assert len(landing.memory_at(0, 96)) == 96
        landing.write(0, data.data_ptr(), 96)
    assert identical(target, data)
