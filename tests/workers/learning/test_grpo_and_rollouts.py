"""Claims about the learning part: splits, rewards, rollouts and the GRPO loss."""

from __future__ import annotations

import dataclasses
import random
from itertools import islice
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("reasoning_gym")

from tests.support.tensors import identical  # noqa: E402
from trinity_workers.learning import grpo, policy, rollout, warm_up  # noqa: E402
from trinity_workers.learning.tasks import Question, Reward, Task, make_task, split_of  # noqa: E402


@pytest.fixture(scope="module")
def task() -> Task:
    return make_task("spell-backward")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    policy.create_policy(folder, seed=0)
    return folder


RECORDED_SPLITS = {
    "hulu>": "held-out",
    "chip>": "held-out",
    "veta>": "validation",
    "lead>": "validation",
    "Lead>": "validation",
    "sun>": "training",
    "moon>": "training",
}


def mixed_questions(task: Task, count: int) -> list[Question]:
    """Questions of both word lengths, so that a batch of them has padding."""
    questions = list(islice(task.training_questions(3), 100))
    short = [question for question in questions if len(question.answer) == 3]
    long = [question for question in questions if len(question.answer) == 4]
    return [short[i // 2] if i % 2 else long[i // 2] for i in range(count)]


def sample(folder: Path, task: Task, *, temperature: float = 1.0):
    model, tokenizer = policy.load_policy(folder)
    groups = rollout.generate(
        model,
        tokenizer,
        task,
        mixed_questions(task, 8),
        samples=4,
        temperature=temperature,
        generator=torch.Generator().manual_seed(5),
    )
    return model, tokenizer, groups


def with_random_rewards(groups: list[rollout.Rollout]) -> list[rollout.Rollout]:
    """The groups with rewards by lot: a random policy earns none, which would mean no gradient."""
    lot = random.Random(0)
    return [
        dataclasses.replace(group, rewards=[float(lot.random() < 0.5) for _ in group.rewards])
        for group in groups
    ]


def test_held_out_and_validation_questions_never_appear_in_training(task: Task) -> None:
    held_out = {question.prompt.casefold() for question in task.held_out(256)}
    validation = {question.prompt.casefold() for question in task.validation(256)}
    training = {
        question.prompt.casefold()
        for seed in (0, 1)
        for question in islice(task.training_questions(seed), 5_000)
    }
    assert not held_out & validation
    assert not held_out & training
    assert not validation & training


def test_held_out_questions_are_distinct_and_always_the_same(task: Task) -> None:
    held_out = task.held_out(256)
    assert len({question.prompt for question in held_out}) == 256
    assert held_out == make_task("spell-backward").held_out(256)
    assert held_out[:10] == task.held_out(10)


def test_more_held_out_questions_than_exist_are_refused(task: Task) -> None:
    with pytest.raises(ValueError, match="held-out questions"):
        task.held_out(1_000)


def test_the_split_of_a_question_is_stable_across_releases() -> None:
    # Recorded values: changing them would train later runs on what earlier runs held out.
    assert [split_of(prompt) for prompt in RECORDED_SPLITS] == list(RECORDED_SPLITS.values())


def test_a_tenth_is_held_out_whatever_the_case_of_the_letters() -> None:
    prompts = [f"question {number}>" for number in range(20_000)]
    share = sum(split_of(prompt) == "held-out" for prompt in prompts) / len(prompts)
    assert share == pytest.approx(0.1, abs=0.01)
    assert all(split_of(prompt) == split_of(prompt.upper()) for prompt in prompts[:100])


def test_training_questions_are_determined_by_the_seed(task: Task) -> None:
    first, again, other = (list(islice(task.training_questions(s), 50)) for s in (0, 0, 1))
    assert first == again
    # reasoning-gym's own seeds 0 and 1 give one sequence shifted by one.
    assert first[1:] != other[:-1]
    assert len({q.prompt for q in first} & {q.prompt for q in other}) < 10


def test_the_reward_is_binary_whatever_partial_credit_the_score_gives(task: Task) -> None:
    question = Question(prompt="sun>", answer="nus", metadata={})
    assert task.reward(question, "nus") == Reward(exact=1.0, score=1.0)
    for wrong in ("nuz", "nusx", "sun", "", "nus ", "nu<pad>s"):
        assert task.reward(question, wrong).exact == 0.0
    assert 0.0 < task.reward(question, "nuz").score < 1.0


def test_an_answer_that_does_not_end_earns_nothing(task: Task) -> None:
    question = Question(prompt="sun>", answer="nus", metadata={})
    assert task.reward(question, None) == Reward(exact=0.0, score=0.0)


def test_an_unknown_task_is_refused_by_naming_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown task 'chess': choose one of .*spell-backward"):
        make_task("chess")


def test_the_tokenizer_survives_its_folder_with_one_token_a_character(folder: Path) -> None:
    _, tokenizer = policy.load_policy(folder)
    text = 'Zebra 09>"<q'
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert len(tokens) == len(text)
    assert tokenizer.unk_token_id not in tokens
    assert tokenizer.decode(tokens) == text
    assert tokenizer.padding_side == "left"
    assert len({tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id}) == 3


def test_every_question_and_answer_is_made_of_known_characters(folder: Path, task: Task) -> None:
    _, tokenizer = policy.load_policy(folder)
    for question in islice(task.training_questions(0), 2_000):
        assert tokenizer.unk_token_id not in tokenizer.encode(question.prompt + question.answer)


def test_a_policy_is_determined_by_its_seed(tmp_path: Path, folder: Path) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    policy.create_policy(tmp_path / "same", seed=0)
    policy.create_policy(tmp_path / "other", seed=1)
    assert identical(torch.get_rng_state(), before)
    weights, same, other = (
        policy.load_policy(path)[0].state_dict()
        for path in (folder, tmp_path / "same", tmp_path / "other")
    )
    assert all(identical(weights[name], same[name]) for name in weights)
    assert not identical(weights["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_a_folder_without_a_policy_is_refused_without_asking_the_hub(tmp_path: Path) -> None:
    with pytest.raises(policy.BadPolicy, match="no policy in"):
        policy.load_policy(tmp_path / "missing")


def test_generate_is_reproducible_by_seed_and_leaves_the_global_state_alone(
    folder: Path, task: Task
) -> None:
    model, tokenizer = policy.load_policy(folder)
    model.train()
    questions = mixed_questions(task, 4)

    def run(seed: int) -> list[rollout.Rollout]:
        generator = torch.Generator().manual_seed(seed)
        return rollout.generate(model, tokenizer, task, questions, samples=3, generator=generator)

    before = torch.get_rng_state()
    first = run(7)
    assert identical(torch.get_rng_state(), before)
    torch.rand(5)
    assert run(7) == first
    assert run(8) != first
    assert model.training


def test_generate_without_a_generator_takes_fresh_entropy_and_leaves_the_global_state_alone(
    folder: Path, task: Task
) -> None:
    model, tokenizer = policy.load_policy(folder)
    questions = mixed_questions(task, 4)
    before = torch.get_rng_state()
    first, second = (
        rollout.generate(model, tokenizer, task, questions, samples=3) for _ in range(2)
    )
    assert identical(torch.get_rng_state(), before)
    assert first != second


def test_responses_hold_the_end_of_sequence_once_and_last(folder: Path, task: Task) -> None:
    _, tokenizer, groups = sample(folder, task)
    responses = [response for group in groups for response in group.responses]
    assert len(responses) == 32
    for group in groups:
        assert group.prompt_tokens == tokenizer.encode(group.question.prompt)
        for response, logprobs in zip(group.responses, group.logprobs, strict=True):
            assert len(response) == len(logprobs)
            assert tokenizer.eos_token_id not in response[:-1]
            assert len(response) == rollout.MAX_NEW_TOKENS or (
                response[-1] == tokenizer.eos_token_id
            )


def test_a_sampled_padding_token_spoils_an_answer(folder: Path, task: Task) -> None:
    model, tokenizer = policy.load_policy(folder)
    pad, eos = tokenizer.pad_token_id, tokenizer.eos_token_id
    question = Question(prompt="sun>", answer="nus", metadata={})
    nus = tokenizer.encode("nus")

    def answer_with(tokens: list[int]) -> rollout.Rollout:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                rollout,
                "_generate_tokens",
                lambda *_, **__: ([tokens], [[-1.0] * len(tokens)]),
            )
            return rollout.generate(model, tokenizer, task, [question], samples=1)[0]

    right = answer_with([*nus, eos, pad, pad, pad])
    assert (right.responses, right.rewards) == ([[*nus, eos]], [1.0])
    spoilt = answer_with([nus[0], pad, *nus[1:], eos, pad, pad])
    assert (spoilt.responses, spoilt.rewards) == ([[nus[0], pad, *nus[1:], eos]], [0.0])
    endless = answer_with([*nus, pad, pad, pad, pad])
    assert (len(endless.responses[0]), endless.rewards) == (7, [0.0])


def test_response_logprobs_agree_with_those_that_the_rollout_recorded(
    folder: Path, task: Task
) -> None:
    for temperature in (1.0, 0.7):
        model, tokenizer, groups = sample(folder, task, temperature=temperature)
        batch = grpo.collate(groups, tokenizer.pad_token_id)
        assert (batch.attention_mask[:, 0] == 0).any(), "the batch should have left padding"
        logprobs = grpo.response_logprobs(model, batch, temperature)
        assert logprobs.shape == batch.old_logprobs.shape == batch.response_mask.shape
        torch.testing.assert_close(logprobs, batch.old_logprobs, atol=1e-4, rtol=0.0)


def test_an_answer_does_not_depend_on_the_padding_that_its_batch_gives_it(
    folder: Path, task: Task
) -> None:
    model, tokenizer, groups = sample(folder, task)
    together = grpo.response_logprobs(model, grpo.collate(groups, tokenizer.pad_token_id))
    for index, group in enumerate(groups):
        alone = grpo.response_logprobs(model, grpo.collate([group], tokenizer.pad_token_id))
        rows = together[index * 4 : index * 4 + 4, : alone.shape[1]]
        torch.testing.assert_close(rows, alone, atol=1e-4, rtol=0.0)


def test_collate_keeps_a_sampled_padding_token_as_a_real_one() -> None:
    pad = 0
    group = rollout.Rollout(
        Question("ab>", "ba", {}), [5, 6], [[pad, 7], [8]], [[-1.0, -2.0], [-3.0]], [1.0, 0.0], []
    )
    longer = dataclasses.replace(group, prompt_tokens=[5, 6, 9])
    batch = grpo.collate([group, longer], pad)
    assert batch.input_ids.tolist() == [
        [0, 5, 6, 0, 7],
        [0, 5, 6, 8, 0],
        [5, 6, 9, 0, 7],
        [5, 6, 9, 8, 0],
    ]
    assert batch.attention_mask[0].tolist() == [0, 1, 1, 1, 1]
    assert batch.attention_mask[1].tolist() == [0, 1, 1, 1, 0]
    assert batch.position_ids[0].tolist() == [0, 0, 1, 2, 3]
    assert batch.response_mask.tolist() == [[True, True], [True, False]] * 2
    assert batch.advantages.tolist() == [1.0, -1.0, 1.0, -1.0]
    assert batch.token_count == 6


def test_collate_refuses_a_group_whose_parts_do_not_fit() -> None:
    group = rollout.Rollout(Question("a>", "a", {}), [5], [[6, 7]], [[-1.0]], [1.0], [])
    with pytest.raises(ValueError, match="one logprob for each response token"):
        grpo.collate([group], 0)


def test_group_advantages_are_zero_when_all_rewards_are_equal() -> None:
    assert grpo.group_advantages([[0.1] * 7, [1.0] * 16, [0.0], []]) == [
        [0.0] * 7,
        [0.0] * 16,
        [0.0],
        [],
    ]


def test_group_advantages_have_mean_zero_and_deviation_one() -> None:
    advantages = torch.tensor(grpo.group_advantages([[1.0, 0.0, 0.0, 0.0], [0.3, 0.9, 0.2, 0.1]]))
    torch.testing.assert_close(advantages.mean(dim=1), torch.zeros(2))
    torch.testing.assert_close(advantages.std(dim=1, correction=0), torch.ones(2))
    with pytest.raises(ValueError, match="finite"):
        grpo.group_advantages([[1.0, float("nan")]])


def test_the_gradient_at_ratio_one_is_the_policy_gradient(folder: Path, task: Task) -> None:
    model, tokenizer, groups = sample(folder, task)
    batch = grpo.collate(with_random_rewards(groups), tokenizer.pad_token_id)

    logprobs = grpo.response_logprobs(model, batch)
    on_policy = dataclasses.replace(batch, old_logprobs=logprobs.detach())
    loss_sum, metrics = grpo.grpo_loss(logprobs, on_policy)
    actual = torch.autograd.grad(loss_sum, list(model.parameters()))

    logprobs = grpo.response_logprobs(model, batch)
    reinforce = -(logprobs * batch.advantages[:, None] * batch.response_mask).sum()
    expected = torch.autograd.grad(reinforce, list(model.parameters()))

    assert any(gradient.abs().max() > 1e-3 for gradient in expected)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    assert metrics["ratio"] == pytest.approx(1.0)
    assert metrics["clip_fraction"] == 0.0


def test_the_loss_sum_of_two_half_batches_is_that_of_the_whole(folder: Path, task: Task) -> None:
    model, tokenizer, groups = sample(folder, task)
    batch = grpo.collate(with_random_rewards(groups), tokenizer.pad_token_id)
    # Off policy, so that clipping has something to do.
    batch = dataclasses.replace(
        batch, old_logprobs=batch.old_logprobs + torch.linspace(-0.5, 0.5, 7)
    )

    def loss_of(part: grpo.Batch) -> tuple[torch.Tensor, dict[str, float]]:
        return grpo.grpo_loss(grpo.response_logprobs(model, part), part)

    half = len(batch) // 2
    whole, whole_metrics = loss_of(batch)
    parts = [loss_of(batch.rows(0, half)), loss_of(batch.rows(half, len(batch)))]
    torch.testing.assert_close(sum(loss for loss, _ in parts), whole, atol=1e-4, rtol=1e-5)
    assert sum(metrics["tokens"] for _, metrics in parts) == whole_metrics["tokens"]
    assert 0.0 < whole_metrics["clip_fraction"] < 1.0


def test_clipping_stops_the_gradient_only_where_the_step_was_already_taken() -> None:
    group = rollout.Rollout(
        Question("a>", "a", {}), [5], [[6, 6], [6, 6]], [[0.0, 0.0]] * 2, [1.0, 0.0], []
    )
    batch = grpo.collate([group], 0)
    logprobs = torch.tensor([[0.5, -0.5], [0.5, -0.5]], requires_grad=True)
    loss_sum, metrics = grpo.grpo_loss(logprobs, batch, clip=0.2)
    (gradient,) = torch.autograd.grad(loss_sum, logprobs)
    assert (gradient == 0.0).tolist() == [[True, False], [False, True]]
    assert metrics["clip_fraction"] == 0.5


def test_a_ratio_beyond_all_bounds_still_gives_a_finite_loss_and_gradient() -> None:
    group = rollout.Rollout(
        Question("a>", "a", {}), [5], [[6], [6]], [[-200.0]] * 2, [1.0, 0.0], []
    )
    batch = grpo.collate([group], 0)
    logprobs = torch.zeros(2, 1, requires_grad=True)
    loss_sum, _ = grpo.grpo_loss(logprobs, batch)
    (gradient,) = torch.autograd.grad(loss_sum, logprobs)
    assert loss_sum.isfinite()
    assert gradient.isfinite().all()


def test_the_warm_up_lowers_the_loss_and_gives_the_same_weights_for_the_same_seed(
    tmp_path: Path, task: Task
) -> None:
    losses: list[float] = []
    weights = []
    for name in ("one", "two"):
        policy.create_policy(tmp_path / name, seed=2)
        steps, accuracy = warm_up.warm_up(
            tmp_path / name,
            task,
            seed=2,
            max_steps=10,
            report=lambda _step, loss, _accuracy: losses.append(loss),
        )
        assert steps == 10
        assert 0.0 <= accuracy <= 1.0
        weights.append(policy.load_policy(tmp_path / name)[0].state_dict())
    assert losses[1] < losses[0]
    assert losses[:2] == losses[2:]
    assert all(identical(weights[0][key], weights[1][key]) for key in weights[0])
