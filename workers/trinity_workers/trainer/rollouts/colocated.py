"""Rollouts of a run that the trainer's own ranks answer, between its steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from itertools import groupby

import anyio
import redis.asyncio
from anyio import to_thread

from trinity_events.diagnostics.phases import PhaseClock
from trinity_events.log import Publisher
from trinity_events.rollouts import Claim, RolloutClient, evaluation_keys
from trinity_schemas import RunKeys

from ...config.train_config import RunConfig
from ...learning.policy import context_length
from ...rollout_engines.base import Generation, GenerationRequest
from ...rollouts.episodes import Episodes, send_answers
from ...rollouts.held_out_sets import HeldOutSet
from ...rollouts.run_episodes import create_held_out_episodes, open_episodes
from ...tasks import Task
from ..backend import TrainEngineWrapper

NAME = "trainer-0"
"""Name of the claims, as the trainer's in events."""
_CLAIM_BLOCK = 5.0
"""Seconds that one claim waits for requests."""


class TrainerTurns:
    """Generator of turns on the ranks of a training engine.

    Args:
        engine: The engine.
        context_length: Maximum number of tokens of an episode; None if there is no limit.
    """

    def __init__(self, engine: TrainEngineWrapper, context_length: int | None) -> None:
        self._engine = engine
        self.context_length = context_length

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """Generate one turn for each request, in order."""
        return await self._engine.generate_sequences(requests)


class ColocatedAnswers:
    """Answers a run's rollout requests, and those of its evaluations, with its trainer's ranks.

    A rank does one thing at a time: it generates or trains. With a staleness bound of 0 no request
    is open while a step is taken, so every answer is of the weights that the step begins with.

    Args:
        config: The run.
        engine: Engine whose ranks generate.
        client: Client of the server of the run's log.
        publisher: Publisher of the trainer's reports.
        clock: Clock of the trainer's process.
    """

    def __init__(
        self,
        config: RunConfig,
        engine: TrainEngineWrapper,
        client: redis.asyncio.Redis,
        publisher: Publisher,
        clock: PhaseClock,
    ) -> None:
        self._clock = clock
        self._config = config
        self._engine = engine
        self._client = client
        self._publisher = publisher
        self._players: dict[str, Episodes] = {}
        """Episodes by the fingerprint of their questions."""

    async def prepare(
        self, task: Task, held_out: Sequence[HeldOutSet], exits: AsyncExitStack
    ) -> None:
        """Start the judge and the environment, which the stack ends.

        Args:
            task: Task of the run.
            held_out: Sets of held-out questions of the run.
            exits: Stack that ends the judge and the environment.

        Raises:
            TrinityError: if one of them cannot be started.
        """
        config = self._config
        room = await to_thread.run_sync(context_length, config.model_folder)
        episodes = await open_episodes(
            config,
            TrainerTurns(self._engine, room),
            task,
            name=NAME,
            waits=self._publisher.waits,
            publish=self._publisher.publish,
            exits=exits,
            clock=self._clock,
        )
        self._players = {
            questions.fingerprint: create_held_out_episodes(episodes, questions)
            for questions in held_out
        }
        self._players[task.fingerprint] = episodes

    async def run(self) -> None:
        """Answer until cancelled.

        Raises:
            StaleEpoch: The run has a newer epoch.
            TrinityError: The ranks cannot generate.
        """
        streams: list[RunKeys | None] = [None, evaluation_keys(self._config.run_id)]
        async with anyio.create_task_group() as tasks:
            for keys in streams:
                tasks.start_soon(self._answer, keys)

    async def _answer(self, keys: RunKeys | None) -> None:
        """Answer the requests of one stream; by default those of training."""
        config = self._config
        requests = RolloutClient(
            self._client,
            config.run_id,
            config.epoch,
            NAME,
            lease=config.rollouts.claim_lease,
            deadline=config.sync.timeout,
            keys=keys,
        )
        try:
            while True:
                claims = await requests.claim(config.groups_per_claim, seconds=_CLAIM_BLOCK)
                async with requests.renewing(claims):
                    for batch in _by_questions(claims):
                        player = self._players[batch[0].request.fingerprint]
                        answers = await player.answer_all([claim.request for claim in batch])
                        await send_answers(
                            requests, batch, answers, None if player.held_out else self._clock
                        )
        finally:
            # Also when cancelled: a member that is gone would stay in the group of explorers.
            with anyio.CancelScope(shield=True):
                await requests.leave()


def _by_questions(claims: Sequence[Claim]) -> Iterator[list[Claim]]:
    """Yield the claims of each set of questions."""

    def questions(claim: Claim) -> str:
        return claim.request.fingerprint

    for _, alike in groupby(sorted(claims, key=questions), questions):
        yield list(alike)
