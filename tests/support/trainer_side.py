"""The trainer's side of a run whose explorers are tested, and explorers at work."""

from __future__ import annotations

from contextlib import asynccontextmanager, closing
from types import SimpleNamespace

import anyio
import anyio.to_thread
import msgspec
import torch

from tests.support.pipeline import events_of
from tests.support.weight_versions import publish, ready
from trinity_events import Synchronizer
from trinity_events.rollouts import RolloutDispatcher
from trinity_events.system.error_text import ungrouped
from trinity_schemas import StepRef, WeightsApplied
from trinity_workers.config.answer_limits import read_answer_limits
from trinity_workers.learning.policy import load_policy
from trinity_workers.rollouts.user_task import task_of
from trinity_workers.trainer.trainer import dispatch_settings


class TrainerSide:
    """Weight versions and requests of a run, as its trainer publishes and dispatches them."""

    def __init__(self, client, publisher, log, config) -> None:
        self.client, self.publisher, self.log, self.config = client, publisher, log, config

    async def publish(self, step: int) -> None:
        """Publish the weights of a step, and wait for their announcement."""
        config = self.config
        model, _ = load_policy(config.model_folder)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.01 * step)
        urls = {"redis_url": config.redis_url, "weights_url": config.weights_url}
        with closing(Synchronizer(config.run_id, config.epoch, **urls)) as synchronizer:
            tensors = dict(model.named_parameters())
            await anyio.to_thread.run_sync(publish, synchronizer, tensors, step)
        await ready(self.log, step)

    async def dispatcher(self, **changes) -> RolloutDispatcher:
        fingerprint = task_of(self.config).fingerprint
        defaults = dispatch_settings(self.config, fingerprint, read_answer_limits(self.config))
        settings = msgspec.structs.replace(defaults, **changes)
        made = RolloutDispatcher(self.client, self.publisher, settings)
        await made.start()
        return made

    def version(self, step: int) -> StepRef:
        return StepRef(self.config.epoch, step)

    async def served(self, step: int) -> bool:
        """Return True if an explorer has said that it serves the version of a step."""
        applied = [entry.event.version for entry in await events_of(self.log, WeightsApplied)]
        return self.version(step) in applied


@asynccontextmanager
async def exploring(*explorers):
    """Explorers at work; after the block their results, once all of them have ended."""
    outcome = SimpleNamespace(results=[None] * len(explorers))

    async def explore(place, explorer):
        await explorer.prepare()
        outcome.results[place] = await explorer.explore()

    with ungrouped():
        async with anyio.create_task_group() as tasks:
            for place, explorer in enumerate(explorers):
                tasks.start_soon(explore, place, explorer)
            yield outcome
