"""Scores of a reward model: transformers' own, on FSDP and on Megatron, in its own tokens."""

from __future__ import annotations

import pytest

from tests.support.errors import raises
from trinity_workers.learning.pretrained import HeadRefused, NoModel

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import AutoModelForSequenceClassification, Qwen2Config  # noqa: E402

from tests.support import megatron_ranks as at  # noqa: E402
from tests.support.experiences import group  # noqa: E402
from tests.support.reward_models import make_reward_folder  # noqa: E402
from trinity_schemas import Turn  # noqa: E402
from trinity_workers.algorithms.collate import collate  # noqa: E402
from trinity_workers.algorithms.rules import read_settings  # noqa: E402
from trinity_workers.engines.fsdp import frozen_policy  # noqa: E402
from trinity_workers.engines.megatron import MegatronRewardModel, ParallelLayout  # noqa: E402
from trinity_workers.learning.finite import NonFiniteWeights  # noqa: E402
from trinity_workers.learning.policy import (  # noqa: E402
    encode_prompt,
    load_tokenizer,
)
from trinity_workers.learning.reward_model import (  # noqa: E402
    RewardModel,
    RewardTokens,
    load_reward_model,
    reward_tokenizer,
)
from trinity_workers.tasks import Question  # noqa: E402
from trinity_workers.trainer.step.base import Models  # noqa: E402
from trinity_workers.trainer.step.division import MicroBatchLimit  # noqa: E402
from trinity_workers.trainer.step.fsdp import FSDPTrainingStep  # noqa: E402
from trinity_workers.trainer.step.megatron import MegatronTrainingStep  # noqa: E402

CPU = torch.device("cpu")
BOTH = ParallelLayout(tensor=2, pipeline=2)
EPISODES = [("abc>", ["cba", "c"]), ("tab>", ["bat", "batbat"]), ("d>", ["d", ""])]


@pytest.fixture(scope="module", params=["text", "chat"])
def reward_folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return make_reward_folder(folder, template=request.param == "chat")


def episodes(policy_folder):
    """The episodes in the policy's tokens, each of which ends with its end of sequence."""
    tokenizer = load_tokenizer(policy_folder)
    groups = []
    for prompt, answers in EPISODES:
        tokens = [[*tokenizer.encode(answer), tokenizer.eos_token_id] for answer in answers]
        logprobs = [[-1.0] * len(row) for row in tokens]
        groups.append(group(tokenizer.encode(prompt), tokens, logprobs, [0.0, 1.0]))
    return collate(groups, tokenizer.pad_token_id)


