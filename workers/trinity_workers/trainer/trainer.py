"""The training loop."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, nullcontext
from typing import Any

from msgspec import Struct

from trinity_events.coordinator import this_process
from trinity_events.log import AsyncPublisher, RedisEventLog, new_producer
from trinity_events.server import connect
from trinity_schemas import ExperienceGroup, Process, TrainerStatusChanged

from ..config import RunConfig
from ..experiences import ExperienceReader
from .requests import WeightRequests
from .waits import ToldWaits
from .wrapper import TrainEngineWrapper, get_trainer_wrapper

logger = logging.getLogger(__name__)


class TrainingResult(Struct, frozen=True, kw_only=True):
    """What training came to. Lists have one entry a step."""

    steps: int
    rewards: list[float]
    scores: list[float]
    staleness: list[float]
    seconds: float
    dropped_groups: int


class Trainer:
    """Takes experiences, trains, publishes weights, writes checkpoints.

    Args:
        config: The run.
        engine: What trains; by default what the configuration names.
    """

    def __init__(self, config: RunConfig, engine: TrainEngineWrapper | None = None) -> None:
        self.config = config
        self.engine = engine or get_trainer_wrapper(config)
        self._requests = WeightRequests(config.run_id, config.redis_url, self.sync_weight)
        self._exits = AsyncExitStack()

    @classmethod
    def get_actor(cls, config: RunConfig, place: Mapping[str, Any]) -> Any:
        """Return a Ray actor of it, with the options of its place."""
        import ray

        return ray.remote(cls).options(name=f"trainer-{config.run_id}", **place).remote(config)

    async def prepare(self) -> None:
        """Start the workers, and publish the weights that the run starts from."""
        config = self.config
        client = await self._exits.enter_async_context(connect(config.redis_url))
        log = RedisEventLog(client, config.run_id)
        self._publisher = AsyncPublisher(log, config.epoch, new_producer("trainer"))
        self._waits = ToldWaits(config, self._publisher)
        self._began_at = await log.last_id()
        self._experiences = ExperienceReader(client, config.run_id, config.epoch)
        await self.engine.prepare()
        if config.resumed_step is not None:
            await self.engine.load_checkpoint(config.resumed_folder, config.resumed_step)
        running = TrainerStatusChanged(status="running", step=self.train_step_num)
        await self._publisher.publish(running)
        await self.sync_weight()

    async def train(self) -> TrainingResult:
        """Train to the last step; raises what went wrong, after saying that it stopped."""
        if not self._sends:
            return await self._train()
        async with self._requests.heard(self._began_at):
            return await self._train()
        raise AssertionError("unreachable")

    async def _train(self) -> TrainingResult:
        began = time.monotonic()
        rewards: list[float] = []
        scores: list[float] = []
        staleness: list[float] = []
        try:
            while self.train_step_num < self.config.steps:
                step = self.train_step_num + 1
                groups, entry_ids = await self._take(step)
                metrics = await self.train_step(groups)
                await self._experiences.ack(entry_ids, deadline=self.config.sync.timeout)
                rewards.append(metrics["reward"])
                scores.append(metrics["score"])
                staleness.append(metrics["staleness"])
                if self.need_sync():
                    await self.sync_weight(metrics)
                if self.need_save():
                    await self.save_checkpoint()
            await self.engine.wait_for_save()
        finally:
            stopped = TrainerStatusChanged(status="stopped", step=self.train_step_num)
            await self._publisher.publish(stopped)
        return TrainingResult(
            steps=self.train_step_num,
            rewards=rewards,
            scores=scores,
            staleness=staleness,
            seconds=time.monotonic() - began,
            dropped_groups=self._experiences.dropped,
        )

    async def _take(self, step: int) -> tuple[list[ExperienceGroup], list[bytes]]:
        """The step's experiences, once all are there; whoever lacks weights to make them gets some.

        Raises DeadlineExceeded.
        """
        count, deadline = self.config.rollouts.prompts_per_step, self.config.sync.timeout
        waits = self._waits
        async with self._requests.answered() if self._sends else nullcontext():
            taken = await self._experiences.take(
                step, count, deadline=deadline, waiting=waits.waiting
            )
            await waits.over(step)
            return taken
        raise AssertionError("unreachable")

    async def train_step(self, exps: Sequence[ExperienceGroup]) -> dict[str, float]:
        """Take one step; returns the engine's metrics and the experiences' own."""
        step = self.train_step_num
        metrics = await self.engine.train_step(exps)
        rewards = [reward for group in exps for reward in group.rewards]
        scores = [score for group in exps for score in group.scores]
        return metrics | {
            "reward": sum(rewards) / len(rewards),
            "score": sum(scores) / len(scores),
            "staleness": sum(step - group.version.step for group in exps) / len(exps),
        }

    def need_sync(self) -> bool:
        """Whether the weights of the present step are to be published."""
        return self.config.is_sync_step(self.train_step_num)

    def need_save(self) -> bool:
        """Whether a checkpoint of the present step is to be written."""
        return self.config.is_save_step(self.train_step_num)

    async def sync_weight(self, metrics: dict[str, float] | None = None) -> None:
        """Publish the present weights as a version."""
        if self._sends:
            self._requests.sending()
            await self.engine.sync_weight_nccl(metrics)
        else:
            await self.engine.upload_state_dict(metrics)

    async def save_checkpoint(
        self, block_until_saved: bool = False, save_as_hf: bool = False
    ) -> None:
        """Write a checkpoint of the present step, in the background unless told to wait."""
        await self.engine.save_checkpoint(block_until_saved, save_as_hf)

    async def shutdown(self) -> None:
        """Stop the workers and let go of the server."""
        await self.engine.shutdown()
        await self._exits.aclose()

    @property
    def _sends(self) -> bool:
        """Whether weights are sent to who is there, and not kept."""
        return self.config.transport == "collective"

    @property
    def train_step_num(self) -> int:
        """Steps taken."""
        return self.engine.train_step_num

    def process(self) -> Process:
        """The process that it runs in."""
        return this_process()

    def is_alive(self) -> bool:
        """Whether it can answer."""
        return True
