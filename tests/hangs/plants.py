"""Table of planted hangs: how each is made of real processes, and the first cause to be named."""

from __future__ import annotations

import os
import re
import resource
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import redis

from tests.support.faulty_proxy import Proxy

from .stage import Part, Stage

REWARDS = """
import os, time

def hangs(question, answer):
    explorer = os.getppid()
    while os.getppid() == explorer:  # it leaves no process behind
        time.sleep(0.1)
    os._exit(1)

def loops(question, answer):
    explorer = os.getppid()
    while os.getppid() == explorer:
        pass
    os._exit(1)

def stops(question, answer):
    import signal
    with open(__file__ + ".pid", "w") as file:
        file.write(str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)
    return 1.0
"""
ENVIRONMENT = """
import os, time

def hangs(question, messages):
    explorer = os.getppid()
    while os.getppid() == explorer:
        time.sleep(0.1)
    os._exit(1)
"""


class Plant(NamedTuple):
    """Hang that is planted."""

    name: str
    what: str
    """The hang in words."""
    plant: Callable[[Stage], object]
    reasons: tuple[str, ...]
    """Reasons of the first cause, one of which is to be named."""
    process: str | None
    """Process that is to be named, as a pattern; None if none is at fault."""
    says: str = ""
    """Pattern of what the sentence or the object says."""
    step: int | None = None
    options: tuple[str, ...] = ()
    """Options of the server."""
    strategy: str = "unrestricted"
    """Save strategy of the run."""

    def is_named(self, document: dict[str, Any]) -> bool:
        """Return True if the first cause of an explanation names the culprit."""
        causes = document.get("causes", [])
        if not causes:
            return False
        first = causes[0]
        named = f"{first.get('sentence', '')} {first.get('what', '')}"
        return (
            first["reason"] in self.reasons
            and (
                self.process is None
                or re.fullmatch(self.process, first.get("process") or "") is not None
            )
            and re.search(self.says, named) is not None
            and (self.step is None or first.get("step") == self.step)
        )


# --- rollouts ------------------------------------------------------------------------------------


def _dispatched(stage: Stage, verdict: str = "all", url: str = "") -> Part:
    stage.reducer()
    return stage.start("trainer", 0, "rollouts", verdict, url=url).says("dispatched")


def _claimed(stage: Stage, *words: str, url: str = "", rank: int = 1) -> Part:
    _dispatched(stage)
    return stage.start("explorer", rank, *words, url=url).says("claimed")


def slow_rollout(stage: Stage) -> None:
    _claimed(stage, "slow")
    stage.start("explorer", 2, "quick")


def _reward(function: str) -> Callable[[Stage], object]:
    def plant(stage: Stage) -> None:
        path = stage.script(REWARDS)
        stage.callback(lambda: _end_stopped(Path(f"{path}.pid")))
        _claimed(stage, "reward", f"{path}:{function}")

    return plant


def _end_stopped(noted: Path) -> None:
    """End the process of a reward that stopped itself, which notices no end of its explorer."""
    with suppress(OSError):
        os.kill(int(noted.read_text()), signal.SIGKILL)


def environment(stage: Stage) -> None:
    _claimed(stage, "environment", f"{stage.script(ENVIRONMENT)}:hangs")


def reward_service(stage: Stage) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    stage.callback(listener.close)
    _claimed(stage, "service", f"http://127.0.0.1:{listener.getsockname()[1]}/")


def stopped_explorer(stage: Stage) -> None:
    _claimed(stage, "slow").stop()


def killed_explorer(stage: Stage) -> None:
    _claimed(stage, "slow").kill()


def partitioned_explorer(stage: Stage) -> None:
    network = stage.proxy()
    _claimed(stage, "slow", url=network.url)
    network.swallow()


def one_of_two_explorers(stage: Stage) -> None:
    _dispatched(stage)
    first = stage.start("explorer", 1, "slow").says("claimed")
    stage.start("explorer", 2, "slow").says("claimed")
    first.stop()


def no_explorer(stage: Stage) -> None:
    _dispatched(stage)


