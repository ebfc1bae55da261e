"""Explorer that answers at once, or after a pause, with experiences that are ready.

Usage: python -m benchmarks.instant_explorer URL RUN NAME TOKENS PAUSE MEDIUM PAYLOADS; ends with
standard input. Its tokens travel in the stream, or as payloads in shared memory (shm) or on the
server PAYLOADS (redis). It keeps the share of its time for which it waited for requests in the
hash KEY.
"""

from __future__ import annotations

import sys
import time

import anyio
import redis.asyncio
from msgspec.structs import replace

from trinity_events.cli.reducer import until_stopped
from trinity_events.rollouts import Claim, RolloutClient
from trinity_events.rollouts.payloads import PayloadStore, RedisPayloads, SharedMemoryPayloads
from trinity_events.server import connect
from trinity_schemas import Experience, RunKeys, StepRef, Turn

KEY = "bench:waited"
CLAIMS = 4
"""Requests that it claims at once."""
LEASE = 60.0
FIRST = 100_000
"""First token id: of models such as Qwen's, whose ids do not fit into two bytes."""
_BLOCK = 1.0


def open_store(client: redis.asyncio.Redis, run_id: str, medium: str) -> PayloadStore | None:
    """Return the store of payloads on a medium; None for samples in the stream."""
    if medium == "shm":
        return SharedMemoryPayloads(run_id)
    return RedisPayloads(client, run_id) if medium == "redis" else None


async def explore(  # the arguments of its command line
    url: str, run_id: str, name: str, tokens: str, pause: str, medium: str, payloads_url: str
) -> None:
    """Claim and answer the requests of a run's newest epoch."""
    ready = ready_turns(int(tokens))
    async with connect(url) as client, connect(payloads_url) as payloads:
        epoch = int(await client.get(RunKeys.of(run_id).epoch) or 0)
        store = open_store(payloads, run_id, medium)
        explorer = RolloutClient(client, run_id, epoch, name, lease=LEASE, payloads=store)
        waited = busy = 0.0
        try:
            while True:
                began = time.perf_counter()
                claims = await explorer.claim(CLAIMS, seconds=_BLOCK)
                claimed = time.perf_counter()
                if claims and float(pause):
                    await anyio.sleep(float(pause))
                await explorer.answer_all(
                    [(claim, experiences(claim, name, ready)) for claim in claims]
                )
                waited += claimed - began
                busy += time.perf_counter() - claimed
        finally:
            with anyio.CancelScope(shield=True):
                await client.hset(KEY, name, waited / (waited + busy))


def ready_turns(tokens: int) -> list[Turn]:
    """Return the turns of every sample, of some version."""
    return [
        Turn(role="prompt", tokens=list(range(16))),
        Turn(
            role="policy",
            tokens=list(range(FIRST, FIRST + tokens)),
            logprobs=[-0.125] * tokens,
            versions=[(StepRef(1, 0), tokens)],
        ),
    ]


def experiences(claim: Claim, explorer: str, ready: list[Turn]) -> list[Experience]:
    """Return the samples that a request asks for, of the version that it names."""
    request = claim.request
    prompt, policy = ready
    turns = [prompt, replace(policy, versions=[(request.oldest, len(policy.tokens))])]
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
    anyio.run(until_stopped, lambda: explore(*sys.argv[1:8]), True)
