"""Measurement of a policy on questions that are never trained on."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from trinity_events.errors import TrinityError
from trinity_schemas import RolloutRequest, Sampling

from ..config import RunConfig
from ..episodes import Episodes
from ..tasks import Question

SAMPLES = 4
"""Answers that are sampled to each held-out question."""
ATTEMPTS = 3
"""Attempts at a question whose environment or reward fails."""


class EvaluationFailed(TrinityError):
    """Raised if the answers to a held-out question cannot be made or judged."""


@dataclass(frozen=True, slots=True)
class _HeldOut:
    """Held-out questions in the place of a task: their order is that of the list."""

    name: str
    fingerprint: str
    questions: Sequence[Question]

    def question(self, ordinal: int) -> Question:
        """Return one of the questions."""
        return self.questions[ordinal]

    def held_out(self, count: int) -> list[Question]:
        """Return the first of the questions."""
        return list(self.questions[:count])


async def mean_reward(
    config: RunConfig, episodes: Episodes, questions: Sequence[Question]
) -> float:
    """Return the mean reward of sampled answers, with weights that the engine serves now.

    Raises:
        EvaluationFailed: A question failed in each of :data:`ATTEMPTS` attempts.
    """
    task = _HeldOut(episodes.task.name, episodes.task.fingerprint, questions)
    player = replace(episodes, task=task)
    open_requests = [_request(config, episodes, ordinal) for ordinal in range(len(questions))]
    rewards: list[float] = []
    for attempt in range(1, ATTEMPTS + 1):
        answers = await player.answer_all(open_requests)
        failed: list[tuple[RolloutRequest, TrinityError]] = []
        for request, answer in zip(open_requests, answers, strict=True):
            if isinstance(answer, TrinityError):
                failed.append((request, answer))
            else:
                rewards += [one.reward for one in answer]
        if not failed:
            break
        if attempt == ATTEMPTS:
            raise EvaluationFailed(f"{failed[0][1]} (in each of {ATTEMPTS} attempts)")
        open_requests = [request for request, _ in failed]
    return sum(rewards) / len(rewards)


def _request(config: RunConfig, episodes: Episodes, ordinal: int) -> RolloutRequest:
    """Return a request of the measurement's own: it is on no stream, and has no fate."""
    assert episodes.engine.serves is not None
    return RolloutRequest(
        run_id=config.run_id,
        epoch=config.epoch,
        ordinal=ordinal,
        attempt=1,
        samples=SAMPLES,
        sampling=_sampling(config),
        oldest=episodes.engine.serves,
        fingerprint=episodes.task.fingerprint,
        deadline=config.rollouts.request_deadline,
    )


def _sampling(config: RunConfig) -> Sampling:
    """Return sampling at temperature 1 whose randomness is not that of training."""
    digest = hashlib.sha256(f"held-out:{config.seed}".encode()).digest()
    return Sampling(
        max_new_tokens=config.rollouts.max_new_tokens,
        seed=int.from_bytes(digest[:7], "big"),
    )