def idle_explorers_stopped(stage: Stage) -> None:
    stage.reducer()
    for rank in (1, 2):
        stage.start("explorer", rank, "idle").says("idle").stop()
    stage.start("trainer", 0, "rollouts").says("dispatched")


def idle_explorer_killed(stage: Stage) -> None:
    stage.reducer()
    stage.start("explorer", 1, "idle").says("idle").kill()
    stage.start("trainer", 0, "rollouts").says("dispatched")


def _refused(verdict: str) -> Callable[[Stage], object]:
    def plant(stage: Stage) -> None:
        _dispatched(stage, verdict)
        stage.start("explorer", 1, "quick").says("claimed")

    return plant


def paused_engine(stage: Stage) -> None:
    _claimed(stage, "paused")


# --- the trainer, and versions --------------------------------------------------------------------


def _waiting_for_weights(stage: Stage, *, url: str = "") -> Part:
    stage.reducer()
    trainer = stage.start("trainer", 0, "idle", url=url).says("idle")
    stage.start("explorer", 1, "weights").says("waits")
    return trainer


def busy_trainer(stage: Stage) -> None:
    _waiting_for_weights(stage)


def stopped_trainer(stage: Stage) -> None:
    _waiting_for_weights(stage).stop()


def killed_trainer(stage: Stage) -> None:
    _waiting_for_weights(stage).kill()


def partitioned_trainer(stage: Stage) -> None:
    network = stage.proxy()
    _waiting_for_weights(stage, url=network.url)
    network.swallow()


def _parts(act: Callable[[Part], object]) -> Callable[[Stage], object]:
    def plant(stage: Stage) -> None:
        stage.reducer()
        stage.start("trainer", 0, "opens", "2").says("opened")
        stage.start("explorer", 1, "weights").says("waits")
        stage.start("publisher", 0, "publishes").says("published")
        act(stage.start("publisher", 1, "computes").says("computes"))

    return plant


def missing_commit(stage: Stage) -> None:
    stage.reducer()
    stage.start("trainer", 0, "opens", "1").says("opened")
    stage.start("explorer", 1, "weights").says("waits")
    stage.start("publisher", 0, "publishes").says("published")


# --- saves ---------------------------------------------------------------------------------------


def _committed(stage: Stage, expected: int = 2, kind: str = "checkpoint") -> None:
    words = (str(stage.root), kind, str(expected), "announced")
    stage.start("trainer", 0, "commits", *words).says("committed")


def _rank(stage: Stage, rank: int, how: str, ranks: int = 2, strategy: str = "") -> Part:
    words = (str(stage.root), "checkpoint", how, str(ranks), strategy)
    return stage.start("rank", rank, *words).says("saving" if how == "hang" else "sav")


def missing_rank(stage: Stage) -> None:
    stage.reducer()
    _rank(stage, 0, "save").says("saved")
    _committed(stage)


def _saving(act: Callable[[Part], object]) -> Callable[[Stage], object]:
    def plant(stage: Stage) -> None:
        stage.reducer()
        _rank(stage, 0, "save").says("saved")
        _committed(stage)
        act(_rank(stage, 1, "hang"))

    return plant


def no_thread_count(stage: Stage) -> None:
    stage.reducer()
    trainer = stage.start("trainer", 0, "idle").says("idle")
    _rank(stage, 0, "save").says("saved")
    _rank(stage, 1, "save").says("saved")
    trainer.stop()


def fewer_saves(stage: Stage) -> None:
    stage.reducer()
    _rank(stage, 0, "save", ranks=0).says("saved")
    _committed(stage, expected=3)


def full_disk(stage: Stage) -> None:
    stage.reducer()
    _rank(stage, 0, "save").says("saved")
    words = (str(stage.root), "checkpoint", "full", "2")
    stage.start("rank", 1, *words).says("failed")
    _committed(stage)


def turn(stage: Stage) -> None:
    stage.reducer()
    _rank(stage, 0, "hang", strategy="single_process")
    words = (str(stage.root), "checkpoint", "save", "2", "single_process")
    stage.start("rank", 1, *words)
    _committed(stage)


# --- reducers and their folders -------------------------------------------------------------------


def _saved_without_reducer(stage: Stage) -> None:
    _rank(stage, 0, "save", ranks=1).says("saved")
    _committed(stage, expected=1)


