"""The exploration loop."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import anyio
import anyio.to_thread
import torch
from msgspec import Struct

from trinity_events import Synchronizer
from trinity_events.coordinator import this_process
from trinity_events.error_text import first_error
from trinity_events.errors import CorruptVersion, DeadlineExceeded, TrinityError, VersionUnavailable
from trinity_events.server import connect
from trinity_schemas import (
    ExperienceGroup,
    ExplorerStatus,
    ExplorerStatusChanged,
    Process,
    StepReady,
    StepRef,
)

from ..config import RunConfig
from ..experiences import ExperienceWriter
from ..learning.policy import load_policy
from ..learning.rollout import Rollout, Samples, generate, judge_all, seed_of
from ..placement import threads
from ..rewards import RewardFailed
from ..user_task import start_rewards, task_of
from .along import ReadingAlong
from .versions import NewestVersion

logger = logging.getLogger(__name__)

ROLE = "explorer"
REWARD_ATTEMPTS = 3
"""Attempts at one group whose rewards fail, after which the explorer fails."""


class ExplorationResult(Struct, frozen=True, kw_only=True):
    """What one explorer came to. Accuracies are shares of sampled answers on held-out questions."""

    rank: int
    applied: int
    groups: int
    accuracy_before: float | None
    accuracy_after: float | None


class Explorer:
    """Answers each training step's questions with weights fresh enough for it.

    Args:
        config: The run.
        rank: Which of its explorers; rank 0 also measures on held-out questions.
    """

    def __init__(self, config: RunConfig, rank: int) -> None:
        self.config = config
        self.rank = rank
        self._serves: StepRef | None = None
        self._applied = 0
        self._synchronizer = Synchronizer(
            config.run_id,
            0,
            redis_url=config.redis_url,
            weights_url=config.weights_url,
            role=ROLE,
            rank=rank,
        )

    @classmethod
    def get_actor(cls, config: RunConfig, rank: int, place: Mapping[str, Any]) -> Any:
        """Return a Ray actor of it, with the options of its place."""
        import ray

        name = f"explorer-{rank}-{config.run_id}"
        return ray.remote(cls).options(name=name, **place).remote(config, rank)

    def process(self) -> Process:
        """The process that it runs in."""
        return this_process()

    def join(self) -> None:
        """Be there for weights that are sent, and not kept; before they are waited for."""
        if self.config.transport == "collective":
            self._synchronizer.join_weight_sync_group()

    def leave(self) -> None:
        """Let go of the servers, and of the group; :meth:`explore` does at its end."""
        self._synchronizer.close()

    async def prepare(self) -> None:
        """Load the model, whose weights the first version will replace."""
        config = self.config
        self.join()
        torch.set_num_threads(threads(config.explorer.cpus, config.explorer.count + 1))
        # Generation reports every length that it was not told of; ours is told.
        logging.getLogger("transformers").setLevel(logging.ERROR)
        self._model, self._tokenizer = load_policy(config.model_folder, config.model.dtype)
        self._task = task_of(config)
        self._rewards = await start_rewards(config)
        self._along = ReadingAlong(config, self._synchronizer)

    async def explore(self) -> ExplorationResult:
        """Explore until the weights of the last step are applied."""
        try:
            return await self._run()
        except BaseExceptionGroup as errors:
            # One error is what went wrong; a group of it would not survive the way through Ray.
            error = first_error(errors)
            raise error from error.__cause__
        finally:
            with anyio.CancelScope(shield=True):
                await self._rewards.aclose()
            self.leave()

    async def _run(self) -> ExplorationResult:
        config = self.config
        versions = NewestVersion(
            config.run_id, config.epoch, config.redis_url, sent=config.transport == "collective"
        )
        # The most that may be under way: every step up to the newest that weights allow.
        ahead = config.sync.interval * (config.sync.max_staleness + 2)
        async with connect(config.redis_url) as client, anyio.create_task_group() as tasks:
            writer = ExperienceWriter(
                client, config.run_id, bound=config.rollouts.prompts_per_step * ahead
            )
            tasks.start_soon(versions.follow)
            tasks.start_soon(self._along.follow)
            await self._say("running")
            try:
                return await self._explore(versions, writer)
            finally:
                with anyio.CancelScope(shield=True):
                    await self._say("stopped")
                tasks.cancel_scope.cancel()
        raise AssertionError("unreachable")

    async def _say(self, status: ExplorerStatus) -> None:
        await anyio.to_thread.run_sync(
            self._synchronizer.tell, ExplorerStatusChanged(status=status)
        )

    async def _explore(
        self, versions: NewestVersion, writer: ExperienceWriter
    ) -> ExplorationResult:
        config = self.config
        before: float | None = None
        groups = 0
        standing = await versions.wait(0, deadline=config.sync.timeout)
        for step in range(standing.step + 1, config.steps + 1):
            await self._refresh(versions, config.version_wanted(step))
            if step == 1:
                before = await self._measure()
            for group in await self._answer(step):
                await writer.add(group, deadline=config.sync.timeout)
                groups += 1
        await self._refresh(versions, config.steps)
        after = await self._measure()
        return ExplorationResult(
            rank=self.rank,
            applied=self._applied,
            groups=groups,
            accuracy_before=before,
            accuracy_after=after,
        )

    async def _refresh(self, versions: NewestVersion, step: int) -> None:
        """Serve the newest version, which must be of ``step`` or later.

        One that is gone was retired while we looked; one that is not what was announced is never
        used. In either case a newer one will do. One that was sent before we were there is asked
        for: the trainer may be waiting for us.
        """
        reason: TrinityError | None = None
        while True:
            has_to_wait = not versions.has(step)
            try:
                with self._at_rest() if has_to_wait else nullcontext():
                    ready = await versions.wait(step, deadline=self.config.sync.timeout)
            except DeadlineExceeded as late:
                if reason is None:
                    raise
                raise DeadlineExceeded(f"{late}; the last one was no use: {reason}") from reason
            newest = StepRef(ready.epoch, ready.step)
            if newest == self._serves:
                return
            try:
                async with self._along.put_aside():
                    await anyio.to_thread.run_sync(self._install, ready)
            except (VersionUnavailable, CorruptVersion) as error:
                logger.warning("explorer %d waits for newer weights: %s", self.rank, error)
                reason = error
                versions.pass_over(newest)
                await anyio.to_thread.run_sync(self._synchronizer.request_weights, ready)
                if _was_read_wrongly(error) and self._serves_step(step):
                    return  # nothing of the model changed, and the trainer may wait for answers
            else:
                return

    def _serves_step(self, step: int) -> bool:
        """Return True if the served version is of this step, or a later one, of this epoch."""
        serves = self._serves
        return serves is not None and serves >= StepRef(self.config.epoch, step)

    def _at_rest(self) -> AbstractContextManager[None]:
        """While nothing can be answered, the model takes the next version as it comes."""
        if self.config.sync.full_every > 1:
            return nullcontext()  # deltas need the model as it is
        self._serves = None
        return self._along.filling(self._model)

    def _install(self, ready: StepReady) -> None:
        if self._serves is None:
            self._synchronizer.load(self._model, ready)
        else:
            self._synchronizer.apply(self._model, ready)
        self._serves = StepRef(ready.epoch, ready.step)
        self._applied += 1

    async def _answer(self, step: int) -> list[ExperienceGroup]:
        """Answer this explorer's share of the step's questions.

        Questions and randomness follow from their ordinals: neither depends on the explorer.
        """
        count = self.config.rollouts.prompts_per_step
        mine = range(self.rank, count, self.config.explorer.count)
        ordinals = [(step - 1) * count + index for index in mine]
        rollouts = await self._judged(ordinals, self._sample)
        return [
            self._group(step, index, rollout) for index, rollout in zip(mine, rollouts, strict=True)
        ]

    async def _judged(
        self, asked: Sequence[int], sample: Callable[[Sequence[int], int], list[Samples]]
    ) -> list[Rollout]:
        """Generate and judge a group for each number, such as an ordinal.

        A group whose rewards failed is generated anew. Raises RewardFailed after the last attempt.
        """
        found: dict[int, Rollout] = {}
        for attempt in range(1, REWARD_ATTEMPTS + 1):
            left = [number for number in asked if number not in found]
            groups = await anyio.to_thread.run_sync(sample, left, attempt)
            judged = await judge_all(self._rewards, groups)
            failed: list[RewardFailed] = []
            for number, one in zip(left, judged, strict=True):
                if isinstance(one, RewardFailed):
                    failed.append(one)
                else:
                    found[number] = one
            if not failed:
                break
            logger.warning("explorer %d: attempt %d: %s", self.rank, attempt, failed[0])
        else:
            raise RewardFailed(f"{failed[0]} (in each of {REWARD_ATTEMPTS} attempts)")
        return [found[number] for number in asked]

    def _sample(self, ordinals: Sequence[int], attempt: int) -> list[Samples]:
        rollouts, seed = self.config.rollouts, self.config.seed
        return generate(
            self._model,
            self._tokenizer,
            [self._task.question(ordinal) for ordinal in ordinals],
            seeds=[seed_of(seed, ordinal, attempt) for ordinal in ordinals],
            samples=rollouts.samples_per_prompt,
            max_new_tokens=rollouts.max_new_tokens,
            temperature=rollouts.temperature,
        )

    def _group(self, step: int, index: int, rollout: Rollout) -> ExperienceGroup:
        assert self._serves is not None
        return ExperienceGroup(
            run_id=self.config.run_id,
            group_id=f"{self._serves.epoch}-{step}-{index}",
            step=step,
            explorer=self.rank,
            version=self._serves,
            prompt_tokens=rollout.prompt_tokens,
            responses=rollout.responses,
            logprobs=rollout.logprobs,
            rewards=rollout.rewards,
            scores=rollout.scores,
        )

    async def _measure(self) -> float | None:
        count = self.config.explorer.held_out_questions
        if self.rank != 0 or count == 0:
            return None
        questions = await anyio.to_thread.run_sync(self._task.held_out, count)

        def sample(numbers: Sequence[int], attempt: int) -> list[Samples]:
            return generate(
                self._model,
                self._tokenizer,
                [questions[number] for number in numbers],
                seeds=[
                    seed_of("held-out", self.config.seed, number, attempt) for number in numbers
                ],
                samples=4,
                max_new_tokens=self.config.rollouts.max_new_tokens,
            )

        judged = await self._judged(range(len(questions)), sample)
        rewards = [reward for one in judged for reward in one.rewards]
        return sum(rewards) / len(rewards) if rewards else None


def _was_read_wrongly(error: TrinityError) -> bool:
    """Return True for a chunk that was refused before anything of a model changed."""
    return isinstance(error, CorruptVersion) and error.chunk is not None
