"""Overhead of a step's rollouts beyond computing, with explorers that answer at once."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any, NamedTuple

import anyio

from trinity_events.log import AsyncPublisher, RedisEventLog, new_producer, open_run
from trinity_events.rollouts import AnswerGroup, DispatchSettings, RolloutDispatcher
from trinity_events.server import connect
from trinity_schemas import RunKeys, Sampling, StepRef

from .environment import Stage, process
from .instant_explorer import KEY, LEASE
from .latency import IN, OUT, hops, milliseconds
from .measure import Findings, Noise, Rounds, Row, median, percentile, say, spread
from .report import SPEED

TITLE = "a step's rollouts beyond computing: dispatch, claim, answer, take, trained"
PLACE = SPEED
EXPLORERS = 2
SAMPLES, TOKENS = 8, 64
FINGERPRINT = "sha256:" + "1" * 64
DEADLINE = 60.0
PAUSE = 0.005
"""Seconds before a step whose overhead is measured, after which all processes wait again."""
WARM_UP = 3
"""Minimum steps before those that are measured: they open connections and load scripts."""
GENERATION = 0.1
"""Seconds of a generation, where the explorers' idle share is measured."""
GOAL = 0.020
"""Median seconds of a step that the design asks for."""
WITHIN = Rounds("at most", 1)


class Size(NamedTuple):
    """Rounds of each number of prompts, steps in a round, and the expected duration."""

    rounds: int
    steps: int
    prompts: tuple[int, ...]
    takes: str


SIZES = {
    "tiny": Size(1, 4, (2,), "10 s"),
    "small": Size(2, 20, (8, 64), "30 s"),
    "full": Size(5, 40, (8, 64), "90 s"),
}


class Steps(NamedTuple):
    """Figures of the steps of one round."""

    seconds: list[float]
    idle: float
    """Share of their time for which the explorers waited for requests."""
    events: float
    """Events of a step in the log."""
    bytes: float
    """Bytes of these events."""

    @property
    def median(self) -> float:
        """Return the median seconds of a step."""
        return median(self.seconds)


def run(on: Stage, size: Size, noise: Noise) -> Findings:
    """Measure each number of prompts in rounds that take turns, and two bare hops in each."""
    rounds_by_prompts: dict[int, list[Steps]] = {prompts: [] for prompts in size.prompts}
    bare: list[float] = []
    with process("benchmarks.relay", on.url, IN, OUT, home=on.folder):
        for number in range(size.rounds):
            for prompts in size.prompts:
                noise.beat()
                say(f"  round {number + 1} of {size.rounds}: {prompts} prompts")
                rounds_by_prompts[prompts].append(anyio.run(steps, on, prompts, size.steps, 0.0))
            bare += anyio.run(bare_hops, on, size.steps)
    busy = anyio.run(steps, on, size.prompts[-1], size.steps, GENERATION)
    rows = [
        row
        for prompts, rounds in rounds_by_prompts.items()
        for row in rows_of(prompts, rounds, bare)
    ]
    rows.append(
        Row(
            what=f"explorers idle, {milliseconds(GENERATION)} a generation, one step ahead",
            figure=f"{busy.idle:.1%}",
        )
    )
    return Findings(rows, notes(size))


def notes(size: Size) -> list[str]:
    """Return what the figures are of."""
    return [
        f"{EXPLORERS} explorers in processes of their own claim four prompts at a time, and answer "
        f"each with {SAMPLES} samples of {TOKENS} tokens that are ready; the trainer is this "
        f"process. {size.rounds} rounds of {size.steps} steps for each number of prompts.",
        "A step is from the dispatch of its prompts to the freeing of its answers: nothing is "
        "asked for ahead, so all of it is overhead. Two bare hops are one message there and back.",
        "The idle share is of the explorers' time in all, from their first claim on. Where answers "
        f"are ready, they wait while the trainer works, and {milliseconds(PAUSE)} before a step.",
        f"Held against {milliseconds(GOAL)}, which the design asks for. A design that polls a file "
        "or a queue once a second takes at least that second.",
    ]


