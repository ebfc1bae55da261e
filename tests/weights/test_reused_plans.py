"""Versions with the layout of the version before, whose plans are used again on both ends."""

import gc
from types import SimpleNamespace
from weakref import ref

import pytest
import torch

from tests.support.errors import raises
from tests.support.published_parts import announcement, assert_same, read
from tests.support.tensors import identical
from trinity_events.weights import (
    PartWriter,
    ShardOffset,
    check_fit,
    install,
    pull_version,
)
from trinity_events.weights.applying import install as install_module
from trinity_events.weights.errors import (
    AbsentTensor,
    FreedTensor,
    UnfillableTensor,
    UnfitTensor,
    UnpublishableName,
)
from trinity_events.weights.publishing import part_writer
from trinity_events.weights.publishing.part_writer import LastLayout, UnpublishableTensor
from trinity_schemas import ManifestContradiction

CHUNKS = 64, 100, 4096


def sample_tensors(**changes):
    """Tensors of odd sizes and several dtypes, none of which another test changes."""
    made = {
        "square": torch.randn(6, 6),
        "empty": torch.empty(0, 3),
        "scalar": torch.randn(()),
        "odd": torch.randint(0, 99, (7, 3), dtype=torch.int8),
        "short": torch.randn(5, dtype=torch.bfloat16),
        "bias": torch.randn(6),
    }
    return {name: tensor for name, tensor in {**made, **changes}.items() if tensor is not None}


def model():
    module = torch.nn.ParameterDict(
        {
            name: torch.zeros_like(tensor)
            for name, tensor in sample_tensors().items()
            if tensor.is_floating_point()
        }
    )
    module.register_buffer("odd", torch.zeros(7, 3, dtype=torch.int8))
    return module


@pytest.fixture
def plans(monkeypatch):
    """Numbers of layouts and of copy plans that were made."""
    made = SimpleNamespace(layouts=0, copies=0)
    layout, copies = part_writer.PartLayout, install_module.plan_copies

    def counted_layout(*arguments):
        made.layouts += 1
        return layout(*arguments)

    def counted_copies(*arguments, **options):
        made.copies += 1
        return copies(*arguments, **options)

    monkeypatch.setattr(part_writer, "PartLayout", counted_layout)
    monkeypatch.setattr(install_module, "plan_copies", counted_copies)
    return made


class Ends:
    """A publisher that adds tensors at once, and a reader."""

    def __init__(self, stores, part):
        self.store, self.reader = stores[0], stores[-1]
        self.part = part
        self.last = LastLayout()

    def writer(self, chunk_bytes=64, **options):
        self.part = self.part._replace(step=self.part.step + 1)
        return PartWriter(self.store, self.part, chunk_bytes, last_layout=self.last, **options)

    def publish(self, tensors, places=None, **options):
        writer = self.writer(**options)
        writer.add_all(list(tensors), list(tensors.values()), places)
        return announcement(self.part, writer.seal())

    def apply(self, module, event):
        with pull_version(self.reader, self.part.run_id, event) as version:
            install(check_fit(module, version))

    def read(self, event):
        return read(self.reader, self.part.run_id, event)


@pytest.fixture
def ends(shard_stores, part):
    return Ends(shard_stores, part)


def holds(module, tensors):
    state = module.state_dict()
    return all(identical(state[name], tensor) for name, tensor in tensors.items())


def test_a_layout_is_planned_once_on_both_ends(ends, plans):
    module = model()
    for _ in range(3):
        tensors = sample_tensors()
        ends.apply(module, ends.publish(tensors))
        assert holds(module, tensors)
    assert plans.copies == 1
    assert plans.layouts == 1


@pytest.mark.parametrize("chunk_bytes", CHUNKS)
def test_tensors_added_at_once_are_the_part_that_they_are_one_by_one(ends, chunk_bytes):
    for _ in range(3):
        tensors = sample_tensors()
        ends.publish({name: tensor * 0 + 1 for name, tensor in tensors.items()})  # bytes in between
        at_once = ends.writer(chunk_bytes)
        at_once.add_all(list(tensors), list(tensors.values()))
        report = at_once.seal()
        ends.store.delete(ends.part)
        one_by_one = PartWriter(ends.store, ends.part, chunk_bytes)
        for name, tensor in tensors.items():
            one_by_one.add(name, tensor)
        assert one_by_one.seal() == report


