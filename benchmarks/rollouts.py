"""Overhead of a step's rollouts beyond computing, with explorers that answer at once.

A step is from the dispatch of its prompts until every rank has the batch of its groups, and the
answers are freed. Tokens travel as payloads in shared memory, as payloads on the server, or in the
stream itself.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from subprocess import Popen
from typing import Any, Literal, NamedTuple

import anyio
import anyio.to_thread
import msgspec
import psutil  # type: ignore[import-untyped]
import redis.asyncio

from trinity_events.log import AsyncPublisher, RedisEventLog, new_producer, open_run
from trinity_events.rollouts import AnswerGroup, DispatchSettings, RolloutDispatcher
from trinity_events.server import EmbeddedServer, connect, open_client
from trinity_events.system.shared_memory import SHARED_MEMORY, free_bytes
from trinity_schemas import ExperienceReference, RunKeys, Sampling, StepRef
from trinity_workers.worker_group.rows import split_rows
from trinity_workers.worker_group.wire import pack

from .environment import HERE, Stage, process
from .instant_explorer import KEY, LEASE, open_store
from .latency import IN, OUT, hops, milliseconds
from .loading_rank import LENGTH, Loaded, LoadRequest
from .measure import Findings, Noise, Rounds, Row, median, percentile, say, spread
from .report import SPEED

TITLE = "a step's rollouts beyond computing: dispatch, claim, answer, take, load, trained"
PLACE = SPEED
EXPLORERS = 2
RANKS = 2
SAMPLES = 8
FINGERPRINT = "sha256:" + "1" * 64
DEADLINE = 120.0
PAUSE = 0.005
"""Seconds before a step whose overhead is measured, after which all processes wait again."""
WARM_UP = 3
"""Minimum steps before those that are measured: they open connections and load scripts."""
GENERATION = 0.1
"""Seconds of a generation, where the explorers' idle share is measured."""
GOAL = 0.020
"""Median seconds of a short step that the design asks for."""
LONG_GOAL = 0.060
"""Median seconds of :data:`GOAL_SHAPE` that the design asks for, with its tensors."""
WITHIN = Rounds("at most", 1)
COPY = "bench:copy"
"""Keys, and a folder, of the bare copies."""
TWICE = Rounds("at most", 2)
FLAT = Rounds("at most", 1.5)
"""Growth of the trainer's processor time from the shortest samples to longer ones."""
_MOST_TOKENS = 60_000_000
"""Trained tokens of one round of a shape, from which on it has fewer steps."""
_LEAST_STEPS = 3
_BYTES_A_TOKEN = 100
"""Memory of a token in all processes: payload, samples, and the tensors of its batch."""

TRANSFER_QUEUE = "TransferQueue 0.1.11"
_PEER_DEADLINE = 300.0
"""Seconds of a run of TransferQueue, with the start of its Ray cluster."""

Medium = Literal["stream", "shm", "redis"]
MEDIA: dict[Medium, str] = {
    "stream": "samples in the stream",
    "shm": "payloads in shared memory",
    "redis": "payloads on a server",
}


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
        return f"{self.samples:,} samples of {self.tokens:,} tokens"


class Size(NamedTuple):
    """Rounds of each shape, steps in a round, and the expected duration."""

    rounds: int
    steps: int
    shapes: tuple[Shape, ...]
    takes: str


SHORT = (Shape(8, 64), Shape(64, 64))
GOAL_SHAPE = Shape(64, 4096)
LONG = (Shape(64, 1024), GOAL_SHAPE, Shape(64, 8192), Shape(16, 32_768))
LARGE = (Shape(512, 64), Shape(512, 1024), Shape(512, 8192), Shape(512, 32_768))
"""Steps of 4,096 samples, of up to 134 million tokens."""
SIZES = {
    "tiny": Size(1, 4, (Shape(2, 64), Shape(2, 1024)), "20 s"),
    "small": Size(2, 8, (*SHORT, *LONG), "3 min"),
    "full": Size(3, 20, (*SHORT, *LONG, *LARGE), "12 min"),
}


