"""Each sync style leaves a log with a property that every other style violates."""

import copy
import time
from functools import partial
from typing import ClassVar

import anyio
import msgspec
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("reasoning_gym")

from transformers import Qwen2ForCausalLM  # noqa: E402

from tests.support.local_training import LocalEngine  # noqa: E402
from tests.support.pipeline import events_of, reducer_task, reports_accepted, until  # noqa: E402
from tests.support.rollout_engines import logprobs_of  # noqa: E402
from tests.support.style_properties import PROPERTIES, reissued, stalest  # noqa: E402
from tests.support.waits import PATIENCE  # noqa: E402
from tests.support.whole_logs import in_order  # noqa: E402
from trinity_events.log import Stream, open_run  # noqa: E402
from trinity_events.system.error_text import ungrouped  # noqa: E402
from trinity_schemas import (  # noqa: E402
    Experience,
    RunResumed,
    StepRef,
    StepTrained,
    WeightsApplied,
)
from trinity_workers.explorer.explorer import Explorer  # noqa: E402
from trinity_workers.trainer import Trainer  # noqa: E402

STEPS, PROMPTS = 6, 4


pytestmark = pytest.mark.usefixtures("torch_threads")


async def whole_log(log):
    """Return the run's events and announcements as one log, in the order of their ids."""
    streams = (Stream.ANNOUNCEMENTS, Stream.EVENTS)
    return in_order(*[await log.read(stream=stream, limit=100_000) for stream in streams])


async def run(config, log, engine=LocalEngine):
    """Train with two explorers, and one that joins after two steps; return their results."""
    trainer, results = Trainer(config, engine(config)), {}

    async def train():
        await trainer.prepare()
        results["trainer"] = await trainer.train()
        await trainer.shutdown()

    async def explore(rank):
        explorer = Explorer(config, rank)
        await explorer.prepare()
        results[rank] = await explorer.explore()

    with ungrouped(), anyio.fail_after(2 * PATIENCE):
        async with anyio.create_task_group() as tasks:
            for task in (train, partial(explore, 0), partial(explore, 1)):
                tasks.start_soon(task)
            await until(lambda: trained(log, config.epoch, 2))
            tasks.start_soon(explore, 2)
    return results


async def trained(log, epoch, steps):
    entries = [entry for entry in await events_of(log, StepTrained) if entry.epoch == epoch]
    return len(entries) >= steps


def small(make_config, **settings):
    """Return the configuration of a run that takes seconds."""
    return make_config(
        rollouts={"prompts_per_step": PROMPTS, "samples_per_prompt": 2, "claim_lease": PATIENCE},
        explorer={"groups_per_claim": 1},
        evaluation={"sets": {}},
        **settings,
    )


@pytest.mark.parametrize(
    ("style", "sync"),
    [
        ("fixed", {"interval": 2, "offset": 1}),
        ("trainer_driven", {}),
        ("explorer_driven", {"max_staleness": 2}),
        ("explorer_driven", {"interval": 3, "max_staleness": 2}),
        ("fully_async", {"max_staleness": 2}),
    ],
)
async def test_a_run_of_a_style_has_its_property_and_no_other(
    make_config, redis_url, run_id, log, style, sync
):
    sync = {"style": style, "timeout": PATIENCE, **sync}
    config = small(make_config, steps=STEPS, checkpoints={"interval": 0}, sync=sync)
    async with reducer_task(redis_url, run_id):
        results = await run(config, log)
        await reports_accepted(log)
    entries = await whole_log(log)
    assert {name for name, holds in PROPERTIES.items() if holds(entries)} == {style}
    assert stalest(entries) <= config.staleness_bound
    assert "stale" not in reissued(entries), "the default paces, and generates nothing in vain"
    assert results["trainer"].steps == STEPS
    explorers = [results[rank] for rank in range(3)]
    assert sum(explorer.groups for explorer in explorers) >= STEPS * PROMPTS
    served = {
        entry.producer.rank: entry.event.version for entry in await events_of(log, WeightsApplied)
    }
    assert {version.step for version in served.values()} == {STEPS}
    assert sorted(served) == [0, 1, 2], "the one that joined late ends with the last version too"


