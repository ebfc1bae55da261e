"""Explorer in a process of its own, which answers requests and judges each by a user's reward.

Usage: python -m tests.support.judging_explorer URL RUN EPOCH RANK REWARD SECONDS

It prints a line for each request that it claims. ``SECONDS`` is the threshold of its reports.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack, closing

import anyio

from tests.support.rollout_parts import samples_of
from trinity_events.diagnostics.stacks import enable_stack_dumps
from trinity_events.diagnostics.waits import WaitReporter
from trinity_events.log import Publisher, SyncEventLog, new_producer
from trinity_events.rollouts import RolloutClient
from trinity_events.server import connect, open_client
from trinity_workers.rewards import RewardPool, RewardSource
from trinity_workers.tasks import Answer, Question

LEASE = 600.0
"""Seconds of a claim: no test waits for its end."""
DEADLINE = 200.0
"""Seconds for one reward."""
QUESTION = Question(prompt="?", answer="!")
ANSWER = Answer(text="!", finished=True, messages=[{"role": "user", "content": "?"}], tokens=1)


async def explore(
    url: str, run_id: str, epoch: int, rank: int, reward: str, threshold: float
) -> None:
    """Answer requests until the process is killed."""
    name = f"explorer-{rank}"
    enable_stack_dumps(run_id, name)
    with ExitStack() as exits:
        log = SyncEventLog(exits.enter_context(open_client(url)), run_id)
        producer = new_producer("explorer", rank)
        publisher = Publisher(log, 0, producer)
        exits.enter_context(closing(publisher))
        source = RewardSource(reward=reward, task="sums", deadline=DEADLINE)
        waits = WaitReporter(publisher, threshold=threshold, owner=producer.incarnation)
        pool = RewardPool(source, processes=1, waits=waits)
        async with connect(url) as client:
            explorer = RolloutClient(client, run_id, epoch, name, lease=LEASE)
            while True:
                for claim in await explorer.claim(1, seconds=10.0):
                    print(claim.request.ordinal, flush=True)
                    async with explorer.renewing([claim]):
                        await pool.judge(QUESTION, [ANSWER])
                        await explorer.answer(claim, samples_of(claim, name))


if __name__ == "__main__":
    url, run_id, epoch, rank, reward, threshold = sys.argv[1:]
    anyio.run(explore, url, run_id, int(epoch), int(rank), reward, float(threshold))
