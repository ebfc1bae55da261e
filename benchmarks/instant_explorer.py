"""Explorer that answers at once, or after a pause, with experiences that are ready.

Usage: python -m benchmarks.instant_explorer URL RUN NAME TOKENS PAUSE; ends with standard input.
It keeps the share of its time for which it waited for requests in the hash KEY.
"""

from __future__ import annotations

import sys
import time

import anyio

from trinity_events.cli.reducer import until_stopped
from trinity_events.rollouts import Claim, RolloutClient
from trinity_events.server import connect
from trinity_schemas import Experience, RunKeys, Turn

KEY = "bench:waited"
CLAIMS = 4
"""Requests that it claims at once."""
LEASE = 60.0
FIRST = 100_000
"""First token id: of models such as Qwen's, whose ids do not fit into two bytes."""
_BLOCK = 1.0


async def explore(url: str, run_id: str, name: str, tokens: str, pause: str) -> None:
    """Claim and answer the requests of a run's newest epoch."""
    async with connect(url) as client:
        epoch = int(await client.get(RunKeys.of(run_id).epoch) or 0)
        explorer = RolloutClient(client, run_id, epoch, name, lease=LEASE)
        waited = busy = 0.0
        try:
            while True:
                began = time.perf_counter()
                claims = await explorer.claim(CLAIMS, seconds=_BLOCK)
                claimed = time.perf_counter()
                if claims and float(pause):
                    await anyio.sleep(float(pause))
                await explorer.answer_all(
                    [(claim, experiences(claim, name, int(tokens))) for claim in claims]
                )
                waited += claimed - began
                busy += time.perf_counter() - claimed
        finally:
            with anyio.CancelScope(shield=True):
                await client.hset(KEY, name, waited / (waited + busy))


def experiences(claim: Claim, explorer: str, tokens: int) -> list[Experience]:
    """Return the samples that a request asks for."""
    request = claim.request
    turns = [
        Turn(role="prompt", tokens=list(range(16))),
        Turn(
            role="policy",
            tokens=list(range(FIRST, FIRST + tokens)),
            logprobs=[-0.125] * tokens,
            versions=[(request.oldest, tokens)],
        ),
    ]
    return [
        Experience(
            run_id=request.run_id,
            epoch=request.epoch,
            ordinal=request.ordinal,
            attempt=request.attempt,
            sample=sample,
            samples=request.samples,
            explorer=explorer,
            turns=turns,
            reward=1.0,
        )
        for sample in range(request.samples)
    ]


if __name__ == "__main__":
    anyio.run(until_stopped, lambda: explore(*sys.argv[1:6]), True)
