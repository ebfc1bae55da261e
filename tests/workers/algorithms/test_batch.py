"""Claims about the batch container: rows and padding move, values stay."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest

from tests.support.errors import raises

torch = pytest.importorskip("torch")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from tests.properties.generated import examples  # noqa: E402
from tests.support.batches import make_batch  # noqa: E402
from tests.support.rollout_messages import PROMPT, experience, policy  # noqa: E402
from tests.support.tensors import assert_equal, identical  # noqa: E402
from trinity_schemas import Experience, Turn  # noqa: E402
from trinity_workers.algorithms.batch import Batch, concatenate  # noqa: E402
from trinity_workers.algorithms.collate import MalformedExperience, collate  # noqa: E402
from trinity_workers.algorithms.errors import FieldMissing  # noqa: E402

lengths = st.lists(st.integers(1, 6), min_size=1, max_size=9)


def same(batch: Batch, other: Batch) -> None:
    assert_equal(batch.known(), other.known())


@examples(30)
@given(lengths, st.data())
def test_parts_of_a_batch_concatenate_to_it(chosen, data):
    batch = make_batch(chosen)
    same(concatenate(batch.split(data.draw(st.integers(1, len(batch) + 1)))), batch)
    cut = data.draw(st.integers(0, len(batch)))
    same(concatenate(batch.split([cut, len(batch) - cut])), batch)


@examples(30)
@given(lengths, st.randoms(use_true_random=False))
def test_an_order_and_its_inverse_give_the_batch_back(chosen, lot):
    batch = make_batch(chosen)
    order = list(range(len(batch)))
    lot.shuffle(order)
    inverse = [order.index(row) for row in range(len(batch))]
    same(batch.reorder(order).reorder(inverse), batch)


@examples(30)
@given(lengths, st.integers(1, 8))
def test_padding_rows_train_on_nothing_and_can_be_taken_off_again(chosen, multiple):
    batch = make_batch(chosen)
    padded = batch.padded(multiple)
    assert len(padded) % multiple == 0
    assert len(padded) - len(batch) < multiple
    same(padded.rows(0, len(batch)), batch)
    added = padded.rows(len(batch), len(padded))
    assert not added.response_mask.any()
    assert (added.groups == -1).all()
    assert (added.attention_mask.sum(dim=-1) == 1).all(), "attention of nothing is NaN"
    assert padded.token_count == batch.token_count


@examples(30)
@given(lengths, lengths)
def test_batches_of_other_widths_are_concatenated_with_padding_that_is_masked(responses, other):
    first = make_batch(responses, prompts=[3] * len(responses))
    second = make_batch(other, seed=1, prompts=[5] * len(other))
    both = concatenate([first, second])
    assert both.prompt_width == 5
    assert both.response_width == max(first.response_width, second.response_width)
    for batch, rows in (
        (first, both.rows(0, len(responses))),
        (second, both.rows(len(responses), len(both))),
    ):
        real, row_mask = batch.attention_mask.bool(), rows.attention_mask.bool()
        for name in ("input_ids", "position_ids"):
            assert identical(getattr(rows, name)[row_mask], getattr(batch, name)[real])
        for name in ("values", "behaviour_logprobs", "advantages"):
            values = getattr(rows, name)[rows.response_mask]
            assert identical(values, getattr(batch, name)[batch.response_mask])


def test_a_batch_is_narrowed_to_the_columns_that_its_rows_need():
    batch = make_batch([3, 1], prompts=[2, 4])
    wide = batch.widened(9, 8)
    same(wide.narrowed(4, 3), batch)
    assert wide.select([1]).narrowed(4, 1).input_ids.tolist() == [batch.input_ids[1, :5].tolist()]


def test_rows_are_selected_by_index_in_its_order_or_by_a_mask():
    batch = make_batch([1, 2, 3])
    assert batch.select([2, 0, 2]).groups.tolist() == [1, 0, 1]
    same(batch.select(torch.tensor([True, False, True])), batch.select([0, 2]))


def test_a_batch_moves_to_another_device_whole():
    batch = make_batch([2, 1])
    assert {tensor.device.type for tensor in batch.to("meta").known().values()} == {"meta"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rewards": torch.zeros(3)}, r"rewards is \[3\], but must be \[B\], which is \[2\]"),
        ({"values": torch.zeros(2, 3)}, r"values is \[2, 3\], but must be \[B, R\]"),
        ({"groups": torch.zeros(2)}, r"groups is torch.float32, but must be int64"),
        ({"response_mask": torch.ones(2, 2).long()}, r"response_mask is torch.int64"),
        (
            {"advantages": torch.ones(2, 2).bool()},
            r"advantages is torch.bool, but must be floating",
        ),
    ],
)
def test_a_field_of_another_shape_or_dtype_is_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        replace(make_batch([2, 1]), **change)


def test_a_field_that_is_not_known_is_named_with_its_purpose():
    with raises(FieldMissing, purpose="advantage gae", field="values"):
        make_batch([2], values=None).need("values", "advantage gae")


def test_batches_that_know_other_fields_are_not_mixed():
    with pytest.raises(ValueError, match="only some of the batches have returns, values"):
        concatenate([make_batch([2]), make_batch([2], values=None, returns=None)])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda batch: batch.split(0), "at least one row"),
        (lambda batch: batch.split([1, 3]), "do not make up 2"),
        (lambda batch: batch.reorder([0, 0]), "each row's index once"),
        (lambda batch: batch.padded(0), "a multiple of at least 1"),
        (lambda batch: batch.rows(0, 0).padded(2), "without rows"),
        (lambda batch: batch.widened(1, 9), "no room"),
        (lambda batch: batch.narrowed(1, 9), "has less than 1 . 9"),
        (lambda _: concatenate([]), "no batches"),
    ],
)
def test_what_cannot_be_done_with_rows_is_refused_in_a_sentence(call, message):
    with pytest.raises(ValueError, match=message):
        call(make_batch([2, 1]))


# --- from experiences ----------------------------------------------------------------------------


def test_experiences_are_laid_out_with_prompts_right_and_responses_left():
    long_prompt = Turn(role="prompt", tokens=[7, 8, 9])
    group = [
        experience(PROMPT, policy((2, 3), logprobs=[-0.5, -0.25]), sample=0),
        experience(long_prompt, policy((0,), logprobs=[-1.0]), sample=1),
    ]
    batch = collate([group], pad_token_id=0)
    assert batch.input_ids.tolist() == [[0, 0, 1, 2, 3], [7, 8, 9, 0, 0]]
    # The policy sampled the padding token 0: it is a token, for lengths say so.
    assert batch.attention_mask.tolist() == [[0, 0, 1, 1, 1], [1, 1, 1, 1, 0]]
    assert batch.position_ids.tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 3, 3]]
    assert batch.response_mask.tolist() == [[True, True], [True, False]]
    assert batch.behaviour_logprobs.tolist() == [[-0.5, -0.25], [-1.0, 0.0]]
    assert batch.groups.tolist() == [3, 3]
    assert batch.rewards.tolist() == [1.0, 1.0]
    assert batch.finished.tolist() == [True, True]
    assert batch.advantages is None


def test_tokens_of_the_environment_are_read_and_not_trained_on():
    tool = Turn(role="environment", tokens=[50, 51])
    episode = experience(PROMPT, policy((2, 3)), tool, policy((4,), logprobs=[-0.75]))
    batch = collate([[episode]], pad_token_id=0)
    assert batch.responses.tolist() == [[2, 3, 50, 51, 4]]
    assert batch.attention_mask.all()
    assert batch.response_mask.tolist() == [[True, True, False, False, True]]
    assert batch.behaviour_logprobs.tolist() == [[-0.5, -0.5, 0.0, 0.0, -0.75]]


def changed(episode: Experience, **values) -> Experience:
    return Experience(
        **{name: getattr(episode, name) for name in episode.__struct_fields__} | values
    )


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ([], "no episodes"),
        ([experience(), changed(experience(), ordinal=4)], r"of the ordinals \[3, 4\]"),
    ],
)
def test_experiences_that_make_no_batch_are_refused_by_name(group, message):
    with pytest.raises(ValueError, match=message):
        collate([group], pad_token_id=0)


@pytest.mark.parametrize(
    ("episode", "fault"),
    [
        (experience(PROMPT, policy(())), "length"),
        (changed(experience(), reward=float("nan")), "reward"),
        (changed(experience(), reward=1e300), "reward"),
        (experience(PROMPT, policy((2, 90))), "tokens"),
        (experience(PROMPT, policy(logprobs=[-0.5, float("nan")])), "logprobs"),
    ],
)
def test_a_malformed_experience_makes_no_batch_and_is_named(episode, fault):
    with pytest.raises(MalformedExperience) as raised:
        collate([[episode]], pad_token_id=0, vocabulary_size=90)
    error = pickle.loads(pickle.dumps(raised.value))
    assert (error.ordinal, error.sample, error.fault) == (3, 1, fault)