def _reducers(count: int, act: Callable[[list[Part]], object]) -> Callable[[Stage], object]:
    def plant(stage: Stage) -> None:
        reducers = [stage.reducer(leads=not number) for number in range(count)]
        act(reducers)
        _saved_without_reducer(stage)

    return plant


def stopped_and_killed(reducers: list[Part]) -> None:
    reducers[1].stop()
    reducers[0].kill()


def partitioned_reducer(stage: Stage) -> None:
    network = stage.proxy()
    stage.reducer(url=network.url)
    network.swallow()
    _saved_without_reducer(stage)


def no_reducer(stage: Stage) -> None:
    _saved_without_reducer(stage)


def foreign_folder(stage: Stage) -> None:
    """Let a reducer find the folder of a run of the same name on another server."""
    other = stage.new_server("other")
    stage.open_on(other.url)
    stage.reducer(url=other.url).says("leads run")
    stage.until(lambda: any((stage.root / stage.run).glob("*")), "the folder was not marked")
    stage.reducer()
    _saved_without_reducer(stage)


def _blocked(name: str) -> Callable[[Stage], object]:
    """Return a plant in which a folder stands where the reducer writes a file."""

    def plant(stage: Stage) -> None:
        (stage.root / stage.run / name / "in the way").mkdir(parents=True)
        stage.reducer()
        _saved_without_reducer(stage)

    return plant


def full_disk_of_reducer(stage: Stage) -> None:
    stage.reducer().limit_files(0)
    _saved_without_reducer(stage)


# --- servers --------------------------------------------------------------------------------------


def stopped_server(stage: Stage) -> None:
    _waiting_for_weights(stage)
    process = stage.server._process
    assert process is not None
    os.kill(process.pid, signal.SIGSTOP)
    stage.callback(lambda: os.kill(process.pid, signal.SIGCONT))


def killed_server(stage: Stage) -> None:
    _waiting_for_weights(stage)
    stage.server.kill()


def full_server(stage: Stage) -> None:
    _waiting_for_weights(stage)
    used = int(stage.client.info("memory")["used_memory"])
    stage.client.config_set("maxmemory", used + 200_000)
    with suppress(redis.OutOfMemoryError):
        for number in range(10_000):
            stage.client.set(f"another:{number}", b"x" * 1000)
    stage.start("publisher", 1, "publishes")


def full_disk_of_server(stage: Stage) -> None:
    _waiting_for_weights(stage)
    process = stage.server._process
    assert process is not None
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (1, 1))
    with suppress(redis.RedisError):
        for number in range(3):
            stage.client.set(f"another:{number}", b"x" * 1000)


def _chunks(stage: Stage, role: str, rank: int, act: Callable[[Any], object]) -> None:
    """Let a rank publish to a server of chunks, or an explorer read there, that fails midway."""
    chunks = stage.new_server("chunks")
    network = Proxy(chunks.url)
    network.__enter__()
    stage.callback(lambda: network.__exit__(None, None, None))
    stage.reducer()
    go = stage.folder / "go"
    words = (network.url, str(go))
    if role == "weights-explorer":
        first = stage.folder / "first"
        first.touch()
        stage.start("weights-rank", 0, chunks.url, str(first)).says("published")
        stage.start(role, rank, *words).says("waits")
    else:
        stage.start(role, rank, *words).says("opened")
        stage.start("explorer", 1, "weights").says("waits")
    act(network)
    go.touch()


def chunks_not_stored(stage: Stage) -> None:
    _chunks(stage, "weights-rank", 0, lambda network: network.swallow())


def chunks_not_loaded(stage: Stage) -> None:
    _chunks(stage, "weights-explorer", 2, lambda network: network.swallow())


# --- groups and readers --------------------------------------------------------------------------


def unread_group(stage: Stage) -> None:
    stage.reducer()
    _saved_without_reducer(stage)
    stage.start("member", 0, "evaluation").says("read")


def stopped_member(stage: Stage) -> None:
    stage.reducer()
    _saved_without_reducer(stage)
    stage.start("member", 0, "evaluation").says("read").stop()


