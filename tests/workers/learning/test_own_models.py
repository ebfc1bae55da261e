"""Claims about a user's own model: several architectures generate, train, publish and apply."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import anyio.to_thread
import pytest

from tests.support.errors import raises
from trinity_workers.learning.pretrained import NoModel, PolicyUnreadable, TokenizerRefused

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.support.experiences import FIRST  # noqa: E402
from tests.support.fsdp_runs import Where, ready  # noqa: E402
from tests.support.own_models import MODELS, own_model  # noqa: E402
from tests.support.rank_processes import Rank  # noqa: E402
from tests.support.tensors import identical  # noqa: E402
from trinity_events import Synchronizer  # noqa: E402
from trinity_schemas import Experience, RolloutRequest, Sampling  # noqa: E402
from trinity_workers.algorithms.collate import collate  # noqa: E402
from trinity_workers.algorithms.prepare import prepare  # noqa: E402
from trinity_workers.algorithms.settings import AlgorithmConfig  # noqa: E402
from trinity_workers.algorithms.update import policy_update  # noqa: E402
from trinity_workers.engines.fsdp import FSDPEngine  # noqa: E402
from trinity_workers.helpers import PublishShards, fsdp_upload_state_dict  # noqa: E402
from trinity_workers.learning.logprobs import response_logprobs  # noqa: E402
from trinity_workers.learning.policy import BadPolicy, load_policy  # noqa: E402
from trinity_workers.rewards import Rewarded  # noqa: E402
from trinity_workers.rollout_engines.huggingface import HuggingFaceEngine  # noqa: E402
from trinity_workers.rollouts.episodes import Episodes  # noqa: E402
from trinity_workers.tasks import Question, QuestionSet  # noqa: E402

QUESTIONS = [
    Question(prompt="2 + 2 =", answer="4"),
    Question(prompt=[{"role": "user", "content": "What is 12 + 13?"}], answer="25"),
]


@pytest.fixture(params=MODELS)
def folder(request, tmp_path: Path) -> Path:
    return own_model(tmp_path / request.param, request.param)


class Alternating:
    """Rewards that teach: those of a random model would all be zero."""

    def __init__(self):
        self.judged = []

    async def judge(self, question, answers):
        self.judged += answers
        return [Rewarded(reward=float(index % 2)) for index in range(len(answers))]


async def sampled(model, tokenizer, judge=None) -> list[list[Experience]]:
    """Answers of a model to all questions, one group each."""
    task = QuestionSet("mine", QUESTIONS, shuffle=False, evaluation=[])
    episodes = Episodes(
        engine=HuggingFaceEngine(model, tokenizer, serves=FIRST),
        tokenizer=tokenizer,
        task=task,
        judge=judge or Alternating(),
        explorer="explorer-0",
    )
    requests = [
        RolloutRequest(
            run_id="r",
            epoch=FIRST.epoch,
            ordinal=ordinal,
            attempt=1,
            samples=4,
            sampling=Sampling(max_new_tokens=12),
            oldest=FIRST,
            fingerprint=task.fingerprint,
            deadline=60.0,
        )
        for ordinal in range(len(QUESTIONS))
    ]
    return await episodes.answer_all(requests)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_a_model_answers_questions_of_text_and_of_chat_messages(folder, dtype):
    model, tokenizer = load_policy(folder, dtype)
    assert model.dtype == getattr(torch, dtype)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    judge = Alternating()
    groups = await sampled(model, tokenizer, judge)
    prompts = [tokenizer.decode(group[0].turns[0].tokens) for group in groups]
    assert prompts == ["2 + 2 =", "<|start|>user\nWhat is 12 + 13?<|end|><|start|>assistant\n"]
    assert len(judge.judged) == 8
    for answer in judge.judged:
        assert [message["role"] for message in answer.messages] == ["user", "assistant"]
    batch = collate(groups, tokenizer.pad_token_id)
    with torch.no_grad():
        logprobs = response_logprobs(model, batch)
    near = 1e-4 if dtype == "float32" else 0.1
    torch.testing.assert_close(logprobs, batch.behaviour_logprobs, atol=near, rtol=0.0)


@pytest.fixture
def where(publisher, redis_url, weights_url, run_id, folder, tmp_path) -> Where:
    return Where(
        run_id=run_id,
        epoch=publisher.epoch,
        redis_url=redis_url,
        weights_url=weights_url,
        model_folder=folder,
        run_folder=tmp_path / run_id,
    )


def train_and_publish(
    rank: Rank, where: Where, groups: list[list[Experience]], shards: bool
) -> dict[str, torch.Tensor]:
    """One GRPO step on the rank's group, published; returns the full weights after it."""
    engine = FSDPEngine(where.model_folder, device=torch.device("cpu"), learning_rate=1e-2)
    engine.module.train()
    batch = collate([groups[rank.number]], engine.tokenizer.pad_token_id)
    batch, _ = prepare(batch, AlgorithmConfig())
    update = policy_update(batch, response_logprobs(engine.module, batch), AlgorithmConfig())
    engine.optimizer_step(update.loss(update.denominator))
    synchronizer = Synchronizer(
        where.run_id,
        where.epoch,
        role="actor",
        rank=rank.number,
        redis_url=where.redis_url,
        weights_url=where.weights_url,
    )
    rank.exits.callback(synchronizer.close)
    strategy = {"strategy": PublishShards()} if shards else {}
    fsdp_upload_state_dict(engine, synchronizer, 1, logging.getLogger(__name__), **strategy)
    return {name: value.clone() for name, value in engine.get_per_tensor_param()}


