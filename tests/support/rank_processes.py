"""Processes that stay for the whole test session, and run functions as the ranks of a group.

Importing torch and megatron-core takes seconds, so it is paid for once: the processes are forked
from one that has done so. A group of two uses the first two of the four.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

PRELOADED = [
    "mbridge",
    "megatron.core.dist_checkpointing",
    "megatron.core.pipeline_parallel",
    "tests.support.megatron_ranks",
]
GROUP_TIMEOUT = timedelta(seconds=120)
ANSWER_TIMEOUT = 240.0
"""Seconds that a rank has for one function; its imports take a minute on a loaded machine."""


@dataclass
class Rank:
    """What one rank holds between two commands."""

    number: int
    world: int = 0
    objects: SimpleNamespace = field(default_factory=SimpleNamespace)
    """Whatever the functions of a test leave there for each other."""
    exits: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    """Closed when the rank leaves its group."""


class RankProcesses:
    """Processes that run functions, each given its :class:`Rank` first.

    Functions are pickled by name, so they are the test modules' own.
    """

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        # What is preloaded may look for a GPU, and a process that was forked after that has none.
        gpu = shutil.which("nvidia-smi") is not None
        self._context = multiprocessing.get_context("spawn" if gpu else "forkserver")
        if not gpu:
            self._context.set_forkserver_preload(PRELOADED)
        self._pipes: list[Any] = []
        self._processes: list[Any] = []
        self._world = 0
        self._unread: dict[int, Callable[..., Any]] = {}
        """Rank to the answer that it owes, or that no test has read."""
        self._folder = tempfile.TemporaryDirectory(prefix="trinity-ranks-")
        self._meetings = 0

    def group(self, world: int, timeout: timedelta = GROUP_TIMEOUT) -> RankGroup:
        """Form a group of the first processes, over Gloo or NCCL; the one before is left."""
        self.start(world)
        self.leave()
        self._meetings += 1
        place = Path(self._folder.name, str(self._meetings)).as_uri()
        group = RankGroup(self, world)
        group(_join, "nccl" if self.device == "cuda" else "gloo", world, place, timeout)
        self._world = world
        return group

    def leave(self) -> None:
        """Let the present group's ranks leave it; where one has died, others take all places."""
        if self._world:
            answers = RankGroup(self, self._world).answers(_leave)
            faults = [answer for answer in answers if isinstance(answer, BaseException)]
            self._world = 0
            if any(isinstance(answer, ProcessLookupError) for answer in faults):
                self.end()
            elif faults:
                raise faults[0]

    def ask(self, rank: int, function: Callable[..., Any], *args: Any) -> Callable[..., Any]:
        """Start the function on one rank; the answer is what it returns, or raises what it raised.

        An answer that an earlier test has left behind is not taken for this one's.
        """
        if (unread := self._unread.pop(rank, None)) is not None:
            collect([unread])
        pipe = self._pipes[rank]

        def receive(timeout: float = ANSWER_TIMEOUT) -> Any:
            self._unread.pop(rank, None)
            if not pipe.poll(timeout):
                self.end()  # it would not hear of the next test either
                raise TimeoutError(f"rank {rank} did not answer {function}")
            try:
                answer = pickle.loads(pipe.recv_bytes())
            except (EOFError, ConnectionResetError):  # reset, when it had not read all
                answer = ProcessLookupError(f"rank {rank} died in {function}, or before")
            if isinstance(answer, BaseException):
                raise answer
            return answer

        with contextlib.suppress(BrokenPipeError):  # it died: reading says so
            pipe.send_bytes(pickle.dumps((function, args)))
        self._unread[rank] = receive
        return receive

    def call(self, ranks: Iterable[int], function: Callable[..., Any], *args: Any) -> list[Any]:
        """Return what the function returns on each rank; raise what it raised on one."""
        return results([self.ask(rank, function, *args) for rank in ranks])

    def call_alone(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return what the function returns in a process that is a rank of no group."""
        self.leave()
        self.start(1)
        return self.ask(0, function, *args)()

    def pid(self, rank: int) -> int:
        """The process's id."""
        return self._processes[rank].pid

    def close(self) -> None:
        """End the processes, for good."""
        self.end()
        self._folder.cleanup()

    def end(self) -> None:
        """End the processes; others take their places when they are needed."""
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.kill()
            process.join()
            pipe.close()
        self._processes, self._pipes, self._world = [], [], 0
        self._unread.clear()

    def start(self, world: int) -> None:
        """Start processes until there are so many."""
        for rank in range(len(self._processes), world):
            ours, theirs = self._context.Pipe()
            process = self._context.Process(
                target=_serve, args=(theirs, rank, self.device), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)


class RankGroup:
    """The ranks of one process group."""

    def __init__(self, processes: RankProcesses, world: int) -> None:
        self.processes = processes
        self.world = world

    def __call__(self, function: Callable[..., Any], *args: Any, **keywords: Any) -> list[Any]:
        """What the function returns on each rank; raises what it raised on one."""
        return self.processes.call(range(self.world), partial(function, **keywords), *args)

    def answers(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What the function returned or raised on each rank."""
        return collect([self.processes.ask(rank, function, *args) for rank in range(self.world)])


def collect(pending: Iterable[Callable[[], Any]]) -> list[Any]:
    """Return what each rank returned or raised, once all have answered."""
    answers: list[Any] = []
    for answer in pending:
        try:
            answers.append(answer())
        except Exception as error:
            answers.append(error)
    return answers


def results(pending: Iterable[Callable[[], Any]]) -> list[Any]:
    """Return what each rank returned; raise what one raised, once all have answered."""
    answers = collect(pending)
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return answers


def _serve(pipe: Any, number: int, device: str) -> None:
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    else:  # so that NCCL takes several ranks on one GPU: each seems to be on a host of its own
        os.environ |= {"NCCL_HOSTID": f"rank-{number}", "NCCL_SOCKET_IFNAME": "lo"}
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # deterministic algorithms need it
    import torch

    torch.set_num_threads(1)
    rank = Rank(number)
    with contextlib.suppress(EOFError):
        while True:
            function, args = pickle.loads(pipe.recv_bytes())
            try:
                answer = function(rank, *args)
            except Exception as error:
                error.add_note(traceback.format_exc())
                answer = error
            # As plain bytes: torch would hand tensors over through shared memory.
            pipe.send_bytes(pickle.dumps(answer))


def _join(rank: Rank, backend: str, world: int, place: str, timeout: timedelta) -> None:
    import torch.distributed as dist

    dist.init_process_group(
        backend, init_method=place, rank=rank.number, world_size=world, timeout=timeout
    )
    rank.world = world


def _leave(rank: Rank) -> None:
    import torch.distributed as dist

    rank.exits.close()
    rank.objects = SimpleNamespace()
    if "megatron.core" in sys.modules:  # a test may have joined a layout without an engine
        from trinity_workers.engines.megatron import leave

        leave()
    dist.destroy_process_group()