@pytest.mark.parametrize("style", ["fixed", "explorer_driven", "fully_async"])
async def test_a_run_that_resumes_between_two_synchronisations_keeps_to_its_style(
    make_config, client, redis_url, run_id, log, style
):
    offset = {"offset": 1} if style == "fixed" else {}
    sync = {"style": style, "interval": 2, "timeout": PATIENCE, **offset}
    first = small(make_config, steps=3, checkpoints={"interval": 3}, sync=sync)
    async with reducer_task(redis_url, run_id):
        await run(first, log)
        epoch = await open_run(client, run_id, resume_from=StepRef(first.epoch, 3))
        config = msgspec.structs.replace(first, steps=8, epoch=epoch, resumed_step=3)
        config = config.replaced("checkpoints", interval=0)
        await run(config, log)
    whole = await whole_log(log)
    [began] = [at for at, entry in enumerate(whole) if isinstance(entry.event, RunResumed)]
    entries = whole[began:]  # Explorers are of no epoch.
    trained = [entry.event.step for entry in entries if isinstance(entry.event, StepTrained)]
    assert trained == [4, 5, 6, 7, 8]
    assert PROPERTIES[style](entries)
    assert stalest(entries) <= config.staleness_bound


class Recording(LocalEngine):
    """Engine that keeps the samples that it is trained on, and the policy of each version."""

    samples: ClassVar[list[Experience]] = []
    policies: ClassVar[dict[int, torch.nn.Module]] = {}

    async def train_step(self, batch_exps):
        self.samples.extend(sample for group in batch_exps for sample in group)
        return await super().train_step(batch_exps)

    def _publish(self):
        self.policies[self.train_step_num] = copy.deepcopy(self._model)
        super()._publish()


async def test_answers_that_mix_versions_are_trained_with_the_version_of_each_token(
    make_config, redis_url, run_id, log, monkeypatch
):
    monkeypatch.setattr(Recording, "samples", [])
    monkeypatch.setattr(Recording, "policies", {})
    # A forward pass takes so long that versions come amid answers.
    forward = Qwen2ForCausalLM.forward

    def slow(self, *args, **keywords):
        time.sleep(0.005)
        return forward(self, *args, **keywords)

    monkeypatch.setattr(Qwen2ForCausalLM, "forward", slow)
    sync = {"style": "fully_async", "max_staleness": 2, "timeout": PATIENCE}
    config = small(make_config, steps=STEPS, checkpoints={"interval": 0}, sync=sync)
    config = config.replaced("rollouts", pause_mode="retract", max_new_tokens=16)
    async with reducer_task(redis_url, run_id):
        await run(config, log, Recording)
    mixed = [sample for sample in Recording.samples if len(sample.turns[1].versions) > 1]
    assert mixed, "a version came amid an answer"
    others = 0
    for sample in mixed:
        prompt, answer = sample.turns
        by_version = {
            version: logprobs_of(Recording.policies[version.step], prompt, answer.tokens)
            for version, _ in answer.versions
        }
        begin = 0
        for version, count in answer.versions:
            of_version = slice(begin, begin + count)
            expected = by_version[version][of_version]
            assert answer.logprobs[of_version] == pytest.approx(expected, abs=1e-4)
            oldest = by_version[sample.oldest_version][of_version]
            others += expected != pytest.approx(oldest, abs=1e-3)
            begin += count
    assert others, "the versions of one answer differ in their probabilities"
    bounds = [entry.event.staleness for entry in await events_of(log, StepTrained)]
    assert max(steps for bound in bounds for steps in bound) <= config.staleness_bound
