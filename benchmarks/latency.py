"""Latency from the publish that makes a step ready to its announcement at a waiting consumer."""

from __future__ import annotations

import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from importlib.util import find_spec
from typing import Any, NamedTuple

import anyio
from anyio.abc import TaskStatus
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from trinity_events import StepReady, subscribe
from trinity_events.log import AsyncPublisher, RedisEventLog, new_producer, open_run
from trinity_events.server import connect
from trinity_schemas import Registration, SaveFinished, SaveStarted, Slot, StepCommitted

from .environment import START_DEADLINE, Stage, process, reducer
from .measure import Findings, Noise, Rounds, Row, median, percentile, ratio, say, spread
from .original_design import POLL_EVERY, delays
from .report import SPEED

TITLE = "from a publish to step-ready at a waiting consumer"
PLACE = SPEED
RUN = "bench-latency"
IN, OUT = "bench:in", "bench:out"
PAYLOAD = b"\x00" * 360
"""About the size of the event that makes the step ready."""
PAUSE = (0.015, 0.035)
"""Range of the random pause in seconds before a sample, after which all processes wait."""
DEADLINE = 30.0

MEDIAN = Rounds("at most", 3)
P99 = Rounds("at most", 10)

Sample = Callable[[], Awaitable[float]]


class Size(NamedTuple):
    """Number of alternating blocks, samples in each, and samples of the original design."""

    blocks: int
    samples: int
    original: int
    takes: str


SIZES = {
    "tiny": Size(2, 10, 0, "5 s"),
    "small": Size(6, 50, 10, "45 s"),
    "full": Size(20, 50, 30, "2 min"),
}


def run(on: Stage, size: Size, noise: Noise) -> Findings:
    """Measure the pipeline and the bare hops block by block, then the original design."""
    with (
        process("benchmarks.relay", on.url, IN, OUT, home=on.folder),
        reducer(on, RUN),
    ):
        ours, bare = anyio.run(blocks, on, size, noise)
    rows, notes = rows_of(ours, bare)
    if not size.original:
        notes.append("The original's design was left out at this size.")
    elif find_spec("ray") is None:
        notes.append("The original's design was left out: Ray is not installed (make setup).")
    else:
        say(f"the original's design, {size.original} samples")
        rows += original_rows(on, [sample for block in ours for sample in block], size.original)
        notes.append(
            "The original's design is a small model: a call to a Ray actor that counts and writes "
            f"a file, which is read every {POLL_EVERY:g} s."
        )
    return Findings(rows, notes)


async def blocks(
    on: Stage, size: Size, noise: Noise
) -> tuple[list[list[float]], list[list[float]]]:
    """Return the seconds of each sample of the pipeline and of two bare hops, by block."""
    ours: list[list[float]] = []
    bare: list[list[float]] = []
    async with connect(on.url) as client, pipeline(on, client) as ready, hops(on, client) as hop:
        for _ in range(3):  # opens connections and loads scripts
            await hop()
            await ready()
        for number in range(size.blocks):
            noise.beat()
            say(f"  block {number + 1} of {size.blocks}")
            turn = [(ours, ready), (bare, hop)]
            for samples, sample in turn if number % 2 else reversed(turn):
                samples.append([await paced(sample) for _ in range(size.samples)])
    return ours, bare


async def paced(sample: Sample) -> float:
    """Take one sample after a pause, so that all processes wait again."""
    await anyio.sleep(random.uniform(*PAUSE))
    return await sample()


@asynccontextmanager
async def pipeline(on: Stage, client: Any) -> AsyncIterator[Sample]:
    """Yield a sampler of a run with a consumer; a sample is the end of a step's only save."""
    publisher = AsyncPublisher(
        RedisEventLog(client, RUN), await open_run(client, RUN), new_producer("actor")
    )
    send, arrivals = anyio.create_memory_object_stream[tuple[int, float]](16)
    step = 0

    async def sample() -> float:
        nonlocal step
        step += 1
        finished = await prepare(publisher, step)
        began = time.perf_counter()
        await publisher.publish(finished)
        return await arrival(arrivals, step) - began

    async with anyio.create_task_group() as tasks, send, arrivals:
        await tasks.start(consume, on.url, send)
        yield sample
        tasks.cancel_scope.cancel()


