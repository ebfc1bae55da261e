"""Batches become veRL's `DataProto`, and are had back."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support.batches import make_batch
from tests.support.errors import raises
from tests.support.tensors import assert_equal, identical
from trinity_workers.algorithms.errors import DataProtoIncomplete
from trinity_workers.algorithms.verl_data import from_data_proto, to_data_proto

pytestmark = [
    pytest.mark.usefixtures("imported_verl"),
    pytest.mark.filterwarnings("default"),  # veRL's and tensordict's
]


def test_a_batch_is_the_same_after_the_way_to_verl_and_back():
    batch = make_batch([3, 1, 4, 2], groups=[5, 5, 9, 9], holes=True).padded(3)
    back = from_data_proto(to_data_proto(batch))
    assert_equal(back.known(), batch.known())
    bare = replace(batch, values=None, advantages=None, reference_logprobs=None)
    assert_equal(from_data_proto(to_data_proto(bare)).known(), bare.known())


def test_verls_trainer_finds_its_names_shapes_and_dtypes():
    batch = make_batch([3, 1], holes=True)
    data = to_data_proto(batch)
    assert identical(data.batch["prompts"], batch.input_ids[:, : batch.prompt_width])
    assert identical(data.batch["responses"], batch.responses)
    assert data.batch["response_mask"].dtype == torch.int64
    assert identical(data.batch["rollout_log_probs"], batch.behaviour_logprobs)
    assert identical(data.batch["old_log_probs"], batch.proximal_logprobs)
    assert identical(data.batch["ref_log_prob"], batch.reference_logprobs)
    assert identical(data.batch["token_level_scores"].sum(-1), batch.rewards)
    assert list(data.non_tensor_batch["uid"]) == ["0", "0"]


def test_verl_itself_splits_and_joins_what_it_is_given():
    from verl import DataProto

    batch = make_batch([3, 1, 4, 2])
    parts = to_data_proto(batch).chunk(2)
    assert_equal(from_data_proto(DataProto.concat(parts)).known(), batch.known())


def test_names_of_groups_that_are_no_numbers_become_numbers_by_first_appearance():
    data = to_data_proto(make_batch([1, 1, 1], groups=[1, 2, 1]))
    data.non_tensor_batch["uid"][:] = ["b-7", "a-1", "b-7"]
    assert from_data_proto(data).groups.tolist() == [0, 1, 0]


def test_a_data_proto_without_a_needed_field_is_refused_by_name():
    data = to_data_proto(make_batch([1, 1]))
    data.batch.pop("responses")
    with raises(DataProtoIncomplete, missing=("responses",)):
        from_data_proto(data)
