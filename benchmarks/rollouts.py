"""Overhead of a step's rollouts beyond computing, with explorers that answer at once."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, cast

import anyio
import psutil  # type: ignore[import-untyped]
import redis.asyncio

from trinity_events.log import AsyncPublisher, RedisEventLog, new_producer, open_run
from trinity_events.rollouts import AnswerGroup, DispatchSettings, RolloutDispatcher
from trinity_events.server import connect
from trinity_schemas import Experience, RunKeys, Sampling, StepRef
from trinity_workers.algorithms.collate import collate

from .environment import Stage, process
from .instant_explorer import KEY, LEASE
from .latency import IN, OUT, hops, milliseconds
from .measure import Findings, Noise, Rounds, Row, median, percentile, say, spread
from .report import SPEED

TITLE = "a step's rollouts beyond computing: dispatch, claim, answer, take, trained"
PLACE = SPEED
EXPLORERS = 2
SAMPLES = 8
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


COPY = "bench:copy"
"""Stream of the bare copies."""
TWICE = Rounds("at most", 2)


class Shape(NamedTuple):
    """Prompts of a step, and tokens of each sample."""

    prompts: int
    tokens: int

    @property
    def samples(self) -> int:
        """Return the samples of a step."""
        return self.prompts * SAMPLES

    @property
    def trained(self) -> int:
        """Return the sampled tokens of a step."""
        return self.samples * self.tokens

    def __str__(self) -> str:
        """Return the shape in words."""
        return f"{self.samples} samples of {self.tokens:,} tokens"


class Size(NamedTuple):
    """Rounds of each shape, steps in a round, and the expected duration."""

    rounds: int
    steps: int
    shapes: tuple[Shape, ...]
    takes: str


SHORT = (Shape(8, 64), Shape(64, 64))
LONG = (Shape(64, 1024), Shape(64, 8192), Shape(16, 32_768))
"""Steps of up to 4 million tokens."""
SIZES = {
    "tiny": Size(1, 4, (Shape(2, 64), Shape(2, 1024)), "10 s"),
    "small": Size(2, 8, (*SHORT, *LONG), "90 s"),
    "full": Size(3, 20, (*SHORT, *LONG), "5 min"),
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
    trainer: float
    """Seconds of a step that this process computed, without the tensors."""
    explorers: float
    """Seconds of a step that all explorers computed."""
    server: float
    """Seconds of a step that the server computed."""
    received: float
    """Bytes of a step that the server received."""
    tensors: float
    """Median seconds in which the groups of a step became a batch."""
    copy: float
    """Median seconds of a bare copy of the bytes of a step."""

    @property
    def median(self) -> float:
        """Return the median seconds of a step."""
        return median(self.seconds)


def run(on: Stage, size: Size, noise: Noise) -> Findings:
    """Measure each shape in rounds that take turns, and two bare hops in each."""
    rounds_by_shape: dict[Shape, list[Steps]] = {shape: [] for shape in size.shapes}
    bare: list[float] = []
    with process("benchmarks.relay", on.url, IN, OUT, home=on.folder):
        for number in range(size.rounds):
            for shape in size.shapes:
                noise.beat()
                say(f"  round {number + 1} of {size.rounds}: {shape}")
                rounds_by_shape[shape].append(anyio.run(steps, on, shape, size.steps, 0.0))
            bare += anyio.run(bare_hops, on, size.steps)
    busy = anyio.run(steps, on, size.shapes[0], size.steps, GENERATION)
    rows = [
        row for shape, rounds in rounds_by_shape.items() for row in rows_of(shape, rounds, bare)
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
        f"each with {SAMPLES} samples that are ready, of a vocabulary above 65,536; the trainer is "
        f"this process. {size.rounds} rounds of {size.steps} steps for each shape.",
        "A bare copy writes as many entries of as many bytes to a stream of the same server, and "
        "reads them, in this process. The tensors are the batch of the whole step, with padding; "
        "they are no part of the step's seconds.",
        "A step is from the dispatch of its prompts to the freeing of its answers: nothing is "
        "asked for ahead, so all of it is overhead. Two bare hops are one message there and back.",
        "The idle share is of the explorers' time in all, from their first claim on. Where answers "
        f"are ready, they wait while the trainer works, and {milliseconds(PAUSE)} before a step.",
        f"Held against {milliseconds(GOAL)}, which the design asks for. A design that polls a file "
        "or a queue once a second takes at least that second.",
    ]


def rows_of(shape: Shape, rounds: list[Steps], bare: list[float]) -> list[Row]:
    """Return the rows of one shape."""
    seconds = [seconds_of_step for steps in rounds for seconds_of_step in steps.seconds]
    medians = [steps.median for steps in rounds]
    last, is_short = rounds[-1], shape.tokens == SHORT[0].tokens
    copy, tensors = (
        median([getattr(steps, name) for steps in rounds]) for name in ("copy", "tensors")
    )
    received = median([steps.received for steps in rounds])
    rows = [
        Row(
            what=f"a step of {shape}, median",
            figure=milliseconds(median(seconds)),
            peer="asked for" if is_short else "a bare copy of its bytes",
            peer_figure=milliseconds(GOAL if is_short else copy),
            ratio=median(seconds) / (GOAL if is_short else copy),
            target=WITHIN if is_short else TWICE,
            spread=spread(medians),
        ),
        Row(
            what="its bytes through the server",
            figure=f"{received / 2**20:.1f} MiB, {received / shape.trained:.2f} bytes a token",
        ),
        Row(
            what="its processor time: trainer, explorers, server",
            figure=", ".join(
                milliseconds(median([getattr(steps, name) for steps in rounds]))
                for name in ("trainer", "explorers", "server")
            ),
        ),
        Row(what="its tensors", figure=milliseconds(tensors)),
    ]
    if is_short:
        rows += [
            Row(
                what=f"a step of {shape}, p95",
                figure=milliseconds(percentile(seconds, 0.95)),
                peer="two bare hops, median",
                peer_figure=milliseconds(median(bare)),
                ratio=percentile(seconds, 0.95) / median(bare),
            ),
            Row(
                what=f"explorers idle, {shape.prompts} prompts a step",
                figure=f"{median([steps.idle for steps in rounds]):.1%}",
            ),
            Row(
                what=f"ledger's cost, {shape.prompts} prompts a step",
                figure=f"{last.events:.1f} events, {last.bytes:,.0f} bytes",
            ),
        ]
    return rows


async def bare_hops(on: Stage, samples: int) -> list[float]:
    """Return the seconds of messages to another process and back."""
    async with connect(on.url) as client:
        await client.delete(OUT)  # what it held of the round before
        async with hops(on, client) as hop:
            await hop()
            return [await hop() for _ in range(samples)]


async def steps(on: Stage, shape: Shape, count: int, generation: float) -> Steps:
    """Run steps of a run of its own; with a generation that takes time, one step ahead."""
    run_id = f"bench-rollouts-{time.time_ns()}"
    prompts = shape.prompts
    async with connect(on.url) as client:
        epoch = await open_run(client, run_id)
        log = RedisEventLog(client, run_id)
        publisher = AsyncPublisher(log, epoch, new_producer("trainer"))
        dispatcher = RolloutDispatcher(client, publisher, settings(run_id, epoch, shape))
        await dispatcher.start()
        ahead = prompts if generation else 0
        with ExitStack() as explorers:
            started = []
            for name in range(EXPLORERS):
                command = (on.url, run_id, f"explorer-{name}", str(shape.tokens), str(generation))
                started.append(
                    explorers.enter_context(
                        process("benchmarks.instant_explorer", *command, home=on.folder)
                    )
                )
            pids = [explorer.pid for explorer in started]
            await dispatcher.dispatch(ahead, StepRef(epoch, 0))
            first = await warm_up(dispatcher, epoch, prompts)
            before, spent_before = await log.read(limit=10**6), await spent(client, pids)
            seconds, tensors, own = [], [], 0.0
            for step in range(count):
                await anyio.sleep(0 if generation else PAUSE)
                began, computed = time.perf_counter(), time.process_time()
                groups = await one_step(dispatcher, StepRef(epoch, first + step), prompts)
                ended = time.perf_counter()
                own += time.process_time() - computed
                collate([cast("list[Experience]", group.experiences) for group in groups], 0)
                tensors.append(time.perf_counter() - ended)
                seconds.append(ended - began)
                del groups
            spent_after, after = await spent(client, pids), await log.read(limit=10**6)
        idle = [float(share) for share in await client.hvals(KEY)]
        await client.delete(*RunKeys.of(run_id))
        each = [(new - old) / count for old, new in zip(spent_before, spent_after, strict=True)]
        copies = [await bare_copy(client, shape.samples, int(each[-1])) for _ in range(3)]
    entries = after[len(before) :]
    size = sum(len(entry.payload) for entry in entries)
    figures = (own / count, *each, median(tensors), median(copies))
    return Steps(seconds, median(idle), len(entries) / count, size / count, *figures)


async def spent(client: redis.asyncio.Redis, pids: Sequence[int]) -> tuple[float, float, float]:
    """Return seconds that explorers and server computed, and bytes that the server received."""
    info = await client.info()
    times = [psutil.Process(pid).cpu_times() for pid in pids]
    explorers = sum(time_of.user + time_of.system for time_of in times)
    server = info["used_cpu_user"] + info["used_cpu_sys"]
    return explorers, server, info["total_net_input_bytes"]


async def bare_copy(client: redis.asyncio.Redis, entries: int, size: int) -> float:
    """Return the seconds in which entries of ``size`` bytes in all were written and read."""
    payload = b"\x01" * (size // entries)
    began = time.perf_counter()
    pipe = client.pipeline(transaction=False)
    for _ in range(entries):
        pipe.xadd(COPY, {"e": payload})
    await pipe.execute()
    read = await client.xrange(COPY) or []
    seconds = time.perf_counter() - began
    assert len(read) == entries
    await client.delete(COPY)
    return seconds


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


def settings(run_id: str, epoch: int, shape: Shape) -> DispatchSettings:
    """Return the settings of a run."""
    return DispatchSettings(
        run_id=run_id,
        epoch=epoch,
        samples=SAMPLES,
        sampling=Sampling(max_new_tokens=shape.tokens),
        prompts_per_step=shape.prompts,
        fingerprint=FINGERPRINT,
        window=2 * shape.prompts,
        claim_lease=LEASE,
    )
