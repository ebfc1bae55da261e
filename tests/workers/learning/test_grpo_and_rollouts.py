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
from trinity_workers.rewards.base import rewarded  # noqa: E402
from trinity_workers.tasks import Question, SpellBackward, TaskError  # noqa: E402


@pytest.fixture(scope="module")
def task() -> SpellBackward:
    return SpellBackward()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    policy.create_policy(folder, seed=0)
    return folder


def mixed_questions(task: SpellBackward, count: int) -> list[Question]:
    """Questions of both word lengths, so that a batch of them has padding."""
    questions = list(islice(task.training_questions(3), 100))
    short = [question for question in questions if len(question.answer) == 3]
    long = [question for question in questions if len(question.answer) == 4]
    return [short[i // 2] if i % 2 else long[i // 2] for i in range(count)]


def answered(model, tokenizer, task: SpellBackward, questions, **settings):
    """Groups of answers with the task's rewards."""
    groups = rollout.generate(model, tokenizer, questions, **settings)
    return [
        group.judged([rewarded(task.reward(group.question, one)) for one in group.answers])
        for group in groups
    ]


def sample(folder: Path, task: SpellBackward, *, temperature: float = 1.0):
    model, tokenizer = policy.load_policy(folder)
    questions = mixed_questions(task, 8)
    groups = answered(
        model, tokenizer, task, questions, seeds=range(8), samples=4, temperature=temperature
    )
    return model, tokenizer, groups


def with_random_rewards(groups: list[rollout.Rollout]) -> list[rollout.Rollout]:
    """The groups with rewards by lot: a random policy earns none, which would mean no gradient."""
    lot = random.Random(0)
    return [
        dataclasses.replace(group, rewards=[float(lot.random() < 0.5) for _ in group.rewards])
        for group in groups
    ]


def test_the_tokenizer_survives_its_folder_with_one_token_a_character(folder: Path) -> None:
    _, tokenizer = policy.load_policy(folder)
    text = 'Zebra 09>"<q'
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert len(tokens) == len(text)
    assert tokenizer.unk_token_id not in tokens
    assert tokenizer.decode(tokens) == text
    assert tokenizer.padding_side == "left"
    assert len({tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id}) == 3


def test_every_question_and_answer_is_made_of_known_characters(
    folder: Path, task: SpellBackward
) -> None:
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
    folder: Path, task: SpellBackward
) -> None:
    model, tokenizer = policy.load_policy(folder)
    model.train()
    questions = mixed_questions(task, 4)

    def run(*seeds: int) -> list[list[list[int]]]:
        groups = rollout.generate(model, tokenizer, questions, seeds=seeds, samples=3)
        return [group.responses for group in groups]

    before = torch.get_rng_state()
    first = run(7, 8, 9, 10)
    assert identical(torch.get_rng_state(), before)
    torch.rand(5)
    assert run(7, 8, 9, 10) == first
    other = run(7, 8, 9, 11)
    assert other[:3] == first[:3]
    assert other[3] != first[3]
    assert model.training


def test_a_questions_answers_do_not_depend_on_what_else_is_in_the_batch(
    folder: Path, task: SpellBackward
) -> None:
    model, tokenizer = policy.load_policy(folder)
    questions = [task.question(ordinal) for ordinal in range(6)]
    seeds = [rollout.seed_of(0, ordinal) for ordinal in range(6)]

    def run(*chosen: int) -> list[list[list[int]]]:
        groups = rollout.generate(
            model,
            tokenizer,
            [questions[index] for index in chosen],
            seeds=[seeds[index] for index in chosen],
            samples=4,
        )
        return [group.responses for group in groups]

    together = run(0, 1, 2, 3, 4, 5)
    assert run(0, 2, 4) + run(1, 3, 5) == [together[index] for index in (0, 2, 4, 1, 3, 5)]


def test_sampled_tokens_have_the_frequencies_of_the_policy(
    folder: Path, task: SpellBackward
) -> None:
    model, tokenizer = policy.load_policy(folder)
    question = task.question(0)
    (group,) = rollout.generate(
        model, tokenizer, [question], seeds=[3], samples=4_000, max_new_tokens=1, temperature=0.5
    )
    tokens = torch.tensor(tokenizer.encode(question.prompt))[None]
    with torch.no_grad():
        probabilities = (model(tokens).logits[0, -1] / 0.5).softmax(-1)
    found = torch.bincount(
        torch.tensor([one[0] for one in group.responses]), minlength=len(probabilities)
    )
    torch.testing.assert_close(found / 4_000, probabilities, atol=0.03, rtol=0.0)
    assert (found > 0).sum() > 20


def test_the_models_own_generation_defaults_do_not_bend_the_samples(
    folder: Path, task: SpellBackward
) -> None:
    model, tokenizer = policy.load_policy(folder)
    questions = mixed_questions(task, 4)

    def run() -> list[list[list[int]]]:
        groups = rollout.generate(model, tokenizer, questions, seeds=range(4), samples=4)
        return [group.responses for group in groups]

    first = run()
    model.generation_config.repetition_penalty = 5.0
    model.generation_config.no_repeat_ngram_size = 1
    model.generation_config.suppress_tokens = list(range(3, 60))
    kept = model.generation_config
    assert run() == first
    assert model.generation_config is kept


def test_every_end_of_the_models_defaults_ends_an_answer(
    folder: Path,
    task: SpellBackward,
) -> None:
    model, tokenizer = policy.load_policy(folder)
    more = tokenizer.encode("abcdefghijklmnopqrstuvwxyz")
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, *more]
    (group,) = rollout.generate(model, tokenizer, [task.question(0)], seeds=[1], samples=64)
    ends = {*more, tokenizer.eos_token_id}
    for response, answer in zip(group.responses, group.answers, strict=True):
        assert not ends & set(response[:-1])
        assert answer.finished == (response[-1] in ends)
    assert any(response[-1] in more for response in group.responses)


