"""Versions in shards: put together again whole, in part, or as a slice; else refused by name."""

from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.support.errors import raises
from tests.support.published_parts import announcement
from tests.support.shards import CHUNK, module_of, publish, rows, verified
from tests.support.tensors import identical
from trinity_events.weights import (
    PartWriter,
    PulledVersion,
    adopt,
    check_fit,
    install,
    pull_version,
)
from trinity_events.weights.applying import load
from trinity_events.weights.deltas.tracker import LastPublished
from trinity_events.weights.errors import (
    AbsentTensor,
    UnassembledTensor,
    UnfillableTensor,
    UnfitTensor,
)
from trinity_events.weights.slices import CoverageFault, TensorSlice
from trinity_events.weights.tensors import DTYPES
from trinity_workers.helpers.megatron import owners


@pytest.fixture
def checked(monkeypatch):
    """Sizes of what a pull verified."""
    return verified(monkeypatch)


def named(name, shards):
    return [[(name, *shard)] for shard in shards]


@contextmanager
def pulled(stores, part, event, selection=None):
    with pull_version(stores[-1], part.run_id, event, selection) as version:
        yield version


def test_a_shard_of_more_than_there_can_be_is_refused_before_room_is_made_for_it(
    shard_stores, part
):
    event = publish(shard_stores, part, [("w", torch.ones(2), (0,), (1 << 45,))])
    refused = raises(
        UnassembledTensor,
        tensor="w",
        coverage=CoverageFault(missing=(1 << 45) - 2, volume=1 << 45),
    )
    with pulled(shard_stores, part, event) as version, refused:
        dict(version.tensors())


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_shards_of_every_dtype_make_up_the_tensor_bit_for_bit(shard_stores, part, dtype):
    raw = (
        torch.randint(0, 2, (7, 24), dtype=torch.uint8)
        if dtype is torch.bool
        else (torch.randint(0, 256, (7, 24), dtype=torch.uint8))
    )
    tensor = raw.view(dtype)
    event = publish(shard_stores, part, *named("a", rows(tensor, 4)))
    with pulled(shard_stores, part, event) as version:
        [(name, received)] = version.tensors()
    assert (name, received.dtype, received.shape) == ("a", dtype, tensor.shape)
    assert identical(received, tensor)


def test_uneven_empty_and_whole_shards_are_installed_where_they_belong(shard_stores, part):
    weight, bias, alone = torch.rand(5, 3), torch.rand(4), torch.rand(())
    first, second = rows(weight, 5)  # the second rank has none of it
    low, high = rows(bias, 3)
    event = publish(
        shard_stores,
        part,
        [("weight", *first), ("bias", *low)],
        [("weight", *second), ("bias", *high), ("alone", alone, (), ()), ("whole", bias)],
    )
    module = module_of(weight=(5, 3), bias=4, alone=(), whole=4)
    with pulled(shard_stores, part, event) as version:
        install(check_fit(module, version))
    assert identical(module["weight"], weight)
    assert identical(module["bias"], bias)
    assert identical(module["whole"], bias)
    assert module["alone"] == alone


def test_a_slice_across_columns_and_ranks_is_read_straight_into_the_model(
    shard_stores, part, checked
):
    weight = torch.rand(64, 32)
    event = publish(shard_stores, part, *named("weight", rows(weight, 24)))
    module = module_of(weight=(10, 8))
    selection = {"weight": TensorSlice((20, 16), (10, 8))}
    with pulled(shard_stores, part, event, selection) as version:
        install(check_fit(module, version))
        [(_, assembled)] = version.tensors()
    assert identical(module["weight"], weight[20:30, 16:24])
    assert identical(assembled, weight[20:30, 16:24])
    # A row has two chunks of 64 bytes, of which the slice needs the second, half of it.
    assert sum(checked) == 10 * CHUNK


def test_a_subset_by_name_reads_no_more_than_that(shard_stores, part, checked):
    tensors = [(f"layer{number}", torch.full((64,), float(number))) for number in range(8)]
    event = publish(shard_stores, part, tensors)
    module = module_of(layer3=64, other=2)
    with pulled(shard_stores, part, event, {"layer3": None}) as version:
        install(check_fit(module, version))
        assert [name for name, _ in version.tensors()] == ["layer3"]
    assert (module["layer3"] == 3).all()
    assert (module["other"] == 0).all(), "what was not asked for is left alone"
    assert sum(checked) == 64 * 4