async def prepare(publisher: AsyncPublisher, step: int) -> SaveFinished:
    """Publish all events of a step but the last, which is returned."""
    expected = Registration(registration_id="trainer-0", kind="state_dict", expected=1)
    slot = Slot(step=step, kind="state_dict", role="actor", rank=0, name="model_state_dict")
    save_id = f"{step:016x}"
    await publisher.publish(SaveStarted(save_id=save_id, slot=slot))
    await publisher.publish(StepCommitted(step=step, kind="state_dict", registrations=(expected,)))
    await anyio.sleep(random.uniform(*PAUSE))
    digest = f"sha256:{step:064x}"
    return SaveFinished(save_id=save_id, slot=slot, bytes=1 << 30, seconds=4.2, digest=digest)


async def consume(
    url: str,
    arrivals: MemoryObjectSendStream[tuple[int, float]],
    *,
    task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED,
) -> None:
    """Record the time of each step's announcement, as seen by a waiting job."""
    async with subscribe(RUN, StepReady, redis_url=url, deadline=START_DEADLINE) as events:
        task_status.started()
        async for event in events:
            await arrivals.send((event.step, time.perf_counter()))


@asynccontextmanager
async def hops(on: Stage, client: Any) -> AsyncIterator[Sample]:
    """Yield a sampler of XADD, XREAD in another process, XADD, and XREAD here."""
    send, arrivals = anyio.create_memory_object_stream[tuple[int, float]](16)
    number = 0

    async def sample() -> float:
        nonlocal number
        number += 1
        began = time.perf_counter()
        await client.xadd(IN, {b"e": PAYLOAD, b"n": number})
        return await arrival(arrivals, number) - began

    async def listen() -> None:
        after = "0-0"
        while True:
            for _, entries in await client.xread({OUT: after}, block=1000) or ():
                now = time.perf_counter()
                for entry_id, fields in entries:
                    after = entry_id.decode()
                    await send.send((int(fields[b"n"]), now))

    async with anyio.create_task_group() as tasks, send, arrivals:
        tasks.start_soon(listen)
        yield sample
        tasks.cancel_scope.cancel()


async def arrival(arrivals: MemoryObjectReceiveStream[tuple[int, float]], number: int) -> float:
    """Return the arrival time of this number; skip earlier ones."""
    with anyio.fail_after(DEADLINE):
        while True:
            arrived, at = await arrivals.receive()
            if arrived == number:
                return at


def rows_of(ours: list[list[float]], bare: list[list[float]]) -> tuple[list[Row], list[str]]:
    """Return rows of median and p99 against the bare hops' median, and p99 against their p99."""
    all_ours = [sample for block in ours for sample in block]
    all_bare = [sample for block in bare for sample in block]
    medians, bare_medians = [median(block) for block in ours], [median(block) for block in bare]
    hop, p99, bare_p99 = median(all_bare), percentile(all_ours, 0.99), percentile(all_bare, 0.99)
    rows = [
        Row(
            what="publish to step-ready, median",
            figure=milliseconds(median(all_ours)),
            peer="two bare hops, median",
            peer_figure=milliseconds(hop),
            ratio=ratio(medians, bare_medians),
            target=MEDIAN,
            spread=spread(medians),
        ),
        Row(
            what="publish to step-ready, p99",
            figure=milliseconds(p99),
            peer="two bare hops, median",
            peer_figure=milliseconds(hop),
            ratio=p99 / hop,
            target=P99,
        ),
        Row(
            what="publish to step-ready, p99",
            figure=milliseconds(p99),
            peer="two bare hops, p99",
            peer_figure=milliseconds(bare_p99),
            ratio=p99 / bare_p99,
        ),
    ]
    notes = [
        f"{len(all_ours)} samples of each, in {len(ours)} blocks that take turns; the ratio of "
        "medians is the median over the blocks.",
        "Two bare hops are an XADD to a blocked XREAD in another process, which answers by an "
        "XADD to a blocked XREAD here, with the same client.",
    ]
    return rows, notes


def original_rows(on: Stage, ours: list[float], samples: int) -> list[Row]:
    """Return rows that compare the original design with the pipeline."""
    seen, calls = delays(on.folder, samples)
    return [
        Row(
            what=what,
            figure=milliseconds(theirs),
            peer=f"ours, {which}",
            peer_figure=milliseconds(mine),
            ratio=theirs / mine,
        )
        for what, theirs, which, mine in (
            (
                "the original's design, save's end to seen, median",
                median(seen),
                "median",
                median(ours),
            ),
            ("the original's design, slowest", max(seen), "slowest", max(ours)),
            ("of it, the call to the actor, median", median(calls), "median", median(ours)),
        )
    ]


def milliseconds(seconds: float) -> str:
    """Format seconds as milliseconds."""
    return f"{seconds * 1000:.2f} ms"