def test_a_prompt_that_leaves_no_room_for_an_answer_is_refused(folder: Path) -> None:
    model, tokenizer = policy.load_policy(folder)
    with pytest.raises(TaskError, match=r"a prompt has 125 tokens, .* the model takes 128 in all"):
        rollout.generate(model, tokenizer, [Question(prompt="a" * 125)], seeds=[0], samples=1)


def test_chat_messages_need_a_chat_template(folder: Path) -> None:
    _, tokenizer = policy.load_policy(folder)
    with pytest.raises(policy.BadPolicy, match="has no chat template"):
        policy.encode_prompt(tokenizer, [{"role": "user", "content": "hi"}])


def test_responses_hold_the_end_of_sequence_once_and_last(
    folder: Path, task: SpellBackward
) -> None:
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


def test_a_sampled_padding_token_spoils_an_answer(
    folder: Path,
    task: SpellBackward,
) -> None:
    model, tokenizer = policy.load_policy(folder)
    pad, eos = tokenizer.pad_token_id, tokenizer.eos_token_id
    question = Question(prompt="sun>", answer="nus")
    nus = tokenizer.encode("nus")

    def answer_with(tokens: list[int]) -> rollout.Rollout:
        def forced(*_):
            step = forced.step = getattr(forced, "step", -1) + 1
            scores = torch.full((1, len(tokenizer)), -1e9)
            scores[0, tokens[step]] = 0.0
            return scores

        with pytest.MonkeyPatch.context() as patch:
            chosen = rollout.SeededChoice.__call__
            patch.setattr(
                rollout.SeededChoice, "__call__", lambda self, ids, _: chosen(self, ids, forced())
            )
            return answered(model, tokenizer, task, [question], seeds=[0], samples=1)[0]

    right = answer_with([*nus, eos, pad, pad, pad])
    assert (right.responses, right.rewards) == ([[*nus, eos]], [1.0])
    spoilt = answer_with([nus[0], pad, *nus[1:], eos, pad, pad])
    assert (spoilt.responses, spoilt.rewards) == ([[nus[0], pad, *nus[1:], eos]], [0.0])
    endless = answer_with([*nus, pad, pad, pad, pad])
    assert (len(endless.responses[0]), endless.rewards) == (7, [0.0])


def test_response_logprobs_agree_with_those_that_the_rollout_recorded(
    folder: Path, task: SpellBackward
) -> None:
    for temperature in (1.0, 0.7):
        model, tokenizer, groups = sample(folder, task, temperature=temperature)
        batch = grpo.collate(groups, tokenizer.pad_token_id)
        assert (batch.attention_mask[:, 0] == 0).any(), "the batch should have left padding"
        logprobs = grpo.response_logprobs(model, batch, temperature)
        assert logprobs.shape == batch.old_logprobs.shape == batch.response_mask.shape
        torch.testing.assert_close(logprobs, batch.old_logprobs, atol=1e-4, rtol=0.0)


def test_an_answer_does_not_depend_on_the_padding_that_its_batch_gives_it(
    folder: Path, task: SpellBackward
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
        Question(prompt="ab>", answer="ba"),
        [5, 6],
        [[pad, 7], [8]],
        [[-1.0, -2.0], [-3.0]],
        [1.0, 0.0],
        [],
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
    group = rollout.Rollout(Question(prompt="a>", answer="a"), [5], [[6, 7]], [[-1.0]], [1.0], [])
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


def test_the_gradient_at_ratio_one_is_the_policy_gradient(
    folder: Path, task: SpellBackward
) -> None:
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


def test_the_loss_sum_of_two_half_batches_is_that_of_the_whole(
    folder: Path, task: SpellBackward
) -> None:
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
        Question(prompt="a>", answer="a"), [5], [[6, 6], [6, 6]], [[0.0, 0.0]] * 2, [1.0, 0.0], []
    )
    batch = grpo.collate([group], 0)
    logprobs = torch.tensor([[0.5, -0.5], [0.5, -0.5]], requires_grad=True)
    loss_sum, metrics = grpo.grpo_loss(logprobs, batch, clip=0.2)
    (gradient,) = torch.autograd.grad(loss_sum, logprobs)
    assert (gradient == 0.0).tolist() == [[True, False], [False, True]]
    assert metrics["clip_fraction"] == 0.5


def test_a_ratio_beyond_all_bounds_still_gives_a_finite_loss_and_gradient() -> None:
    group = rollout.Rollout(
        Question(prompt="a>", answer="a"), [5], [[6], [6]], [[-200.0]] * 2, [1.0, 0.0], []
    )
    batch = grpo.collate([group], 0)
    logprobs = torch.zeros(2, 1, requires_grad=True)
    loss_sum, _ = grpo.grpo_loss(logprobs, batch)
    (gradient,) = torch.autograd.grad(loss_sum, logprobs)
    assert loss_sum.isfinite()
    assert gradient.isfinite().all()


def test_the_warm_up_lowers_the_loss_and_gives_the_same_weights_for_the_same_seed(
    tmp_path: Path, task: SpellBackward
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