def test_a_tensor_may_follow_those_that_were_added_at_once(ends):
    for _ in range(2):
        tensors, more = sample_tensors(), torch.randn(9)
        writer = ends.writer()
        writer.add_all(list(tensors), list(tensors.values()))
        writer.add("more", more)
        event = announcement(ends.part, writer.seal())
        assert_same(ends.read(event), [*tensors.items(), ("more", more)])


@pytest.mark.parametrize(
    "tensors",
    [
        sample_tensors(square=torch.randn(4, 9)),
        sample_tensors(square=torch.randn(6, 6).t()),
        sample_tensors(square=torch.randn(6, 6, dtype=torch.float64)),
        sample_tensors(bias=None),
        sample_tensors(more=torch.randn(3)),
        dict(reversed(sample_tensors().items())),
        {f"{name}.": tensor for name, tensor in sample_tensors().items()},
        {name: torch.nn.Parameter(tensor, False) for name, tensor in sample_tensors().items()},
    ],
)
def test_a_part_with_another_layout_is_described_anew(ends, tensors):
    for _ in range(2):
        ends.publish(sample_tensors())
    assert_same(ends.read(ends.publish(tensors)), list(tensors.items()))


def test_shards_elsewhere_in_their_tensor_are_another_layout(ends, plans):
    whole, module = torch.randn(6, 4), torch.nn.ParameterDict({"whole": torch.zeros(6, 4)})
    for at in (2, 2, 4):
        first, second = ShardOffset((0, 0), (6, 4)), ShardOffset((at, 0), (6, 4))
        writer = ends.writer()
        shards = [whole[:at].clone(), whole[at:].clone()]
        writer.add_all(["whole", "whole"], shards, [first, second])
        ends.apply(module, announcement(ends.part, writer.seal()))
        assert identical(module["whole"], whole)
        whole = whole + 1
    assert plans.copies == 2


def test_a_freed_tensor_is_refused_by_its_name_before_and_after_its_layout_is_known(ends):
    for has_layout in (False, True):
        if has_layout:
            ends.publish(sample_tensors())
        tensors = sample_tensors()
        tensors["bias"].untyped_storage().resize_(0)
        with raises(FreedTensor, tensor="bias"):
            ends.publish(tensors)


def test_names_and_dtypes_outside_the_contract_are_refused_at_once(ends):
    with raises(UnpublishableName, name="n" * 257):
        ends.publish(sample_tensors(**{"n" * 257: torch.ones(1)}))
    with raises(UnpublishableTensor, name="bias"):
        ends.publish(sample_tensors(bias=torch.ones(6, dtype=torch.complex128)))
    with raises(ManifestContradiction, fault="twice", tensor="a"):
        twice(ends.writer())


def twice(writer):
    writer.add_all(["a", "a"], [torch.ones(1), torch.ones(2)])
    writer.seal()


def replaced(module):
    module["square"] = torch.nn.Parameter(torch.full((6, 6), 5.0))


def moved(module):
    module["square"].data = torch.full((6, 6), 5.0)


def turned_in_place(module):
    with torch.no_grad():
        module["square"].t_()


def reshaped(module):
    module["square"].data = module["square"].data.view(4, 9)


def converted(module):
    module["bias"].data = module["bias"].data.double()


def seen_otherwise(module):
    module["short"].data = module["short"].data.view(torch.float16)


def freed(module):
    module["square"].untyped_storage().resize_(0)


def tied(module):
    module["tie"] = module["bias"]


def grown(module):
    module["more"] = torch.nn.Parameter(torch.zeros(3))


def deepened(module):
    module.add_module("deeper", torch.nn.Linear(2, 2))


def emptied(module):
    del module["bias"]


def renamed(module):
    module._parameters["other"] = module._parameters.pop("bias")


def with_buffer_not_saved(module):
    module._non_persistent_buffers_set.add("odd")


def for_inference(module):
    with torch.inference_mode():
        module["square"].data = module["square"].detach().clone()