def rows_of(prompts: int, rounds: list[Steps], bare: list[float]) -> list[Row]:
    """Return the rows of one number of prompts."""
    seconds = [seconds_of_step for steps in rounds for seconds_of_step in steps.seconds]
    medians = [steps.median for steps in rounds]
    what = f"a step of {prompts} prompts, {prompts * SAMPLES} samples"
    last = rounds[-1]
    return [
        Row(
            what=f"{what}, median",
            figure=milliseconds(median(seconds)),
            peer="asked for",
            peer_figure=milliseconds(GOAL),
            ratio=median(seconds) / GOAL,
            target=WITHIN,
            spread=spread(medians),
        ),
        Row(
            what=f"{what}, p95",
            figure=milliseconds(percentile(seconds, 0.95)),
            peer="two bare hops, median",
            peer_figure=milliseconds(median(bare)),
            ratio=percentile(seconds, 0.95) / median(bare),
        ),
        Row(
            what=f"explorers idle, {prompts} prompts a step",
            figure=f"{median([steps.idle for steps in rounds]):.1%}",
        ),
        Row(
            what=f"ledger's cost, {prompts} prompts a step",
            figure=f"{last.events:.1f} events, {last.bytes:,.0f} bytes",
        ),
    ]


async def bare_hops(on: Stage, samples: int) -> list[float]:
    """Return the seconds of messages to another process and back."""
    async with connect(on.url) as client:
        await client.delete(OUT)  # what it held of the round before
        async with hops(on, client) as hop:
            await hop()
            return [await hop() for _ in range(samples)]


async def steps(on: Stage, prompts: int, count: int, generation: float) -> Steps:
    """Run steps of a run of its own; with a generation that takes time, one step ahead."""
    run_id = f"bench-rollouts-{time.time_ns()}"
    async with connect(on.url) as client:
        epoch = await open_run(client, run_id)
        log = RedisEventLog(client, run_id)
        publisher = AsyncPublisher(log, epoch, new_producer("trainer"))
        dispatcher = RolloutDispatcher(client, publisher, settings(run_id, epoch, prompts))
        await dispatcher.start()
        ahead = prompts if generation else 0
        with ExitStack() as explorers:
            for name in range(EXPLORERS):
                command = (on.url, run_id, f"explorer-{name}", str(TOKENS), str(generation))
                explorers.enter_context(
                    process("benchmarks.instant_explorer", *command, home=on.folder)
                )
            await dispatcher.dispatch(ahead, StepRef(epoch, 0))
            first = await warm_up(dispatcher, epoch, prompts)
            before = await log.read(limit=10**6)
            seconds = []
            for step in range(count):
                await anyio.sleep(0 if generation else PAUSE)
                began = time.perf_counter()
                await one_step(dispatcher, StepRef(epoch, first + step), prompts)
                seconds.append(time.perf_counter() - began)
            after = await log.read(limit=10**6)
        idle = [float(share) for share in await client.hvals(KEY)]
        await client.delete(*RunKeys.of(run_id))
    entries = after[len(before) :]
    size = sum(len(entry.payload) for entry in entries)
    return Steps(seconds, median(idle), len(entries) / count, size / count)


async def warm_up(dispatcher: RolloutDispatcher, epoch: int, prompts: int) -> int:
    """Take steps until each explorer has answered; return the number of the next step."""
    explorers: set[str] = set()
    step = 0
    with anyio.fail_after(DEADLINE):
        while step < WARM_UP or len(explorers) < EXPLORERS:
            step += 1
            groups = await one_step(dispatcher, StepRef(epoch, step), prompts)
            explorers |= {group.experiences[0].explorer for group in groups}
            await anyio.sleep(PAUSE)
    return step + 1


async def one_step(dispatcher: RolloutDispatcher, at: StepRef, prompts: int) -> list[AnswerGroup]:
    """Dispatch, take and train a step; return its groups."""
    await dispatcher.dispatch(prompts, StepRef(at.epoch, at.step - 1))
    groups = await dispatcher.take(prompts, deadline=DEADLINE)
    outcome: dict[str, Any] = {"metrics": {"loss": 0.5}, "staleness": {0: prompts * SAMPLES}}
    await dispatcher.trained(at.step, groups, **outcome)
    return groups


def settings(run_id: str, epoch: int, prompts: int) -> DispatchSettings:
    """Return the settings of a run."""
    return DispatchSettings(
        run_id=run_id,
        epoch=epoch,
        samples=SAMPLES,
        sampling=Sampling(max_new_tokens=TOKENS),
        prompts_per_step=prompts,
        fingerprint=FINGERPRINT,
        window=2 * prompts,
        claim_lease=LEASE,
    )
