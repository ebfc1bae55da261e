"""Answers to held-out questions, which an explorer gives while training asks for nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import anyio

from trinity_events.errors import TrinityError
from trinity_events.rollouts import Claim, RolloutClient
from trinity_schemas import Experience, StepRef

from ..rollout_engines import EngineEnded
from ..rollouts.episodes import Episodes, send_answers
from ..rollouts.held_out_sets import HeldOutSet
from ..rollouts.run_episodes import create_held_out_episodes
from .installer import VersionInstaller

LONGEST_WAIT = 20.0
"""Seconds after which an evaluation has a turn although training always asks for something."""
_CLAIM_BLOCK = 5.0


class QuestionSetMissing(TrinityError):
    """A request asks for a held-out set that the explorer does not hold.

    Attributes:
        fingerprint: Fingerprint of the set.
    """

    fingerprint: str
    text = (
        "the explorer holds no set of questions with the fingerprint {fingerprint}: give trainer "
        "and explorers the same questions"
    )


class EngineTurns:
    """Turns at an engine: training has those that it needs, and evaluation the others."""

    def __init__(self) -> None:
        self.lock = anyio.Lock()
        """Held by the side that chooses the version and generates."""
        self._free = anyio.Event()
        self._free.set()

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """Have the engine for training, as soon as what is being generated has ended."""
        # Another event: anyio's cannot be cleared once they are set.
        self._free = anyio.Event()
        try:
            async with self.lock:
                yield
        finally:
            self._free.set()

    async def left_over(self) -> None:
        """Wait until training does not need the engine, or for the longest wait."""
        with anyio.move_on_after(LONGEST_WAIT):
            await self._free.wait()


class EvaluationAnswers:
    """Answers of one explorer to the requests of evaluations.

    Each request names one version exactly. If the engine serves another one, the named version is
    installed for the answers; training installs its own again before its next answer.

    Args:
        sets: Sets of held-out questions.
        episodes: Player of episodes of the run's task, whose engine and judge are used.
        requests: Client of the stream of evaluations.
        installer: Installer of versions into the engine.
        turns: Turns at the engine.
        at_once: Requests that are claimed at a time.
    """

    def __init__(
        self,
        sets: Sequence[HeldOutSet],
        episodes: Episodes,
        requests: RolloutClient,
        installer: VersionInstaller,
        turns: EngineTurns,
        *,
        at_once: int,
    ) -> None:
        self._players = {
            held_out.fingerprint: create_held_out_episodes(episodes, held_out) for held_out in sets
        }
        self._requests = requests
        self._installer = installer
        self._turns = turns
        self._at_once = at_once
        self.answered = 0
        """Requests that were claimed so far, and answered or given back."""

    async def run(self) -> None:
        """Answer until cancelled.

        Raises:
            StaleEpoch: The run has a newer epoch.
        """
        while True:
            # Before the claim: another explorer may be free for a request that would only be held
            # here.
            await self._turns.left_over()
            claims = await self._requests.claim(self._at_once, seconds=_CLAIM_BLOCK)
            if not claims:
                continue
            async with self._requests.renewing(claims) as held_claims:
                # By versions, the oldest first: each is installed once for all of its claims.
                for version, fingerprint in sorted(set(map(_batch_key, held_claims))):
                    await self._answer(
                        version,
                        fingerprint,
                        [
                            claim
                            for claim in held_claims
                            if _batch_key(claim) == (version, fingerprint)
                        ],
                    )
            self.answered += len(claims)

    async def _answer(self, version: StepRef, fingerprint: str, claims: Sequence[Claim]) -> None:
        try:
            answers = await self._play(version, fingerprint, claims)
        # The explorer ends: its claims lapse, and other explorers take them.
        except EngineEnded:
            raise
        except TrinityError as error:  # the version is gone, or the engine refused it
            answers = [error] * len(claims)
        await send_answers(self._requests, claims, answers)

    async def _play(
        self, version: StepRef, fingerprint: str, claims: Sequence[Claim]
    ) -> Sequence[list[Experience] | TrinityError]:
        player = self._players.get(fingerprint)
        if player is None:
            raise QuestionSetMissing(fingerprint)
        # Before the turn: this wait may last for sync.timeout, and would hold training up.
        ready = await self._installer.announcement(version)
        # Once more: training may have begun to ask during the wait for the announcement.
        await self._turns.left_over()
        async with self._turns.lock:
            await self._installer.install_again(ready)
            played = await player.play_all([claim.request for claim in claims])
        # Judged outside of the turn: a slow reward holds up no answer to training.
        return await played.judged()


def _batch_key(claim: Claim) -> tuple[StepRef, str]:
    """Return the version and the set of a claim: those of one batch have both in common."""
    return claim.request.oldest, claim.request.fingerprint
