"""Versions of adapters alone: from two FSDP ranks, through a real server, into rollout engines."""

from __future__ import annotations

import logging
import re
from contextlib import closing

import pytest

from tests.support.errors import raises
from trinity_workers.rollout_engines.base import AdaptersNotSupported

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("peft")

from tests.support.experiences import make_groups  # noqa: E402
from tests.support.fsdp_runs import ready  # noqa: E402
from tests.support.rollout_engines import in_thread, requests_for  # noqa: E402
from tests.support.tensors import identical  # noqa: E402
from trinity_events import Synchronizer  # noqa: E402
from trinity_events.weights.errors import AbsentTensor  # noqa: E402
from trinity_schemas import StepRef  # noqa: E402
from trinity_workers.algorithms.collate import collate  # noqa: E402
from trinity_workers.engines.fsdp import FSDPEngine  # noqa: E402
from trinity_workers.helpers import fsdp_upload_state_dict, strategy_for  # noqa: E402
from trinity_workers.learning.adapters import policy_loader  # noqa: E402
from trinity_workers.learning.logprobs import response_logprobs  # noqa: E402
from trinity_workers.learning.lora_settings import LoraConfig  # noqa: E402
from trinity_workers.learning.policy import load_policy  # noqa: E402
from trinity_workers.rollout_engines import (  # noqa: E402
    EngineOptions,
    load_engine,
)

LORA = LoraConfig(rank=4, target_modules=("q_proj", "down_proj"))
DTYPE = "bfloat16"
WHOLE = ("full", "shards")
logger = logging.getLogger(__name__)


def batch():
    return collate(make_groups("r", 5), 0)


def begin(rank, where):
    rank.objects.engine = FSDPEngine(
        where.model_folder,
        device=torch.device("cpu"),
        learning_rate=0.05,
        dtype=DTYPE,
        load=policy_loader(LORA, 1),
    )
    rank.objects.synchronizer = Synchronizer(
        where.run_id,
        where.epoch,
        redis_url=where.redis_url,
        weights_url=where.weights_url,
        role="actor",
        rank=rank.number,
    )
    rank.exits.callback(rank.objects.synchronizer.close)


def train_and_publish(rank, step, form):
    """Take a step, publish its version, and return log-probabilities and the tensors' names."""
    engine = rank.objects.engine
    share = collate(make_groups("r", step)[rank.number :: rank.world], 0)
    engine.optimizer_step(-response_logprobs(engine.module, share).mean())
    strategy = strategy_for(form, 60)
    fsdp_upload_state_dict(engine, rank.objects.synchronizer, step, logger, strategy=strategy)
    strategy.close()
    with torch.no_grad():
        logprobs = response_logprobs(engine.module, batch())
    return logprobs, {name: tuple(tensor.shape) for name, tensor in engine.get_per_tensor_param()}


def logprobs_of(engine):
    with torch.no_grad():
        return response_logprobs(engine._model, batch())


async def test_explorers_apply_adapters_to_their_own_base_and_compute_as_the_trainer_does(
    rank_group, where, log, committer
):
    ranks = rank_group(2)
    await in_thread(ranks, begin, where)
    announced, trained = {}, {}
    for step, form in ((1, "full"), (2, "shards"), (3, "snapshot")):
        trained[step], names = (await in_thread(ranks, train_and_publish, step, form))[0]
        committer.commit(step)
        announced[step] = await ready(log, "weights", step)
        assert len(announced[step].parts) == (1 if form == "full" else 2)
    values = sum(rows * columns for rows, columns in names.values())
    assert len(names) == 2 * 2 * 2
    for version in announced.values():
        assert sum(part.bytes for part in version.parts) == 2 * values, "adapters in bfloat16"
    with closing(committer.bind("explorer", 0)) as explorer:
        with explorer.pull(announced[3]) as pulled:
            assert {
                entry.name for manifest, _ in pulled.parts for entry in manifest.tensors
            } == set(names)
        options = EngineOptions(
            model_folder=where.model_folder, dtype=DTYPE, synchronizer=explorer, lora=LORA
        )
        engine = await in_thread(load_engine, "huggingface", options)
        # A late joiner, a version in its place, and an evaluation of an earlier one.
        for step in (2, 3, 1):
            await engine.install(announced[step])
            assert engine.serves == StepRef(where.epoch, step)
            assert identical(logprobs_of(engine), trained[step])
        [answer] = await engine.generate(requests_for([0], samples=1))
        assert {version.step for version, _ in answer.versions} == {1}
        proof = await engine.prove()
        await engine.install(announced[2])
        assert await engine.prove() != proof
        # Into the very module, as chunks come.
        assert len(list((await engine.release()).parameters())) == len(names)
        await engine.install(announced[3])
        assert identical(logprobs_of(engine), trained[3])
        plain, _ = load_policy(where.model_folder, DTYPE)
        with raises(AbsentTensor, fault="model", tensor=re.compile("^base_model")):
            await in_thread(explorer.apply, plain, announced[3])


def test_an_engine_that_applies_no_adapters_is_refused(tmp_path):
    (tmp_path / "mine.py").write_text("def make(options):\n    return None\n")
    options = EngineOptions(model_folder=tmp_path, lora=LORA)
    with raises(AdaptersNotSupported, engine=re.compile(r"mine\.py:make$")):
        load_engine("./mine.py:make", options, folder=tmp_path)