def test_what_is_wanted_and_not_there_is_refused_by_name(shard_stores, part):
    event = publish(shard_stores, part, [("a", torch.ones(4))])
    refused = raises(AbsentTensor, fault="selection", tensor="b")
    with pulled(shard_stores, part, event, {"b": None}) as version, refused:
        check_fit(module_of(b=4), version)
    for box, selected in (
        (TensorSlice((2,), (4,)), ([4], [2])),
        (TensorSlice((0, 0), (4, 1)), ([4, 1], [0, 0])),
    ):
        attributes = {"fault": "selection", "tensor": "a", "selected": selected, "shape": [4]}
        with pulled(shard_stores, part, event, {"a": box}) as version:
            with raises(UnassembledTensor, **attributes):
                check_fit(module_of(a=box.shape), version)
            with raises(UnassembledTensor, **attributes):
                dict(version.tensors())


@pytest.mark.parametrize(
    ("cut", "coverage"),
    [
        ((3, 4), CoverageFault(missing=2, volume=12)),
        ((3, 2), CoverageFault(twice_at=(2, 0))),
    ],
)
def test_a_hole_or_an_overlap_changes_nothing_and_names_the_tensor(
    shard_stores, part, cut, coverage
):
    tensor = torch.rand(6, 2)
    upto, since = cut
    event = publish(
        shard_stores,
        part,
        [("a", tensor[:upto], (0, 0), (6, 2))],
        [("a", tensor[since:], (since, 0), (6, 2))],
    )
    module = module_of(a=(6, 2))
    with pulled(shard_stores, part, event) as version:
        with raises(UnassembledTensor, tensor="a", coverage=coverage):
            check_fit(module, version)
        with raises(UnassembledTensor, tensor="a", coverage=coverage):
            dict(version.tensors())
    assert (module["a"] == 0).all()


@pytest.mark.parametrize("size", [3, 0])
def test_a_tensor_that_two_ranks_bring_whole_is_refused_in_every_way(shard_stores, part, size):
    event = publish(shard_stores, part, [("a", torch.ones(size))], [("a", torch.ones(size))])
    module = module_of(a=size)
    with pulled(shard_stores, part, event) as version:
        for fill in (check_fit, adopt):
            with raises(UnassembledTensor, fault="twice", tensor="a"):
                fill(module, version)
        with raises(UnassembledTensor, fault="twice", tensor="a"):
            dict(version.tensors())
    with raises(UnassembledTensor, fault="twice", tensor="a"):
        load.load_version(shard_stores[-1], part.run_id, event, module)


def test_shards_that_disagree_on_what_they_are_of_are_refused(shard_stores, part):
    event = publish(
        shard_stores,
        part,
        [("a", torch.ones(3), (0,), (6,))],
        [("a", torch.ones(3), (3,), (7,))],
    )
    refused = raises(UnassembledTensor, fault="forms", tensor="a")
    with pulled(shard_stores, part, event) as version, refused:
        check_fit(module_of(a=6), version)


def test_shards_of_different_dtypes_are_refused_and_not_cast_whatever_is_wanted(shard_stores, part):
    event = publish(
        shard_stores,
        part,
        [("a", torch.ones(3), (0,), (6,))],
        [("a", torch.ones(3).double(), (3,), (6,))],
    )
    for selection in (
        None,
        {"a": None},
        {"a": TensorSlice((0,), (6,))},
        {"a": TensorSlice((1,), (2,))},
    ):
        refused = raises(UnassembledTensor, fault="forms", tensor="a")
        with pulled(shard_stores, part, event, selection) as version, refused:
            dict(version.tensors())


def test_each_shard_is_published_by_one_of_the_ranks_that_hold_it():
    keys = [bytes([number] * 8) for number in range(40)]
    everyone = [b"".join(keys[:30]), b"".join(keys[10:]), b"".join(keys[10:30])]
    assigned = owners(everyone)
    assert set(assigned) == set(keys)
    assert all(key in everyone[rank] for key, rank in assigned.items())
    assert {assigned[key] for key in keys[10:30]} == {0, 1, 2}, "they are dealt out"


def test_a_version_names_every_tensor_once(shard_stores, part):
    event = publish(shard_stores, part, *named("a", rows(torch.rand(4, 2), 1)))
    with pulled(shard_stores, part, event) as version:
        assert isinstance(version, PulledVersion)
        assert list(version.by_name()) == ["a"]
        assert version.bytes == 32