class Processes(NamedTuple):
    """Figures of each kind of process; processes of one kind count together."""

    trainer: float
    explorers: float
    server: float
    ranks: float

    def format(self, unit: str) -> str:
        """Return the figures in milliseconds or MiB."""
        if unit == "ms":
            return ", ".join(map(milliseconds, self))
        return ", ".join(f"{figure / 2**20:,.0f} MiB" for figure in self)


class Steps(NamedTuple):
    """Figures of the steps of one round."""

    seconds: list[float]
    idle: float
    """Share of their time for which the explorers waited for requests."""
    events: float
    """Events of a step in the log."""
    bytes: float
    """Bytes of these events."""
    computed: Processes
    """Processor seconds of a step."""
    peak: Processes
    """Bytes of memory at most, during the steps."""
    size: float
    """Bytes of the answers of a step: entries and payloads."""
    load: float
    """Median seconds in which the slowest rank got its samples."""
    tensors: float
    """Median seconds in which the slowest rank made a batch of them."""
    copy: float
    """Median seconds of a bare copy of the bytes of a step."""

    @property
    def median(self) -> float:
        """Return the median seconds of a step."""
        return median(self.seconds)


class Rank:
    """Process that loads the tokens of a share of a step's groups."""

    def __init__(self, started: Popen[bytes]) -> None:
        self.pid = started.pid
        assert started.stdin is not None
        assert started.stdout is not None
        self._requests, self._answers = started.stdin, started.stdout
        self.receive()

    def load(self, request: LoadRequest) -> Loaded:
        """Load groups, and return what it took."""
        encoded = msgspec.msgpack.encode(request)
        self._requests.write(LENGTH.pack(len(encoded)))
        self._requests.write(encoded)
        self._requests.flush()
        return self.receive()

    def receive(self) -> Loaded:
        """Return its next answer."""
        [length] = LENGTH.unpack(self._answers.read(LENGTH.size))
        return msgspec.msgpack.decode(self._answers.read(length), type=Loaded)


class Place(NamedTuple):
    """Servers of this benchmark, and the ranks."""

    on: Stage
    payloads_url: str
    """Server of the payloads, which keeps no file."""
    ranks: Sequence[Rank]

    def servers(self) -> list[int]:
        """Return the ids of the processes of both servers."""
        with open_client(self.payloads_url) as client:
            info: Any = client.info("server")
        return [self.on.server["process_id"], info["process_id"]]


@contextmanager
def ranks_of(on: Stage, payloads_url: str) -> Iterator[list[Rank]]:
    """Start the ranks, which end with the block."""
    with ExitStack() as exits:
        started = [
            exits.enter_context(
                process("benchmarks.loading_rank", payloads_url, home=on.folder, with_output=True)
            )
            for _ in range(RANKS)
        ]
        yield [Rank(rank) for rank in started]


def run(on: Stage, size: Size, noise: Noise) -> Findings:
    """Measure each shape by each way of its tokens, in rounds that take turns."""
    left_out = [shape for shape in size.shapes if not fits(shape)]
    shapes = [shape for shape in size.shapes if shape not in left_out]
    cases = [(shape, medium) for shape in shapes for medium in media_of(shape)]
    rounds: dict[tuple[Shape, Medium], list[Steps]] = {case: [] for case in cases}
    bare: list[float] = []
    with ExitStack() as exits:
        # A second server that keeps no file, as runs have it for their weights.
        server = EmbeddedServer(on.folder, "weights", durable=False)
        payloads_url = exits.enter_context(server.attached())
        exits.enter_context(process("benchmarks.relay", on.url, IN, OUT, home=on.folder))
        place = Place(on, payloads_url, exits.enter_context(ranks_of(on, payloads_url)))
        for number in range(size.rounds):
            for shape, medium in cases:
                noise.beat()
                say(f"  round {number + 1} of {size.rounds}: {shape}, {MEDIA[medium]}")
                count = steps_of(shape, size)
                rounds[shape, medium].append(anyio.run(steps, place, shape, medium, count, 0.0))
            bare += anyio.run(bare_hops, on, size.steps)
        busy = anyio.run(steps, place, shapes[0], "shm", size.steps, GENERATION)
    rows = [row for case in cases for row in rows_of(*case, rounds[case], bare)]
    rows += growth_rows(rounds)
    peers = transfer_queue_steps(size, shapes)
    rows += peer_rows(rounds, peers)
    rows.append(
        Row(
            what=f"explorers idle, {milliseconds(GENERATION)} a generation, one step ahead",
            figure=f"{busy.idle:.1%}",
        )
    )
    return Findings(rows, notes(size, left_out, peers))