def held_checkpoint(stage: Stage) -> None:
    stage.reducer()
    _saved_without_reducer(stage)
    stage.start("reader", 0, str(stage.root)).says("holds").stop()


def collective_receiver_missing(stage: Stage) -> None:
    stage.reducer()
    stage.start("explorer", 1, "group").says("joined")
    stage.start("trainer", 0, "group").says("waits")


def collective_receiver_gone(stage: Stage) -> None:
    stage.reducer()
    for rank in (1, 2):
        part = stage.start("explorer", rank, "group").says("joined")
    part.kill()
    stage.start("trainer", 0, "group").says("waits")


def _nothing(_: object) -> None:
    pass


PLANTS = (
    Plant("slow-rollout", "an explorer generates for ever", slow_rollout, ("waits",), "explorer-1"),
    Plant("reward-hangs", "a reward function never returns", _reward("hangs"), ("waits",),
          r"process \d+", "explorer-1 waits for the reward .*mine.py:hangs"),
    Plant("reward-loops", "a reward function computes for ever", _reward("loops"), ("waits",),
          r"process \d+", "explorer-1 waits for the reward .*mine.py:loops"),
    Plant("reward-stopped", "the process of a reward is stopped", _reward("stops"), ("waits",),
          r"process \d+", "explorer-1 waits for the reward .*mine.py:stops"),
    Plant("environment-hangs", "a tool of an episode never replies", environment, ("waits",),
          r"process \d+", "explorer-1 waits for a reply of environment"),
    Plant("reward-service", "a reward service accepts and never answers", reward_service,
          ("waits",), "explorer-1", "the reward service http"),
    Plant("explorer-stopped", "an explorer with claims is stopped", stopped_explorer,
          ("stopped",), "explorer-1", "rollouts"),
    Plant("explorer-killed", "an explorer with claims is killed", killed_explorer,
          ("ended",), "explorer-1", "rollouts"),
    Plant("explorer-cut-off", "an explorer with claims is cut off from the server",
          partitioned_explorer, ("waits",), "explorer-1", "last told the log anything"),
    Plant("one-of-two-stopped", "one of two explorers with claims is stopped",
          one_of_two_explorers, ("stopped",), "explorer-1"),
    Plant("no-explorer", "no explorer was started", no_explorer, ("no-explorer",), "trainer-0",
          "No explorer has joined"),
    Plant("explorers-stopped", "both explorers are stopped before they claim",
          idle_explorers_stopped, ("stopped",), r"explorer-[12]", "not claimed"),
    Plant("explorer-killed-idle", "the only explorer is killed before it claims",
          idle_explorer_killed, ("ended",), "explorer-1", "not claimed"),
    Plant("all-dropped", "a filter drops every prompt", _refused("filtered"), ("waits",),
          None, "answers were filtered"),
    Plant("all-stale", "every answer is older than the bound on staleness", _refused("stale"),
          ("waits",), None, "answers were stale"),
    Plant("paused-engine", "the engine of an explorer with claims is paused", paused_engine,
          ("waits",), "explorer-1", "its paused engine"),
    Plant("trainer-busy", "the trainer computes and publishes nothing", busy_trainer, ("waits",),
          "trainer-0", "the weights of step 1"),
    Plant("trainer-stopped", "the trainer is stopped", stopped_trainer, ("stopped",),
          "trainer-0", "the weights of step 1"),
    Plant("trainer-killed", "the trainer is killed", killed_trainer, ("ended",), "trainer-0",
          "the weights of step 1"),
    Plant("trainer-cut-off", "the trainer is cut off from the server", partitioned_trainer,
          ("waits",), "trainer-0", "last told the log anything"),
    Plant("part-missing", "a rank computes on and publishes no part", _parts(_nothing),
          ("missing",), "actor-1", "the part of rank 1", 1),
    Plant("part-stopped", "a rank is stopped before it publishes its part",
          _parts(lambda part: part.stop()), ("stopped",), "actor-1", "the part of rank 1", 1),
    Plant("part-killed", "a rank is killed before it publishes its part",
          _parts(lambda part: part.kill()), ("ended",), "actor-1", "the part of rank 1", 1),
    Plant("no-commit", "the trainer never commits the weights of a step", missing_commit,
          ("missing",), "trainer-0", "the trainer's commit", 1),
    Plant("save-missing", "a rank makes no save of a step", missing_rank, ("missing",), "actor-1",
          "not started", 1),
    Plant("save-hangs", "a save blocks on the file system", _saving(_nothing), ("missing", "waits"),
          "actor-1", "model", 1),
    Plant("save-stopped", "a rank is stopped in a save", _saving(lambda part: part.stop()),
          ("stopped",), "actor-1", "model", 1),
    Plant("save-killed", "a rank is killed in a save", _saving(lambda part: part.kill()),
          ("ended",), "actor-1", "model", 1),
    Plant("no-thread-count", "the trainer is stopped before it registers the saves of a step",
          no_thread_count, ("stopped",), "trainer-0", "a registration of how many saves", 1),
    Plant("fewer-saves", "fewer saves are made than the trainer registered", fewer_saves,
          ("missing",), None, "2 of 3 saves", 1),
    Plant("disk-full", "the disk is full in a save", full_disk, ("failed",), "actor-1",
          "No space left", 1),
    Plant("turn-held", "a save holds the turn that another waits for", turn,
          ("missing", "waits"), "actor-0", "model", 1, strategy="single_process"),
    Plant("reducer-stopped", "the reducer is stopped",
          _reducers(1, lambda reducers: reducers[0].stop()), ("no-reducer", "reducer-behind"),
          "reducer-0", "is stopped"),
    Plant("reducer-killed", "the reducer is killed",
          _reducers(1, lambda reducers: reducers[0].kill()), ("no-reducer",),
          "reducer-0", "has ended"),
    Plant("reducers-lost", "the leader is killed, and the other reducer is stopped",
          _reducers(2, stopped_and_killed), ("no-reducer",), "reducer-0"),
    Plant("reducer-cut-off", "the reducer is cut off from the server", partitioned_reducer,
          ("no-reducer",), "reducer-0", "runs"),
    Plant("no-reducer", "no reducer was started", no_reducer, ("no-reducer",), None),
    Plant("foreign-folder", "the run's folder is another log's", foreign_folder,
          ("no-reducer", "reducer-behind"), "reducer-0", "another"),
    Plant("reducer-disk-full", "the reducer's disk is full", full_disk_of_reducer, ("waits",),
          "reducer-0", "File too large"),
    Plant("folder-in-the-way", "the reducer cannot write an iteration file",
          _blocked("latest_checkpointed_iteration.txt"), ("waits",), "reducer-0",
          "latest_checkpointed_iteration.txt"),
    Plant("server-stopped", "the server of the log is stopped", stopped_server, ("error",), None,
          "no Redis server answers"),
    Plant("server-killed", "the server of the log is killed", killed_server, ("error",), None,
          "no Redis server answers"),
    Plant("server-full", "the server's memory is full", full_server, ("server-full",), None,
          "memory is full"),
    Plant("server-disk-full", "the server cannot write its append-only file",
          full_disk_of_server, ("server-read-only",), None, "append-only",
          options=("--appendfsync", "everysec")),
    Plant("chunks-not-stored", "the server of chunks hangs while a rank publishes",
          chunks_not_stored, ("waits",), "actor-0", "to be stored"),
    Plant("chunks-not-loaded", "the server of chunks hangs while a late joiner loads",
          chunks_not_loaded, ("waits",), "explorer-2", "the bytes of the weights of step 1"),
    Plant("group-unread", "a consumer group acknowledges nothing", unread_group,
          ("unread-group",), None, "evaluation"),
    Plant("member-stopped", "the member of a consumer group is stopped", stopped_member,
          ("unread-group",), None, "evaluation"),
    Plant("checkpoint-held", "a stopped reader holds a checkpoint", held_checkpoint,
          ("held-checkpoint",), None, "step 1", 1),
    Plant("receiver-missing", "an explorer of a collective group was not started",
          collective_receiver_missing, ("waits",), None, "2 explorers in the collective group"),
    Plant("receiver-gone", "an explorer of a collective group is killed before it is formed",
          collective_receiver_gone, ("ended", "waits"), "explorer-2|trainer-0"),
)  # fmt: skip