def test_tied_leaves_travel_under_both_names(shard_stores, part):
    tensor = torch.rand(5)
    event = publish(shard_stores, part, [("a", tensor), ("b", tensor)])
    module = module_of(a=5, b=5)
    with pulled(shard_stores, part, event) as version:
        install(check_fit(module, version))
    assert identical(module["a"], tensor) and identical(module["b"], tensor)


@pytest.mark.parametrize(
    "tie", [lambda parameter: parameter, lambda parameter: torch.nn.Parameter(parameter.data)]
)
@pytest.mark.parametrize("selection", [None, {"a": None, "b": None}], ids=["all", "some"])
def test_what_is_one_tensor_in_the_model_and_two_in_the_version_has_to_be_equal(
    shard_stores, part, selection, tie
):
    tensor = torch.rand(4, 3)
    module = module_of(a=(4, 3))
    module["b"] = tie(module["a"])
    whole, cut = [("a", tensor), ("b", tensor)], named("a", rows(tensor, 2))
    differs = [("b", tensor + 1, (0, 0), (4, 3))]
    for step, ranks, fits in (
        (1, ([*whole[:1], ("b", tensor + 1)],), False),
        (2, (cut[0] + differs, cut[1]), False),
        (3, (whole,), True),
        (4, tuple([*cut_shards, ("b", *cut_shards[0][1:])] for cut_shards in cut), True),
    ):
        here = part._replace(step=step)
        event = publish(shard_stores, here, *ranks)
        with pulled(shard_stores, here, event, selection) as version:
            if fits:
                install(check_fit(module, version))
                assert identical(module["a"], tensor) and identical(module["b"], tensor)
            else:
                with raises(UnfillableTensor, fault="tied", tensor="a", other="b"):
                    check_fit(module, version)
                assert not module["a"].any()
        torch.nn.init.zeros_(module["a"])


def test_deltas_of_what_is_one_tensor_in_the_model_have_to_make_the_same(shard_stores, part):
    if shard_stores[0].name == "cuda-ipc":
        pytest.skip("what changed is found on the host")
    first, second, last = torch.rand(1000), torch.rand(1000), LastPublished(8)
    second[:] = first
    module = module_of(a=1000)
    module["b"] = module["a"]
    for step in (1, 2, 3):
        here = part._replace(step=step)
        last.begin(here, lambda _: True)
        writer = PartWriter(shard_stores[0], here, last=last)
        writer.add("a", first)
        writer.add("b", second)
        event = announcement(here, writer.seal())
        with pulled(shard_stores, here, event) as version:
            if step < 3:
                install(check_fit(module, version))
                assert identical(module["a"], first)
            else:
                with raises(UnfillableTensor, fault="tied", tensor="a", other="b"):
                    check_fit(module, version)
        first[step] += 1
        second[step] += step % 2


def test_a_leaf_that_is_spread_over_ranks_is_gathered(shard_stores, part):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        tensor = torch.rand(6, 2).bfloat16()
        leaf = distribute_tensor(tensor, init_device_mesh("cpu", (1,)), [Shard(0)])
        event = publish(shard_stores, part, [("a", leaf)])
    finally:
        dist.destroy_process_group()
    with pulled(shard_stores, part, event) as version:
        assert identical(dict(version.tensors())["a"], tensor)


def test_installing_counts_as_a_change_for_autograd(shard_stores, part):
    event = publish(shard_stores, part, [("a", torch.ones(3))])
    module = module_of(a=3)
    squared = (module["a"] ** 2).sum()
    with pulled(shard_stores, part, event) as version:
        install(check_fit(module, version))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squared.backward()


@pytest.mark.parametrize("large", [1 << 22, 5_000_001])
def test_large_tensors_are_installed_whole_by_several_threads(shard_stores, part, large):
    tensors = [("large", torch.rand(large)), ("small", torch.rand(7)), ("odd", torch.rand(999_999))]
    event = publish(shard_stores, part, tensors, chunk_bytes=None)
    module = module_of(large=large, small=7, odd=999_999)
    with pulled(shard_stores, part, event) as version:
        install(check_fit(module, version))
    for name, tensor in tensors:
        assert identical(module[name], tensor)


def test_a_module_that_adopts_serves_from_the_versions_own_memory(shard_stores, part):
    tensors = [("a", torch.rand(64)), ("b", torch.rand(3, 4))]
    event = publish(shard_stores, part, tensors)
    module = module_of(a=64, b=(3, 4))
    with pulled(shard_stores, part, event) as version:
        adopt(module, version)
        [(_, there)] = version.parts
        assert module["a"].data_ptr() == there.span(0, 256).data_ptr(), "nothing was copied"
        for name, tensor in tensors:
            assert identical(module[name], tensor)