def media_of(shape: Shape) -> list[Medium]:
    """Return the ways of the tokens that are measured for a shape."""
    # The former way for comparison, where a sample is below the limit of an entry.
    return [*MEDIA] if shape in (*SHORT, GOAL_SHAPE) else ["shm", "redis"]


def steps_of(shape: Shape, size: Size) -> int:
    """Return the steps of a round."""
    return max(_LEAST_STEPS, min(size.steps, _MOST_TOKENS // shape.trained))


def fits(shape: Shape) -> bool:
    """Return True if this machine has the memory for steps of a shape."""
    available: int = psutil.virtual_memory().available
    # Explorers write the next answers while those of a step are read.
    return available > _BYTES_A_TOKEN * shape.trained and free_bytes() > 20 * shape.trained


def transfer_queue_steps(size: Size, shapes: Sequence[Shape]) -> dict[Shape, list[float]]:
    """Return the seconds of TransferQueue's steps on the same work, where it is installed."""
    measured: dict[Shape, list[float]] = {}
    if importlib.util.find_spec("transfer_queue") is None:
        return measured
    for shape in [shape for shape in shapes if shape in (SHORT[1], GOAL_SHAPE)]:
        say(f"  {TRANSFER_QUEUE}: {shape}")
        counts = map(str, (shape.prompts, SAMPLES, shape.tokens, size.steps))
        peer = subprocess.run(
            [sys.executable, "-m", "benchmarks.transfer_queue_peer", *counts],
            cwd=HERE,
            capture_output=True,
            text=True,
            timeout=_PEER_DEADLINE,
            check=True,
        )
        # Ray writes lines of its own before it.
        measured[shape] = json.loads(peer.stdout.splitlines()[-1])
    return measured


def peer_rows(
    rounds: Mapping[tuple[Shape, Medium], Sequence[Steps]], peers: Mapping[Shape, Sequence[float]]
) -> list[Row]:
    """Return each step next to that of TransferQueue."""
    rows = []
    for shape, seconds in peers.items():
        own = median([steps.median for steps in rounds[shape, "shm"]])
        rows.append(
            Row(
                what=f"a step of {shape}, {MEDIA['shm']}, median",
                figure=milliseconds(own),
                peer=TRANSFER_QUEUE,
                peer_figure=milliseconds(median(seconds)),
                ratio=own / median(seconds),
            )
        )
    return rows


def notes(
    size: Size, left_out: Sequence[Shape], peers: Mapping[Shape, Sequence[float]]
) -> list[str]:
    """Return what the figures are of."""
    words = [
        f"{EXPLORERS} explorers in separate processes claim four prompts at a time, and answer "
        f"each with {SAMPLES} samples that are ready, of a vocabulary above 65,536; the trainer is "
        f"this process, and {RANKS} ranks in separate processes load the tokens and make batches, "
        f"with padding, on the CPU. {size.rounds} rounds of {size.steps} steps for each shape, and "
        "fewer of large ones. The ranks get their shares through pipes, and not through Ray.",
        "A bare copy writes payloads of as many bytes to the same medium and reads them, in this "
        "process; for samples in the stream it is of as many entries. Payloads on a server are on "
        "a second one that keeps no file, as runs have it for weights; the stream's keeps one.",
        "A step is from the dispatch of its prompts to the freeing of its answers, after each rank "
        "has its batch: nothing is asked for ahead, so all of it is overhead. Two bare hops are "
        "one message there and back. Memory is that of the processes at most (VmHWM), with the "
        "shared pages that they have mapped.",
        "The idle share is of the explorers' time in all, from their first claim on. Where answers "
        f"are ready, they wait while the trainer works, and {milliseconds(PAUSE)} before a step.",
        f"Held against {milliseconds(GOAL)} for short samples, and {milliseconds(LONG_GOAL)} for "
        f"{GOAL_SHAPE}, which the design asks for. A design that polls a file or a queue once a "
        "second takes at least that second.",
    ]
    if peers:
        words.append(
            f"{TRANSFER_QUEUE} moves the same samples, put by two actors of Ray and read as a "
            "padded batch by two others, through its default controller and storage; it has no "
            "claims, leases, fates or log."
        )
    else:
        words.append(f"{TRANSFER_QUEUE} is measured where it is installed (pip).")
    if left_out:
        shapes = "; ".join(map(str, left_out))
        words.append(f"Left out, as this machine has too little memory: {shapes}.")
    return words


def rows_of(
    shape: Shape, medium: Medium, rounds: Sequence[Steps], bare: Sequence[float]
) -> list[Row]:
    """Return the rows of one shape by one way of its tokens."""
    seconds = [seconds_of_step for steps in rounds for seconds_of_step in steps.seconds]
    medians = [steps.median for steps in rounds]
    last, is_short = rounds[-1], shape.tokens == SHORT[0].tokens
    copy, size, load, tensors = (
        median([getattr(steps, name) for steps in rounds])
        for name in ("copy", "size", "load", "tensors")
    )
    computed, peak = (
        Processes(*(median(figures) for figures in zip(*kinds, strict=True)))
        for kinds in ([steps.computed for steps in rounds], [steps.peak for steps in rounds])
    )
    case = f"{shape}, {MEDIA[medium]}"
    goal = GOAL if is_short else LONG_GOAL if shape == GOAL_SHAPE else None
    # The former way is there for comparison; no goal is set for it.
    targets = medium != "stream"
    rows = [
        Row(
            what=f"a step of {case}, median",
            figure=milliseconds(median(seconds)),
            peer="a bare copy of its bytes" if goal is None else "asked for",
            peer_figure=milliseconds(copy if goal is None else goal),
            ratio=median(seconds) / (copy if goal is None else goal),
            target=(TWICE if goal is None else WITHIN) if targets else None,
            spread=spread(medians),
        ),
        Row(
            what="its bytes, and the step over a bare copy of them",
            figure=f"{size / 2**20:.1f} MiB, {size / shape.trained:.2f} bytes a token",
            peer="a bare copy of its bytes",
            peer_figure=milliseconds(copy),
            ratio=median(seconds) / copy,
        ),
        Row(
            what="its processor time: trainer, explorers, server, ranks",
            figure=computed.format("ms"),
        ),
        Row(what="peak memory: trainer, explorers, server, ranks", figure=peak.format("MiB")),
        Row(
            what="of it in the slowest rank: its samples, its tensors",
            figure=f"{milliseconds(load)}, {milliseconds(tensors)}",
        ),
    ]
    if is_short:
        rows += [
            Row(
                what=f"a step of {case}, p95",
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


def growth_rows(rounds: dict[tuple[Shape, Medium], list[Steps]]) -> list[Row]:
    """Return how the trainer's processor time grows with the length of samples."""
    rows = []
    for prompts in sorted({shape.prompts for shape, _ in rounds}):
        for medium in ("shm", "redis"):
            trainer = {
                shape.tokens: median([steps.computed.trainer for steps in measured])
                for (shape, of_medium), measured in rounds.items()
                if shape.prompts == prompts and of_medium == medium
            }
            if len(trainer) > 1:
                short, long = min(trainer), max(trainer)
                rows.append(
                    Row(
                        what=f"trainer's processor time of {prompts * SAMPLES:,} samples of "
                        f"{long:,} tokens, {MEDIA[medium]}",
                        figure=milliseconds(trainer[long]),
                        peer=f"of {short:,} tokens",
                        peer_figure=milliseconds(trainer[short]),
                        ratio=trainer[long] / trainer[short],
                        target=FLAT,
                    )
                )
    return rows


async def bare_hops(on: Stage, samples: int) -> list[float]:
    """Return the seconds of messages to another process and back."""
    async with connect(on.url) as client:
        await client.delete(OUT)  # what it held of the round before
        async with hops(on, client) as hop:
            await hop()
            return [await hop() for _ in range(samples)]


async def steps(place: Place, shape: Shape, medium: Medium, count: int, generation: float) -> Steps:
    """Run steps of a run of its own; with a generation that takes time, one step ahead."""
    on, ranks = place.on, place.ranks
    run_id = f"bench-rollouts-{time.time_ns()}"
    prompts = shape.prompts
    async with connect(on.url) as client, connect(place.payloads_url) as payloads:
        epoch = await open_run(client, run_id)
        log = RedisEventLog(client, run_id)
        publisher = AsyncPublisher(log, epoch, new_producer("trainer"))
        dispatcher = RolloutDispatcher(
            client,
            publisher,
            settings(run_id, epoch, shape),
            payloads=open_store(payloads, run_id, medium),
        )
        await dispatcher.start()
        stepper = Stepper(dispatcher, run_id, medium, ranks, prompts)
        ahead = prompts if generation else 0
        with ExitStack() as explorers:
            started = []
            for name in range(EXPLORERS):
                options = (
                    f"explorer-{name}",
                    str(shape.tokens),
                    str(generation),
                    medium,
                    place.payloads_url,
                )
                started.append(
                    explorers.enter_context(
                        process(
                            "benchmarks.instant_explorer", on.url, run_id, *options, home=on.folder
                        )
                    )
                )
            pids = [explorer.pid for explorer in started]
            await dispatcher.dispatch(ahead, StepRef(epoch, 0))
            first = await stepper.warm_up(epoch)
            watched = (
                [psutil.Process().pid],
                pids,
                place.servers(),
                [rank.pid for rank in ranks],
            )
            before, spent_before = await log.read(limit=10**6), spent(watched)
            for pid in [pid for kind in watched for pid in kind]:
                reset_peak(pid)
            measured = [
                await stepper.measured(StepRef(epoch, first + step), 0 if generation else PAUSE)
                for step in range(count)
            ]
            spent_after, after = spent(watched), await log.read(limit=10**6)
            peak = Processes(*(sum(map(peak_of, kind)) for kind in watched))
        idle = [float(share) for share in await client.hvals(KEY)]
        await client.delete(*RunKeys.of(run_id))
        server = client if medium == "stream" else payloads
        copies = [await bare_copy(server, medium, stepper.sizes) for _ in range(3)]
    entries = after[len(before) :]
    computed = Processes(
        *((new - old) / count for old, new in zip(spent_before, spent_after, strict=True))
    )
    return Steps(
        seconds=[step.seconds for step in measured],
        idle=median(idle),
        events=len(entries) / count,
        bytes=sum(len(entry.payload) for entry in entries) / count,
        computed=computed,
        peak=peak,
        size=median([float(step.size) for step in measured]),
        load=median([step.load for step in measured]),
        tensors=median([step.tensors for step in measured]),
        copy=median(copies),
    )


class TakenStep(NamedTuple):
    """Figures of one step."""

    seconds: float
    load: float
    tensors: float
    size: int


class Stepper:
    """Trainer that takes steps, whose ranks load the tokens."""

    def __init__(
        self,
        dispatcher: RolloutDispatcher,
        run_id: str,
        medium: Medium,
        ranks: Sequence[Rank],
        prompts: int,
    ) -> None:
        self._dispatcher = dispatcher
        self._run_id = run_id
        self._medium = medium
        self._ranks = ranks
        self._prompts = prompts
        self.sizes: list[int] = []
        """Bytes of each payload of the last step, or of each entry."""

    async def warm_up(self, epoch: int) -> int:
        """Take steps until each explorer has answered; return the number of the next step."""
        explorers: set[str] = set()
        step = 0
        with anyio.fail_after(DEADLINE):
            while step < WARM_UP or len(explorers) < EXPLORERS:
                step += 1
                groups, _ = await self.step(StepRef(epoch, step))
                explorers |= {group.experiences[0].explorer for group in groups}
                await anyio.sleep(PAUSE)
        return step + 1

    async def measured(self, at: StepRef, pause: float) -> TakenStep:
        """Take a step after a pause, and return its figures."""
        await anyio.sleep(pause)
        began = time.perf_counter()
        groups, loaded = await self.step(at)
        seconds = time.perf_counter() - began
        self.sizes = [size for group in groups for size in sizes_of(group)]
        return TakenStep(
            seconds,
            max(share.load for share in loaded),
            max(share.collate for share in loaded),
            sum(group.size for group in groups),
        )

    async def step(self, at: StepRef) -> tuple[list[AnswerGroup], list[Loaded]]:
        """Dispatch, take, load and train a step; return its groups, and what each rank loaded."""
        await self._dispatcher.dispatch(self._prompts, StepRef(at.epoch, at.step - 1))
        groups = await self._dispatcher.take(self._prompts, deadline=DEADLINE)
        loaded = await self._load(groups)
        outcome: dict[str, Any] = {
            "metrics": {"loss": 0.5},
            "staleness": {0: self._prompts * SAMPLES},
        }
        await self._dispatcher.trained(at.step, groups, **outcome)
        expected = sum(sample.token_count for group in groups for sample in group.experiences)
        assert sum(share.tokens for share in loaded) == expected
        return groups, loaded

    async def _load(self, groups: Sequence[AnswerGroup]) -> list[Loaded]:
        """Let each rank load its share, as the trainer's backend deals the groups out."""
        shares = split_rows([group.experiences for group in groups], len(self._ranks)).parts
        loaded: list[Loaded] = []

        async def load(rank: Rank, share: Any) -> None:
            packed = pack(share) if share else None
            payload = packed.payload if packed else msgspec.msgpack.encode([])
            by_reference = packed.by_reference if packed else []
            request = LoadRequest(self._run_id, self._medium, payload, by_reference)
            loaded.append(await anyio.to_thread.run_sync(rank.load, request))

        async with anyio.create_task_group() as tasks:
            for rank, share in zip(self._ranks, shares, strict=True):
                tasks.start_soon(load, rank, share)
        return loaded


def sizes_of(group: AnswerGroup) -> list[int]:
    """Return the bytes of a group's payload, or of each of its entries."""
    first = group.experiences[0]
    if isinstance(first, ExperienceReference):
        return [first.payload.size]
    return [group.size // len(group.experiences)] * len(group.experiences)


def spent(watched: Sequence[Sequence[int]]) -> list[float]:
    """Return the seconds that the processes of each kind have computed."""
    return [sum(map(computed_by, kind)) for kind in watched]


def computed_by(pid: int) -> float:
    """Return the seconds that a process has computed."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def reset_peak(pid: int) -> None:
    """Let the kernel measure the most memory of a process from now on."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def peak_of(pid: int) -> int:
    """Return the bytes of memory that a process had at most."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    [line] = [line for line in lines if line.startswith("VmHWM:")]
    return int(line.split()[1]) << 10


async def bare_copy(client: redis.asyncio.Redis, medium: Medium, sizes: Sequence[int]) -> float:
    """Return the seconds in which pieces of some bytes were written to a medium, and read."""
    payload = b"\x01" * max(sizes)
    pieces = [payload[:size] for size in sizes]
    if medium == "shm":
        return await anyio.to_thread.run_sync(copy_files, pieces)
    keys = [f"{COPY}:{number}" for number in range(len(pieces))]
    read = 0
    began = time.perf_counter()
    for key, piece in zip(keys, pieces, strict=True):
        if medium == "redis":
            await client.set(key, piece)
        else:
            await client.xadd(COPY, {"e": piece})
    if medium == "redis":
        for key in keys:
            read += len(await client.get(key) or b"")
    else:
        entries: Any = await client.xrange(COPY)
        read = sum(len(fields[b"e"]) for _, fields in entries)
    seconds = time.perf_counter() - began
    assert read == sum(sizes)
    await client.delete(COPY, *keys)
    return seconds


def copy_files(pieces: Sequence[bytes]) -> float:
    """Return the seconds in which pieces were written to files in shared memory, and read."""
    folder = SHARED_MEMORY / f"{COPY.replace(':', '-')}-{time.time_ns()}"
    folder.mkdir(mode=0o700)
    paths = [folder / str(number) for number in range(len(pieces))]
    read = 0
    try:
        began = time.perf_counter()
        for path, piece in zip(paths, pieces, strict=True):
            path.write_bytes(piece)
        for path in paths:
            read += len(path.read_bytes())
        seconds = time.perf_counter() - began
    finally:
        for path in paths:
            path.unlink(missing_ok=True)
        folder.rmdir()
    assert read == sum(map(len, pieces))
    return seconds


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
