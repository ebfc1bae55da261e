"""A dispatcher and its explorers on a real server, and samples as explorers make them."""

from __future__ import annotations

from trinity_events.rollouts import Claim, DispatchSettings, RolloutClient, RolloutDispatcher
from trinity_schemas import Experience, RewardErrorReported, Sampling, StepRef, Turn

FINGERPRINT = "sha256:" + "1" * 64
SAMPLES = 2
LEASE = 0.2
"""Seconds of a claim in tests that wait for its end."""
LONG = 600.0
"""Seconds of a claim in tests in which none lapses."""


def settings(run_id: str, epoch: int, **changes) -> DispatchSettings:
    """Settings of a small dispatch."""
    given = {
        "samples": SAMPLES,
        "sampling": Sampling(max_new_tokens=4),
        "prompts_per_step": 2,
        "fingerprint": FINGERPRINT,
        "window": 8,
        "claim_lease": LONG,
        **changes,
    }
    return DispatchSettings(run_id=run_id, epoch=epoch, **given)


def samples_of(claim: Claim, explorer: str = "someone") -> list[Experience]:
    """All samples that a claimed request asks for."""
    request = claim.request
    return [
        Experience(
            run_id=request.run_id,
            epoch=request.epoch,
            ordinal=request.ordinal,
            attempt=request.attempt,
            sample=sample,
            samples=request.samples,
            explorer=explorer,
            turns=[
                Turn(role="prompt", tokens=[request.ordinal]),
                Turn(role="policy", tokens=[7], logprobs=[-0.5], versions=[(request.oldest, 1)]),
            ],
            reward=float(sample),
        )
        for sample in range(request.samples)
    ]


def reward_error_of(claim: Claim, explorer: str) -> RewardErrorReported:
    """Error of the reward for one answer to a claimed request."""
    request = claim.request
    return RewardErrorReported(
        explorer=explorer,
        epoch=request.epoch,
        ordinal=request.ordinal,
        attempt=request.attempt,
        sample=1,
        error_type="KeyError",
        place="reward.py, line 2",
        message="the reward mine raised KeyError: 'a' (reward.py, line 2)",
        traceback="Traceback (most recent call last)",
        response="four",
    )


class Parts:
    """A run's dispatcher, and as many explorers as a test names."""

    def __init__(self, client, publisher, run_id: str) -> None:
        self.client, self.publisher, self.run_id = client, publisher, run_id
        self.version = StepRef(publisher.epoch, 0)

    async def dispatcher(
        self, ledger=None, *, payloads=None, sampling_tokens=4, **changes
    ) -> RolloutDispatcher:
        changes = {"sampling": Sampling(max_new_tokens=sampling_tokens), **changes}
        dispatch = settings(self.run_id, self.publisher.epoch, **changes)
        made = RolloutDispatcher(self.client, self.publisher, dispatch, ledger, payloads=payloads)
        await made.start()
        return made

    def explorer(self, name: str = "a", *, lease: float = LONG, **more) -> RolloutClient:
        epoch = self.publisher.epoch
        return RolloutClient(self.client, self.run_id, epoch, name, lease=lease, **more)


async def answer(explorer: RolloutClient, count: int = 1) -> list[int]:
    """Claim and answer requests; return the ordinals."""
    claims = await explorer.claim(count, seconds=0.01)
    for claim in claims:
        assert await explorer.answer(claim, samples_of(claim, explorer.name))
    return [claim.request.ordinal for claim in claims]