CHANGES = [
    (replaced, None, {}),
    (moved, None, {}),
    (turned_in_place, None, {}),
    (reshaped, UnfitTensor, {"tensor": "square", "in_model": "torch.float32 [4, 9]"}),
    (converted, UnfitTensor, {"tensor": "bias", "dtype": "torch.float64"}),
    (seen_otherwise, UnfitTensor, {"tensor": "short", "dtype": "torch.float16"}),
    (freed, UnfillableTensor, {"tensor": "square", "fault": "freed"}),
    (tied, None, {}),
    (grown, AbsentTensor, {"tensor": "more", "fault": "version"}),
    (deepened, AbsentTensor, {"tensor": "deeper.weight", "fault": "version"}),
    (emptied, AbsentTensor, {"tensor": "bias", "fault": "model"}),
    (renamed, AbsentTensor, {"tensor": "bias", "fault": "model"}),
    (with_buffer_not_saved, AbsentTensor, {"tensor": "odd", "fault": "model"}),
    (for_inference, None, {}),
]


@pytest.mark.parametrize(("change", "refused", "attributes"), CHANGES)
def test_a_changed_model_is_fitted_as_one_never_seen(ends, plans, change, refused, attributes):
    module = model()
    for _ in range(2):
        ends.apply(module, ends.publish(sample_tensors()))
    change(module)
    tensors = sample_tensors()
    before = [parameter.clone() for parameter in module.parameters() if parameter.data_ptr()]
    event = ends.publish(tensors)
    if refused:
        with raises(refused, **attributes):
            ends.apply(module, event)
        now = [parameter for parameter in module.parameters() if parameter.data_ptr()]
        assert all(map(identical, now, before))
    else:
        ends.apply(module, event)
        assert holds(module, tensors)
    assert plans.copies == 2


@pytest.mark.parametrize(
    ("tensors", "refused", "attributes"),
    [
        (
            sample_tensors(square=torch.randn(4, 9)),
            UnfitTensor,
            {"tensor": "square", "in_model": "torch.float32 [6, 6]"},
        ),
        (
            sample_tensors(bias=torch.randn(6, dtype=torch.float64)),
            UnfitTensor,
            {"tensor": "bias", "in_version": "torch.float64 [6]"},
        ),
        (sample_tensors(bias=None), AbsentTensor, {"tensor": "bias", "fault": "version"}),
        (
            sample_tensors(more=torch.randn(3)),
            AbsentTensor,
            {"tensor": "more", "fault": "model"},
        ),
        (dict(reversed(sample_tensors().items())), None, {}),
    ],
)
def test_another_version_is_fitted_as_the_first_one(ends, tensors, refused, attributes):
    module, last = model(), sample_tensors()
    for _ in range(2):
        ends.apply(module, ends.publish(last))
    event = ends.publish(tensors)
    if refused:
        with raises(refused, **attributes):
            ends.apply(module, event)
        assert holds(module, last), "it was refused before anything changed"
    else:
        ends.apply(module, event)
        assert holds(module, tensors)


def test_a_subset_is_no_version_of_all(ends):
    module = model()
    for _ in range(2):
        ends.apply(module, ends.publish({"bias": torch.randn(6)}, subset=True))
    with raises(AbsentTensor, fault="version"):
        ends.apply(module, ends.publish({"bias": torch.randn(6)}))


def test_a_tie_that_is_made_or_broken_later_is_seen(ends):
    module = torch.nn.ParameterDict({"a": torch.zeros(4), "b": torch.zeros(4)})
    first, other = torch.randn(4), torch.randn(4)
    for _ in range(2):
        ends.apply(module, ends.publish({"a": first, "b": other}))
    module["b"].data = module["a"].data
    with raises(UnfillableTensor, fault="tied", tensor="a", other="b"):
        ends.apply(module, ends.publish({"a": first, "b": other}))
    for _ in range(2):
        ends.apply(module, ends.publish({"a": other}))
        assert identical(module["b"], other)
    module["b"].data = torch.zeros(4)
    with raises(AbsentTensor, tensor="b", fault="version"):
        ends.apply(module, ends.publish({"a": first}))


def test_neither_a_model_nor_a_tensor_that_it_replaced_is_kept(ends):
    module = model()
    for _ in range(2):
        ends.apply(module, ends.publish(sample_tensors()))
    old, gone = ref(module["square"]), ref(module)
    replaced(module)
    gc.collect()
    assert old() is None
    ends.apply(module, ends.publish(sample_tensors()))
    del module
    gc.collect()
    assert gone() is None