def expected_scores(folder) -> torch.Tensor:
    """The scores of transformers' model, each text by itself."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = load_tokenizer(folder)
    scores = []
    for prompt, answers in EPISODES:
        for answer in answers:
            text = f"u{prompt}a{answer}" if tokenizer.chat_template else prompt + answer
            tokens = torch.tensor([tokenizer.encode(text)])
            with torch.no_grad():
                scores.append(model(tokens).logits[0, 0])
    return torch.stack(scores)


def on_megatron(rank, policy_folder, folder, layout):
    rank.exits.callback(at.drop_engine, rank)
    model = MegatronRewardModel(folder, device=CPU, layout=layout)
    return scores(MegatronTrainingStep, model, policy_folder, folder, limit=MicroBatchLimit(rows=2))


def on_fsdp(rank, policy_folder, folder):
    model = frozen_policy(folder, device=CPU, load=load_reward_model)
    return scores(FSDPTrainingStep, model, policy_folder, folder, limit=MicroBatchLimit(rows=4))


def scores(kind, model, policy_folder, folder, limit):
    tokens = RewardTokens(load_tokenizer(policy_folder), reward_tokenizer(folder))
    step = kind(
        Models(None, reward_model=RewardModel(model, tokens)),
        read_settings({}),
        limit=limit,
        reward_weight=0.5,
    )
    batch = episodes(policy_folder)
    scored, means = step._with_scores(batch, step._division(batch))
    return scored.rewards, means.values()


@pytest.mark.megatron
@pytest.mark.parametrize(("world", "layout"), [(2, None), (4, BOTH)], ids=["FSDP", "TP 2 x PP 2"])
def test_scores_are_those_of_transformers_for_the_models_own_tokens(
    rank_group, policy_folder, reward_folder, world, layout
):
    expected = expected_scores(reward_folder)
    assert expected.std() > 0.01
    ranks = rank_group(world)
    if layout is None:
        results = ranks(on_fsdp, policy_folder, reward_folder)
    else:
        results = ranks(on_megatron, policy_folder, reward_folder, layout)
    for rewards, metrics in results:
        own = episodes(policy_folder).rewards
        torch.testing.assert_close(rewards, own + 0.5 * expected, atol=1e-5, rtol=0)
        assert metrics == pytest.approx({"reward_model/score": float(expected.mean())}, abs=1e-5)


@pytest.mark.heavy
@pytest.mark.megatron
def test_a_chat_goes_through_the_reward_models_own_template(policy_folder, tmp_path):
    policy = load_tokenizer(policy_folder)
    policy.chat_template = "{% for one in messages %}{{ one['content'] }}>{% endfor %}"
    own = load_tokenizer(make_reward_folder(tmp_path, template=True))
    messages = [{"role": "system", "content": "cab"}, {"role": "user", "content": "tab"}]
    questions = {0: Question(prompt=messages), 1: Question(prompt="tab>"), 2: Question(prompt="d>")}
    prompts = [encode_prompt(policy, question.prompt) for question in questions.values()]
    answer = [*policy.encode("bat"), policy.eos_token_id]
    rows = [
        group(prompt, [answer], [[-1.0] * 4], [0.0], ordinal=i) for i, prompt in enumerate(prompts)
    ]
    own_prompt = Turn(role="prompt", tokens=policy.encode("b>"))  # of an own loop, not the task's
    rows[2][0].turns[0] = own_prompt
    batch = collate(rows, policy.pad_token_id)
    inputs = RewardTokens(policy, own, questions.__getitem__).inputs(batch)
    texts = ["scabutababat", "utab>abat", "ub>abat"]  # the template puts a role's letter first
    for row, text in enumerate(texts):
        real = inputs.attention_mask[row].bool()
        assert inputs.input_ids[row][real].tolist() == own.encode(text)


def test_episodes_of_the_same_tokens_stay_as_they_are(policy_folder):
    tokenizer = load_tokenizer(policy_folder)
    batch = episodes(policy_folder)
    inputs = RewardTokens(tokenizer, tokenizer).inputs(batch)
    for row in range(len(batch)):
        real = [
            ids[row][mask[row].bool()].tolist()
            for ids, mask in (
                (batch.input_ids, batch.attention_mask),
                (inputs.input_ids, inputs.attention_mask),
            )
        ]
        assert real[0] == real[1]


def test_what_is_no_reward_model_is_one_sentence(policy_folder, tmp_path):
    with raises(NoModel, model="reward model", setting="rewards.reward_model"):
        reward_tokenizer(tmp_path)
    with raises(HeadRefused, folder=policy_folder, fault="none"):
        reward_tokenizer(policy_folder)
    load_tokenizer(policy_folder).save_pretrained(tmp_path)
    Qwen2Config(num_labels=3, architectures=["Qwen2ForSequenceClassification"]).save_pretrained(
        tmp_path
    )
    with raises(HeadRefused, folder=tmp_path, fault="outputs", outputs=3):
        reward_tokenizer(tmp_path)


@pytest.mark.heavy
@pytest.mark.megatron
def test_a_reward_model_with_a_weight_that_is_not_finite_is_not_loaded(tmp_path):
    folder = make_reward_folder(tmp_path)
    [file] = folder.glob("*.safetensors")
    tensors = load_file(file)
    tensors["score.weight"][0, 0] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(NonFiniteWeights) as raised:
        load_reward_model(folder)
    assert raised.value.tensor == "score.weight"