def test_what_does_not_fit_or_lies_apart_is_not_adopted(shard_stores, part):
    module = module_of(a=(4, 2))
    event = publish(shard_stores, part, *named("a", rows(torch.rand(4, 2), 1)))
    refused = raises(UnassembledTensor, fault="shards", tensor="a")
    with pulled(shard_stores, part, event) as version, refused:
        adopt(module, version)
    event = publish(shard_stores, part._replace(step=2), [("a", torch.ones(3))])
    refused = raises(UnfitTensor, fault="form", tensor="a")
    with pulled(shard_stores, part, event) as version, refused:
        adopt(module, version)
    assert (module["a"] == 0).all()


@pytest.mark.parametrize("subset", [False, True])
def test_what_is_tied_to_what_is_adopted_gets_the_same_memory(shard_stores, part, subset):
    module = module_of(a=(4, 2), other=3)
    module["same"] = module["a"]
    module["alike"] = torch.nn.Parameter(module["a"].data)
    if not subset:
        del module["other"]
    for step in (1, 2):
        here = part._replace(step=step)
        writer = PartWriter(shard_stores[0], here, CHUNK, subset=subset)
        writer.add("a", torch.full((4, 2), float(step)))
        event = announcement(here, writer.seal())
        with pulled(shard_stores, here, event) as version:
            adopt(module, version)
            assert all((module[name] == step).all() for name in ("a", "same", "alike"))
            assert module["alike"].data_ptr() == module["a"].data_ptr()
    assert not subset or not module["other"].any()


@pytest.mark.parametrize("selection", [None, {"a": None}], ids=["all", "some"])
@pytest.mark.parametrize("view", [lambda tensor: tensor[:1], lambda tensor: tensor.view(2, 4)])
def test_a_view_of_what_comes_is_not_left_behind_by_adopting(shard_stores, part, selection, view):
    event = publish(shard_stores, part, [("a", torch.ones(4, 2))])
    module = module_of(a=(4, 2))
    module["view"] = torch.nn.Parameter(view(module["a"].data))
    refused = raises(UnfillableTensor, fault="overlap", tensor="view")
    with pulled(shard_stores, part, event, selection) as version:
        with refused:
            adopt(module, version)
        assert not module["a"].any()
        install(check_fit(module, version))
    assert module["view"].all()


def test_buffers_of_a_module_under_two_names_are_adopted(shard_stores, part):
    shared = torch.nn.BatchNorm1d(3)
    module = torch.nn.ModuleDict({"a": shared, "b": shared})
    sent = {name: torch.full_like(tensor, 2) for name, tensor in module.state_dict().items()}
    event = publish(shard_stores, part, sent.items())
    with pulled(shard_stores, part, event) as version:
        adopt(module, version)
        assert all(identical(tensor, sent[name]) for name, tensor in module.state_dict().items())


@pytest.mark.parametrize("made", [False, True], ids=["model", "inference model"])
@pytest.mark.parametrize("read", [False, True], ids=["pulled", "pulled in inference mode"])
def test_a_model_that_adopts_computes_in_every_mode_that_it_was_made_for(
    shard_stores, part, made, read
):
    with torch.inference_mode(made):
        model = torch.nn.Linear(4, 4)
    for step in (1, 2):
        here = part._replace(step=step)
        tensors = {"weight": torch.full((4, 4), float(step)), "bias": torch.zeros(4)}
        event = publish(shard_stores, here, tensors.items())
        with torch.inference_mode(read), pulled(shard_stores, here, event) as version:
            adopt(model, version)
            assert [parameter.is_inference() for parameter in model.parameters()] == [made, made]
            for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad):
                with torch.inference_mode(False), mode():
                    assert (model(torch.ones(2, 4)) == 4 * step).all()


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_tensors_of_every_dtype_are_adopted_by_a_model_made_in_inference_mode(
    shard_stores, part, dtype
):
    sent = torch.randint(0, 2, (3, 8), dtype=torch.uint8).view(dtype)
    event = publish(shard_stores, part, [("odd", torch.ones(1)), ("a", sent)])
    module = torch.nn.Module()
    with torch.inference_mode():
        module.register_buffer("odd", torch.zeros(1))
        module.register_buffer("a", torch.zeros(sent.shape, dtype=dtype))
    with pulled(shard_stores, part, event) as version:
        adopt(module, version)
        assert identical(module.a, sent)
        assert module.a.data_ptr() == dict(version.tensors())["a"].data_ptr()