@pytest.mark.parametrize("shards", [True, False], ids=["shards", "full"])
async def test_a_model_takes_a_step_and_is_served_bit_for_bit(
    where, log, committer, rank_group, shards
):
    model, tokenizer = load_policy(where.model_folder)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    groups = await sampled(model, tokenizer)
    trained, _ = await anyio.to_thread.run_sync(
        rank_group(2), train_and_publish, where, groups, shards
    )
    committer.commit(1)
    event = await ready(log, "weights", 1)
    explorer = Synchronizer(
        where.run_id, 0, redis_url=where.redis_url, weights_url=where.weights_url, role="explorer"
    )
    await anyio.to_thread.run_sync(explorer.apply, model, event)
    explorer.close()
    served = dict(model.named_parameters())
    assert served.keys() == trained.keys()
    assert all(identical(served[name].detach(), trained[name]) for name in served)
    changed = [name for name in served if not identical(served[name].detach(), before[name])]
    assert len(changed) > len(served) / 2
    assert len(await sampled(model, tokenizer)) == len(QUESTIONS)


# --- folders that hold no policy --------------------------------------------------------------


def assert_refused(folder: Path, error: type[BadPolicy], /, **attributes: object) -> None:
    with raises(error, **attributes) as caught:
        load_policy(folder)
    assert "\n" not in str(caught.value)


def test_a_folder_that_holds_no_model_is_told_in_one_sentence(tmp_path):
    folder = own_model(tmp_path / "model", "qwen2")
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())

    def without_end() -> None:
        settings = {key: value for key, value in tokenizer.items() if key != "eos_token"}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))

    without_end()
    assert_refused(folder, TokenizerRefused, folder=folder, fault="end")
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:100])
    assert_refused(folder, PolicyUnreadable, what=f"the model in {folder} cannot be loaded")
    (folder / "model.safetensors").unlink()
    assert_refused(folder, PolicyUnreadable, what=f"the model in {folder} cannot be loaded")
    (folder / "config.json").write_text('{"model_type": "no-such-model"}')
    assert_refused(folder, PolicyUnreadable, what=re.compile("cannot be loaded$"))
    (folder / "config.json").unlink()
    assert_refused(folder, NoModel, model="policy", folder=folder, setting="model.path")
