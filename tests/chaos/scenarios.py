"""What no single kill shows: a turn that passes on, a leader that sleeps, who stays away."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from tests.support.faulty_proxy import Command, Fault, Matches
from trinity_events.log import Stream, SyncEventLog
from trinity_schemas import (
    Event,
    LeaseExpired,
    SaveFinished,
    StepFailed,
    StepReady,
    decode_envelope,
)

from .boundaries import Nth, boundaries, save_is_under_way, sender
from .outcome import heard
from .pipeline import Pipeline
from .plan import PATIENCE, RUN


class Scenario(NamedTuple):
    """A disturbance of its own kind. It starts the pipeline, and returns what went wrong."""

    name: str
    disturb: Callable[[Pipeline], list[str]]
    options: dict[str, Any]


def a_worker_dies_with_the_turn(pipeline: Pipeline) -> list[str]:
    """Its lease expires, its step fails, its turn passes on; back again, it makes it ready."""
    _kill_for_good(pipeline, "worker-0", "save-started", save_is_under_way)
    pipeline.start()

    def missing() -> str | None:
        events = _read_events(pipeline, Stream.EVENTS)
        if not any(isinstance(event, LeaseExpired) for event in events):
            return "nobody noticed that the worker is dead"
        if not any(isinstance(event, SaveFinished) and event.slot.rank == 1 for event in events):
            return "the turn of the dead did not pass on"
        if not any(
            isinstance(event, StepFailed) for event in _read_events(pipeline, Stream.ANNOUNCEMENTS)
        ):
            return "the step of the dead did not fail"
        return None

    return _then_release(pipeline, missing, "worker-0")


def a_worker_stays_away_past_the_deadline(pipeline: Pipeline) -> list[str]:
    """Its step fails with what it lacks; back again, the worker makes it ready."""
    _kill_for_good(pipeline, "worker-0", "version-part-published")
    pipeline.start()

    def missing() -> str | None:
        failed = [
            event.reason
            for event in _read_events(pipeline, Stream.ANNOUNCEMENTS)
            if isinstance(event, StepFailed) and "after its commit: it lacks" in event.reason
        ]
        return None if failed else "no step was failed by its deadline"

    return _then_release(pipeline, missing, "worker-0")


def a_leader_sleeps_through_its_lease(pipeline: Pipeline) -> list[str]:
    """The other takes over. What the first had under way arrives late, and it wakes up later."""
    problems: list[str] = []

    def stop(_: Command) -> None:
        pipeline.processes["reducer"].send(signal.SIGSTOP)
        # The commit of the sleeper is held up here, and goes on when the other has led.
        if not _by_and_by(lambda: _is_announced(pipeline)):
            problems.append("nobody took over from the leader that sleeps")

    pipeline.start("reducer")
    log = SyncEventLog(pipeline.client, RUN)
    _by_and_by(lambda: pipeline.client.exists(log.keys.leader) == 1)
    fault = pipeline.proxy.at("before", Nth("step-ready", 1), stop)
    pipeline.start(*(role for role in pipeline.roles if role != "reducer"))
    lacks = pipeline.until(lambda: None if fault.struck.is_set() else "a step", PATIENCE)
    pipeline.processes["reducer"].send(signal.SIGCONT)
    return problems + ([f"stuck: {lacks}"] if lacks else [])


def consumers_stay_away(pipeline: Pipeline) -> list[str]:
    """Nobody waits for them, and they miss nothing."""
    away = ("explorer", "group")
    pipeline.start(*(role for role in pipeline.roles if role not in away))

    lacks = pipeline.until(lambda: _trainer_is_missing(pipeline), PATIENCE)
    pipeline.start(*away)
    return [f"stuck: {lacks}"] if lacks else []


def a_group_member_stays_away(pipeline: Pipeline) -> list[str]:
    """What it was given and did not acknowledge goes to a later member."""
    _kill_for_good(pipeline, "group", "acknowledged")
    pipeline.start()
    lacks = pipeline.until(lambda: _trainer_is_missing(pipeline), PATIENCE)
    few = len(heard(pipeline.place, "group"))
    pipeline.release("group")
    problems = [f"stuck: {lacks}"] if lacks else []
    return problems if few else [*problems, "the member heard nothing before it was killed"]


def connections_break_all_the_time(pipeline: Pipeline) -> list[str]:
    """Every 20th command is cut: before it, within its bytes, after it, in turns."""
    places = ("before", "within", "after")
    faults = [
        pipeline.proxy.cut(places[number % 3], lambda _: True, nth=20 * (number + 1))
        for number in range(60)
    ]
    pipeline.start()
    return _until_struck(pipeline, faults[:9])


def the_server_is_killed_with_a_file_of_every_second(pipeline: Pipeline) -> list[str]:
    """As in the matrix, without writing the file through at every command."""
    faults = [
        pipeline.proxy.at("after", Nth("save-finished", nth), lambda _: pipeline.kill("server"))
        for nth in (4, 8)
    ]
    pipeline.start()
    return _until_struck(pipeline, faults)


def the_server_is_slow(pipeline: Pipeline) -> list[str]:
    """Every reply takes 20 ms."""
    pipeline.proxy.delay(0.02)
    pipeline.start()
    return []


def the_server_hangs(pipeline: Pipeline) -> list[str]:
    """It accepts and answers nothing for a while, in the middle of the run."""
    pipeline.start()
    lacks = pipeline.until(lambda: None if _is_announced(pipeline) else "a step", PATIENCE)
    pipeline.proxy.swallow()
    _by_and_by(lambda: False, seconds=1.0)
    pipeline.proxy.heal()
    return [f"stuck: {lacks}"] if lacks else []


def the_server_is_full(pipeline: Pipeline) -> list[str]:
    """It takes nothing for a while, in the middle of the run."""
    pipeline.start()
    lacks = pipeline.until(lambda: None if _is_announced(pipeline) else "a step", PATIENCE)
    pipeline.client.config_set("maxmemory", 1)
    _by_and_by(lambda: False, seconds=1.0)
    pipeline.client.config_set("maxmemory", 0)
    return [f"stuck: {lacks}"] if lacks else []


SCENARIOS = [
    Scenario(scenario.__name__.replace("_", " "), scenario, options)
    for scenario, options in (
        (a_worker_dies_with_the_turn, {}),
        (a_worker_stays_away_past_the_deadline, {"reducer_options": ("--step-deadline", "1.5")}),
        (a_leader_sleeps_through_its_lease, {"reducers": 2}),
        (consumers_stay_away, {}),
        (a_group_member_stays_away, {}),
        (connections_break_all_the_time, {}),
        (the_server_is_killed_with_a_file_of_every_second, {}),
        (the_server_is_slow, {}),
        (the_server_hangs, {}),
        (the_server_is_full, {}),
    )
]


def _kill_for_good(
    pipeline: Pipeline, role: str, boundary: str, when: Matches = lambda _: True
) -> None:
    """Kill it the second time that it meets the boundary."""
    rank = int(role.partition("-")[2] or 0)

    def matches(given: Command) -> bool:
        speaker = sender(given, boundary)
        speaks = speaker is None or speaker.rank == rank
        return bool(boundaries(given)[boundary]) and speaks and when(given)

    pipeline.proxy.at("after", matches, lambda _: pipeline.kill(role, for_good=True), nth=2)


def _then_release(pipeline: Pipeline, missing: Callable[[], str | None], role: str) -> list[str]:
    lacks = pipeline.until(missing, PATIENCE)
    pipeline.release(role)
    return [f"stuck: {lacks}"] if lacks else []


def _until_struck(pipeline: Pipeline, faults: list[Fault]) -> list[str]:
    def missing() -> str | None:
        missed = sum(not fault.struck.is_set() for fault in faults)
        return f"{missed} faults that did not strike" if missed else None

    lacks = pipeline.until(missing, PATIENCE)
    return [f"stuck: {lacks}"] if lacks else []


def _trainer_is_missing(pipeline: Pipeline) -> str | None:
    return None if pipeline.processes["trainer"].is_done else "the trainer has not finished"


def _read_events(pipeline: Pipeline, stream: Stream) -> list[Event]:
    log = SyncEventLog(pipeline.client, RUN)
    return [
        decode_envelope(entry.payload).event for entry in log.read(stream=stream, limit=100_000)
    ]


def _is_announced(pipeline: Pipeline) -> bool:
    return any(
        isinstance(event, StepReady) for event in _read_events(pipeline, Stream.ANNOUNCEMENTS)
    )


def _by_and_by(happened: Callable[[], bool], seconds: float = PATIENCE) -> bool:
    give_up = time.monotonic() + seconds
    while not happened() and time.monotonic() < give_up:
        time.sleep(0.01)
    return happened()
