"""What goes to the ranks is small, and comes as it was."""

from __future__ import annotations

import pickle

import pytest

torch = pytest.importorskip("torch")

from tests.support.batches import make_batch  # noqa: E402
from tests.support.experiences import make_groups  # noqa: E402
from tests.support.tensors import assert_equal, identical  # noqa: E402
from trinity_workers.worker_group.wire import pack, unpack  # noqa: E402


def carried(value):
    return unpack(pickle.loads(pickle.dumps(pack(value))))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32, torch.bfloat16])
def test_tensors_of_any_dtype_come_as_they_were_and_can_be_written_to(dtype):
    for value in (torch.arange(6).view(2, 3).to(dtype), torch.tensor(1).to(dtype)):
        result = carried({"field": value, "steps": 3})
        assert identical(result["field"], value)
        assert result["steps"] == 3
        result["field"].zero_()


def test_a_part_of_a_batch_takes_its_own_rows_along_alone():
    batch = make_batch([5] * 512)
    part = batch.rows(3, 5)
    assert len(pickle.dumps(part.input_ids)) > batch.input_ids.nbytes, "a view has all of it"
    assert len(pickle.dumps(pack(part))) < len(pickle.dumps(pack(batch))) / 50
    assert_equal(carried(part).known(), part.known())


def test_groups_of_samples_travel_as_bytes_and_come_as_they_were():
    groups = make_groups("r", seed=0)
    assert b"Experience" not in pickle.dumps(pack(groups)), "none is pickled"
    assert carried(groups) == groups
    assert carried([]) == []


def test_a_list_that_has_more_than_groups_comes_as_it_was():
    groups = make_groups("r", seed=0)
    for value in ([*groups, []], [*groups, "more"], [[*groups[0], 3]], [[]], [], "groups"):
        assert carried(value) == value
