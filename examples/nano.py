"""A whole reinforcement-learning run on the event log, in one file, without trinity_workers.

    python examples/nano.py              a server, a trainer and two explorers, on this machine
    python examples/nano.py train        the trainer alone; it resumes from its newest checkpoint
    python examples/nano.py explore 2    one more explorer, at any time

The model learns to sort two digits. Kill the trainer and start it again, kill explorers, add
some: what is lost is done again. Then look: trinity-events status nano; trinity-events audit nano.
Read it from top to bottom: model, task, loss, trainer, explorer.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from contextlib import closing, suppress
from pathlib import Path

import anyio
import msgspec
import redis.asyncio
import torch
from anyio import to_thread
from torch import Tensor, nn

from trinity_events import Synchronizer, TrainingLoop, blocking, subscribe
from trinity_events.core.ledger import Ledger
from trinity_events.errors import RunNotFound, StaleEpoch, VersionUnavailable
from trinity_events.log import AsyncPublisher, RedisEventLog, new_producer
from trinity_events.rollouts import (
    AnswerGroup,
    Claim,
    DispatchSettings,
    RolloutClient,
    RolloutDispatcher,
)
from trinity_events.server import connect
from trinity_schemas import (
    Experience,
    ExplorerStatusChanged,
    LedgerRestored,
    RunClosed,
    Sampling,
    StepReady,
    StepRef,
    TrainedLedger,
    Turn,
)

RUN, STEPS, SAVE_EVERY = "nano", int(os.environ.get("STEPS", "300")), 20
URL = os.environ.setdefault("TRINITY_REDIS_URL", "redis://127.0.0.1:6390")
ROOT = Path(os.environ.setdefault("CHECKPOINT_ROOT", "checkpoints"))
PROMPTS, SAMPLES, DIGITS = 8, 16, 2  # of a step; answers to each, which are a group; their tokens
LEASE = 10.0  # seconds after which another explorer gets the requests of one that died

# --- Model and task ------------------------------------------------------------------------------


class Policy(nn.Module):
    """From tokens (batch, length), int64 digits, to logits (batch, length, 10), float32."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, width)
        self.memory = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the token after each."""
        states, _ = self.memory(self.embedding(tokens))
        return self.head(states)


def prompt_at(ordinal: int) -> list[int]:
    """Return the prompt of an ordinal: trainer and explorers agree on it without a message."""
    return random.Random(ordinal).choices(range(10), k=DIGITS)


def reward(prompt: list[int], answer: list[int]) -> float:
    """Return the share of digits that stand where the sorted prompt has them."""
    return sum(map(int.__eq__, sorted(prompt), answer)) / DIGITS


FINGERPRINT = f"sha256:{0x5097ED3D:064x}"  # of the task: a ledger of another one is refused

# --- Loss ----------------------------------------------------------------------------------------


def grpo_loss(policy: Policy, groups: list[AnswerGroup]) -> Tensor:
    """Return the clipped loss of groups, each judged by its own mean (arXiv 2402.03300, eq. 3)."""
    experiences = [experience for group in groups for experience in group.experiences]
    tokens = torch.tensor([[*e.turns[0].tokens, *e.turns[1].tokens] for e in experiences])
    behaviour = torch.tensor([[*e.turns[1].logprobs] for e in experiences])  # (samples, DIGITS)
    rewards = torch.tensor([e.reward for e in experiences]).view(-1, SAMPLES)
    advantages = rewards - rewards.mean(1, keepdim=True)
    advantages = (advantages / (rewards.std(1, keepdim=True) + 1e-4)).view(-1, 1)
    # The logits at a token are of the next one: the answer's begin at the prompt's last token.
    logits = policy(tokens)[:, DIGITS - 1 : -1]
    answers = tokens[:, DIGITS:].unsqueeze(-1)
    logprobs = logits.log_softmax(-1).gather(-1, answers).squeeze(-1)
    ratio = (logprobs - behaviour).exp()
    return -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()


# --- Trainer -------------------------------------------------------------------------------------


async def train() -> None:
    """Train to the last step, from the newest checkpoint if there is one."""
    torch.manual_seed(0)
    policy = Policy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)
    ledger, first = await to_thread.run_sync(restore, policy, optimizer)
    with TrainingLoop(RUN, ROOT, resume_from=first or None, transport="shm") as loop:
        async with connect(URL) as client:
            log = AsyncPublisher(RedisEventLog(client, RUN), loop.epoch, new_producer("trainer"))
            if ledger is not None:
                await log.publish(LedgerRestored(ledger=ledger, digest=ledger.digest))
            books = None if ledger is None else Ledger.restored(ledger)
            dispatcher = RolloutDispatcher(client, log, settings(loop.epoch), books)
            await dispatcher.start()
            await to_thread.run_sync(loop.publish, first, policy.state_dict())
            for step in range(first + 1, STEPS + 1):
                # On policy: the newest weights alone may answer.
                await dispatcher.dispatch(PROMPTS, StepRef(loop.epoch, step - 1), exact=True)
                groups = await dispatcher.take(PROMPTS, deadline=60.0)
                for _ in range(2):
                    loss = grpo_loss(policy, groups)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                rewards = [e.reward for group in groups for e in group.experiences]
                metrics = {"train/loss": loss, "rollout/reward": sum(rewards) / len(rewards)}
                await dispatcher.trained(step, groups, metrics=metrics)
                await to_thread.run_sync(loop.publish, step, policy.state_dict())
                if step % SAVE_EVERY == 0 or step == STEPS:
                    print(f"step {step}  reward {metrics['rollout/reward']:.2f}", flush=True)
                    state = {
                        "policy": policy.state_dict(),
                        "optimizer": optimizer.state_dict(),
                        "ledger": msgspec.json.encode(dispatcher.ledger_at(step)).decode(),
                    }
                    await to_thread.run_sync(loop.save, step, state)


def settings(epoch: int) -> DispatchSettings:
    """Return what is asked for in an epoch; no more requests are open than those of one step."""
    return DispatchSettings(
        run_id=RUN,
        epoch=epoch,
        samples=SAMPLES,
        sampling=Sampling(max_new_tokens=DIGITS),
        prompts_per_step=PROMPTS,
        window=PROMPTS,
        fingerprint=FINGERPRINT,
        claim_lease=LEASE,
    )


def restore(policy: Policy, optimizer: torch.optim.Optimizer) -> tuple[TrainedLedger | None, int]:
    """Load the newest checkpoint; return its ledger and its step, None and 0 without one.

    The ledger says which prompts were trained: a resumed run trains none of them twice.
    """
    try:
        newest = blocking.newest_checkpoint(RUN, checkpoint_root=ROOT)
    except RunNotFound:
        newest = None
    if newest is None:  # this is the first start
        return None, 0
    with blocking.hold_checkpoint(RUN, newest.step, checkpoint_root=ROOT) as folder:
        state = torch.load(folder / "model_rank_0.pt", weights_only=True)
    policy.load_state_dict(state["policy"])
    optimizer.load_state_dict(state["optimizer"])
    print(f"resuming after step {newest.step}", flush=True)
    return msgspec.json.decode(state["ledger"], type=TrainedLedger), newest.step


# --- Explorer ------------------------------------------------------------------------------------


class ServedVersion:
    """Version that an explorer serves; the holder of ``changed`` sees the same weights."""

    def __init__(self) -> None:
        self.version, self.changed = StepRef(0, 0), anyio.Condition()

    async def reached(self, version: StepRef) -> None:
        """Wait, within ``changed``, until this version or a later one is served."""
        while self.version < version:
            await self.changed.wait()


async def explore(rank: int) -> None:
    """Serve the newest weights, and answer requests with them, until the run has finished."""
    policy, served = Policy(), ServedVersion()
    with closing(Synchronizer(RUN, 0, role="explorer", rank=rank)) as weights:
        async with (
            connect(URL) as client,
            anyio.create_task_group() as tasks,
            subscribe(RUN, StepReady, RunClosed, wait_for_run=True) as events,
        ):
            tasks.start_soon(answer_requests, client, policy, served, f"explorer-{rank}")
            async for event in events:
                if isinstance(event.event, RunClosed) and event.reason == "finished":
                    break
                if isinstance(event.event, StepReady) and event.kind == "weights":
                    async with served.changed:
                        try:
                            await to_thread.run_sync(weights.apply, policy, event.event)
                        except VersionUnavailable:  # its trainer is gone, or has newer weights
                            continue
                        served.version = StepRef(event.epoch, event.step)
                        served.changed.notify_all()
            tasks.cancel_scope.cancel()
        weights.report(ExplorerStatusChanged(status="stopped"))


async def answer_requests(
    client: redis.asyncio.Redis, policy: Policy, served: ServedVersion, name: str
) -> None:
    """Answer the requests of one epoch after the other."""
    epoch = 0
    while True:
        async with served.changed:
            await served.reached(StepRef(epoch + 1, 0))
            epoch = served.version.epoch
        requests = RolloutClient(client, RUN, epoch, name, lease=LEASE)
        with suppress(StaleEpoch):  # the trainer was started again
            while True:
                for claim in await requests.claim(1, seconds=1.0):
                    async with requests.renewing([claim]), served.changed:
                        await served.reached(claim.request.oldest)
                        answers = sample(policy, claim, served.version, name)
                    await requests.answer(claim, answers)


@torch.no_grad()
def sample(policy: Policy, claim: Claim, version: StepRef, explorer: str) -> list[Experience]:
    """Return the samples that a request asks for: each token with its log-probability."""
    request = claim.request
    prompt = prompt_at(request.ordinal)
    tokens = torch.tensor(prompt).repeat(request.samples, 1)
    logprobs = []
    for _ in range(DIGITS):
        now = policy(tokens)[:, -1].log_softmax(-1)  # (samples, 10)
        drawn = now.exp().multinomial(1)
        tokens = torch.cat([tokens, drawn], dim=1)
        logprobs.append(now.gather(1, drawn))
    turns = [
        Turn(role="policy", tokens=answer, logprobs=row, versions=[(version, DIGITS)])
        for answer, row in zip(
            tokens[:, DIGITS:].tolist(), torch.cat(logprobs, 1).tolist(), strict=True
        )
    ]
    return [
        Experience(
            run_id=RUN,
            **{name: getattr(request, name) for name in ("epoch", "ordinal", "attempt", "samples")},
            sample=number,
            explorer=explorer,
            turns=[Turn(role="prompt", tokens=prompt), turn],
            reward=reward(prompt, turn.tokens),
        )
        for number, turn in enumerate(turns)
    ]


# --- Processes -----------------------------------------------------------------------------------


def run_all() -> None:
    """Start a server with its reducer, two explorers and the trainer; end them with the trainer."""
    command = [sys.executable, "-m", "trinity_events", "serve", "--checkpoint-root", ROOT]
    serve = subprocess.Popen([*command, "--port", URL.rpartition(":")[2]], stdout=subprocess.PIPE)
    started = [serve]
    try:
        assert serve.stdout is not None and serve.stdout.readline(), "the server did not start"
        this = [sys.executable, __file__]
        started += [subprocess.Popen([*this, "explore", str(rank)]) for rank in range(2)]
        subprocess.run([*this, "train"], check=True)
        for explorer in started[1:]:
            explorer.wait(30)
    finally:
        for process in reversed(started):
            process.terminate()
            process.wait(30)


if __name__ == "__main__":
    torch.set_num_threads(1)
    match sys.argv[1:]:
        case ["train"]:
            anyio.run(train)
        case ["explore", number]:
            anyio.run(explore, int(number))
        case _:
            run_all()
