"""Cost of one training step in the control plane, by number of ranks."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import psutil  # type: ignore[import-untyped]

from trinity_schemas import RunKeys, RunOpened, StepReady, decode_envelope

from .environment import START_DEADLINE, Stage, reducer, rest
from .event_mix import Cast, checkpoint, weights
from .measure import Findings, Noise, Rounds, Row, median, say, spread
from .report import SPEED

TITLE = "a training step's events, bytes and milliseconds, by ranks that save"
PLACE = SPEED
RUN = "bench-step-{ranks}-{number}"
# With a cost quadratic in the saves, the ratios are 8 and 16.
LINEAR = Rounds("at most", 1.5)
DEADLINE = 60.0


class Size(NamedTuple):
    """Ranks with their steps, rounds, and the expected duration."""

    steps: tuple[tuple[int, int], ...]
    rounds: int
    takes: str


# Every size has about the same number of events, so that snapshots and segments weigh the same.
SIZES = {
    "tiny": Size(((2, 40), (16, 10)), 1, "5 s"),
    "small": Size(((8, 400), (64, 64), (1024, 4)), 1, "15 s"),
    "full": Size(((8, 1000), (64, 160), (1024, 10)), 3, "1 min"),
}


class Cost(NamedTuple):
    """Cost of one step."""

    events: float
    to_server: float
    from_server: float
    reducer_ms: float
    server_ms: float


WORDS = {
    "events": ("events", "{:,.1f}"),
    "to_server": ("bytes to the server", "{:,.0f}"),
    "from_server": ("bytes from the server", "{:,.0f}"),
    "reducer_ms": ("CPU of the reducer", "{:,.2f} ms"),
    "server_ms": ("CPU of the server", "{:,.2f} ms"),
}


def run(on: Stage, size: Size, noise: Noise) -> Findings:
    """Take the steps one after the other, each until it is ready at a consumer."""
    costs: dict[int, list[Cost]] = {ranks: [] for ranks, _ in size.steps}
    for number in range(size.rounds):
        for ranks, steps in size.steps:
            noise.beat()
            say(f"  round {number + 1} of {size.rounds}: {steps} steps of {ranks:,} ranks")
            run_id = RUN.format(ranks=ranks, number=number)
            with reducer(on, run_id) as started:
                costs[ranks].append(cost_of_a_step(on, run_id, ranks, steps, started.pid))
    notes = [
        "A step is a weight version with a part from each rank, and a checkpoint with a start and "
        "a finish from each rank; one consumer waits for both. Events are what is published and "
        "what is announced.",
        "CPU is all that the reducer's and the server's processes used while the steps ran one "
        "after the other: publishing, folding, announcing, snapshots, archiving and trimming.",
        "Each figure is held against that of the smaller size, scaled by the ranks: 1 is linear, "
        "less than 1 means that the step's fixed part weighs less.",
    ]
    return Findings([row for name in WORDS for row in rows_of(name, costs)], notes)


def cost_of_a_step(on: Stage, run_id: str, ranks: int, steps: int, pid: int) -> Cost:
    """Take the steps, and return the mean cost of one."""
    cast, consumer, process = Cast(run_id), Consumer(on, run_id), psutil.Process(pid)
    publish(on, run_id, [cast.say(RunOpened()), *step_of(cast, 1, ranks)])
    consumer.wait_for(1)  # the reducer is running
    rest(process)
    before, used_before = on.server, process.cpu_times()
    heard = consumer.heard
    payloads = 0
    for step in range(2, steps + 2):
        events = step_of(cast, step, ranks)
        payloads += len(events)
        publish(on, run_id, events)
        consumer.wait_for(step)
    rest(process)
    after, used = on.server, process.cpu_times()

    def server(*names: str) -> float:
        return float(sum(after[name] - before[name] for name in names)) / steps

    return Cost(
        events=(payloads + consumer.heard - heard) / steps,
        to_server=server("total_net_input_bytes"),
        from_server=server("total_net_output_bytes"),
        reducer_ms=(used.user + used.system - used_before.user - used_before.system) * 1000 / steps,
        server_ms=server("used_cpu_user", "used_cpu_sys") * 1000,
    )


def step_of(cast: Cast, step: int, ranks: int) -> list[bytes]:
    """Return all events of one step."""
    return [*weights(cast, step, ranks), *checkpoint(cast, step, ranks)]


def publish(on: Stage, run_id: str, payloads: list[bytes]) -> None:
    """Append payloads at once, as many ranks do."""
    key = RunKeys.of(run_id).events
    with on.client.pipeline(transaction=False) as pipe:
        for payload in payloads:
            pipe.xadd(key, {"e": payload})
        pipe.execute()


class Consumer:
    """Consumer of all announcements of a run."""

    def __init__(self, on: Stage, run_id: str) -> None:
        self._client: Any = on.client
        self._key = RunKeys.of(run_id).announcements
        self._after = "0-0"
        self.heard = 0

    def wait_for(self, step: int) -> None:
        """Wait until the step's weights and checkpoint are ready."""
        missing = {"weights", "checkpoint"}
        give_up = time.monotonic() + DEADLINE + START_DEADLINE
        while missing:
            for _, entries in self._client.xread({self._key: self._after}, block=1000) or ():
                self.heard += len(entries)
                self._after = entries[-1][0]
                for _, fields in entries:
                    event = decode_envelope(fields[b"e"]).event
                    if isinstance(event, StepReady) and event.step == step:
                        missing.discard(event.kind)
            if time.monotonic() > give_up:
                raise TimeoutError(f"{' and '.join(missing)} of step {step} never became ready")


def rows_of(name: str, costs: dict[int, list[Cost]]) -> list[Row]:
    """Return rows of one figure by size, each compared with the next smaller size."""
    words, shown = WORDS[name]
    rows: list[Row] = []
    smaller: tuple[int, float] | None = None
    for ranks, costs_of_size in costs.items():
        values = [float(getattr(cost, name)) for cost in costs_of_size]
        figure = median(values)
        row = Row(
            what=f"{words}, {ranks:,} ranks",
            figure=shown.format(figure),
            spread=spread(values) if figure else None,
        )
        if smaller is not None and smaller[1]:
            times = ranks / smaller[0]
            linear = smaller[1] * times
            row = Row(
                what=row.what,
                figure=row.figure,
                peer=f"{times:g} times that of {smaller[0]:,} ranks",
                peer_figure=shown.format(linear),
                ratio=figure / linear,
                target=LINEAR,
                spread=row.spread,
            )
        rows.append(row)
        smaller = (ranks, figure)
    return rows
