"""Group of workers over Ray actors: calls to all ranks, answers, errors and deaths."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Generator, Sequence
from typing import Any, NamedTuple

import anyio
import ray
from anyio import to_thread
from typing_extensions import deprecated

from trinity_events.errors import DeadlineExceeded, TrinityError
from trinity_schemas import Process

from ..runtime.collective_errors import CollectiveBroken
from ..runtime.process_exit import ExitWatch, format_process
from .dispatch import Dealt, Dispatch, deal
from .ranks import NOWHERE, RankTable
from .registered import Registered, make_method_table
from .wire import pack, unpack

DEATH_KNOWN = 5.0
"""Seconds within which Ray knows that a worker is dead, after other ranks have noticed."""


class WorkerDied(TrinityError):
    """A worker process ended while it was needed.

    Attributes:
        worker: Name and process of the worker.
        method: Method that it executed.
        where: Clause that says in which work it died; that of the method alone by default.
        how: Signal or status of its end; empty if that is not known.
    """

    worker: str
    method: str
    where: str
    how: str = ""
    text = "{worker} {where}{_how}"

    @property
    def _how(self) -> str:
        return f": {self.how}" if self.how else ""


class UnknownMethod(TrinityError, AttributeError):
    """The workers of a group have no registered method of that name.

    Attributes:
        kind: Class of the workers.
        method: The name.
    """

    kind: str
    method: str
    text = "{kind} has no registered method {method}: mark it with register()"


class WouldBlock(TrinityError):
    """A method that blocks is called in an event loop.

    Attributes:
        method: Its name.
    """

    method: str
    text = (
        "{method} would block the event loop that calls it: await the group's call({method!r}, "
        "...) there"
    )


class WorkerGroup:
    """Workers of one kind, each a Ray actor and one rank.

    The group has the registered methods of its workers. ``group.update_actor(batch)`` deals out the
    batch, waits and returns the result, or returns :class:`Answers` if the method does not block.
    In an event loop ``await group.call("update_actor", batch)`` waits without blocking the loop.

    Args:
        kind: Class of the workers, with methods marked by :func:`.registered.register`; or a base
            of it, where :meth:`load_methods` receives the methods of the class.
        workers: Handles of the actors, by rank.
        name: Role of the workers, which errors name as ``actor-1``.
        format_death: Returns the words after a worker's name in errors, from the name of a method.
        timeout: Maximum seconds of a call; None leaves it to the deadlines of the ranks.
    """

    def __init__(
        self,
        kind: type,
        workers: Sequence[Any],
        *,
        name: str = "worker",
        format_death: Callable[[str], str] = lambda method: f"died in {method}",
        timeout: float | None = None,
    ) -> None:
        self.workers = list(workers)
        self._methods = make_method_table(kind)
        self._name = name
        self._format_death = format_death
        self._timeout = timeout
        self._table: RankTable | None = None
        self._processes: list[Process] = []
        self._deaths = ExitWatch()

    def __len__(self) -> int:
        """Return the number of ranks."""
        return len(self.workers)

    async def watch(self) -> None:
        """Record the processes of all ranks, so that errors name them and how they ended."""
        self._processes = await self.call("process")
        for process in self._processes:
            self._deaths.watch(process)

    async def load_methods(self) -> None:
        """Replace the methods of the group's class by those that rank 0 reports of its own.

        The caller then needs no libraries of its workers. Their class is derived from `Worker`.
        """
        self._methods = await self.call("method_table")

    async def call(self, method: str, /, *args: Any, **options: Any) -> Any:
        """Call a registered method, and return its result.

        Raises:
            WorkerDied: if a rank is dead, whatever other ranks say of it.
            DeadlineExceeded: if ranks have not answered in time.
        """
        await self._find_places(self._get_registered(method).dispatch_mode)
        return await self._begin(method, args, options)

    @deprecated("WorkerGroup.ask is called call")
    async def ask(self, method: str, /, *args: Any, **options: Any) -> Any:
        """Call a registered method as :meth:`call`."""
        return await self.call(method, *args, **options)

    def __getattr__(self, method: str) -> Callable[..., Any]:
        """Return a registered method as a function that calls the ranks."""
        # copy and pickle look for special methods, also before __init__ has set the attributes.
        if method.startswith("_"):
            raise AttributeError(method)
        registered = self._get_registered(method)

        def call(*args: Any, **options: Any) -> Any:
            _refuse_event_loop(method)
            if registered.dispatch_mode.deals_out and self._table is None:
                anyio.run(self._find_places, registered.dispatch_mode)
            answers = self._begin(method, args, options)
            return answers.result() if registered.blocking else answers

        return call

    def kill(self) -> None:
        """End the processes of all ranks."""
        for worker in self.workers:
            ray.kill(worker)
        self.workers = []

    def _get_registered(self, method: str) -> Registered:
        try:
            return self._methods.methods[method]
        except KeyError:
            raise UnknownMethod(self._methods.kind, method) from None

    async def _find_places(self, mode: Dispatch) -> None:
        """Request the places of all ranks, once, for a mode that deals out by them."""
        if mode.deals_out and self._table is None:
            self._table = await self._begin("rank_info", (), {})

    def _translate(
        self, method: str, args: tuple[Any, ...]
    ) -> tuple[tuple[Any, ...], Callable[[Any], Any]]:
        """Return the arguments as the workers take them, and what makes the caller's result."""
        del method
        return args, lambda result: result

    def _begin(self, method: str, args: tuple[Any, ...], options: dict[str, Any]) -> Answers:
        registered = self._get_registered(method)
        args, translate_result = self._translate(method, args)
        dealt = deal(registered.dispatch_mode, self._table or [NOWHERE] * len(self), args)
        if registered.all_answer:
            dealt = dealt._replace(answering=tuple(range(len(dealt.ranks))), dealing=None)
        shares = _pack_shares(dealt)
        given = {name: pack(option) for name, option in options.items()}
        answering = set(dealt.answering)
        # All ranks are called before any is waited for: a method may be collective.
        references = {
            rank: self.workers[rank].execute.remote(
                method, rank in answering, *shares[share], **given
            )
            for rank, share in enumerate(dealt.ranks)
        }

        async def answer(rank: int) -> Any:
            try:
                return unpack(await references[rank])
            except ray.exceptions.RayActorError:
                raise await self._death(rank, method) from None

        call = _Call(method, registered.settles, dealt, answer, self._format_rank, translate_result)
        return Answers(call, self._timeout)

    async def _death(self, rank: int, method: str) -> WorkerDied:
        process = self._processes[rank] if self._processes else None
        # In a thread, as it may wait for the kernel's word for VERDICT seconds.
        how = "" if process is None else await to_thread.run_sync(self._deaths.wait, process)
        return WorkerDied(self._format_rank(rank), method, self._format_death(method), how)

    def _format_rank(self, rank: int) -> str:
        process = self._processes[rank] if self._processes else None
        return format_process(f"{self._name}-{rank}", process)


class _Call(NamedTuple):
    """Call to the ranks that is under way."""

    method: str
    settles: bool
    """True if every rank ends before an error is raised."""
    dealt: Dealt
    answer: Callable[[int], Awaitable[Any]]
    """Waits for the answer of a rank."""
    format_rank: Callable[[int], str]
    """Returns the name of a rank."""
    translate_result: Callable[[Any], Any]
    """Makes the caller's result from the collected one."""


class Answers:
    """Answers to a call that is under way: await them, or take their result."""

    def __init__(self, call: _Call, timeout: float | None) -> None:
        self._call = call
        self._timeout = timeout

    def __await__(self) -> Generator[Any, None, Any]:
        """Wait for the result."""
        return self._collect().__await__()

    def result(self) -> Any:
        """Wait for the result, outside of an event loop."""
        _refuse_event_loop(self._call.method)
        return anyio.run(self._collect)

    async def _collect(self) -> Any:
        """Return the result, or raise the first error: a death before what follows it.

        A rank that dies fails the others, sooner than it is known to be dead.
        """
        call = self._call
        answers: dict[int, Any] = {}
        errors: dict[int, Exception] = {}
        # Room for all ranks: the reader stops at the first error, and no sender may wait then.
        ended, next_end = anyio.create_memory_object_stream[int](len(call.dealt.ranks))

        async def receive(rank: int) -> None:
            try:
                answers[rank] = await call.answer(rank)
            # Kept, and raised below: which error is the cause is known only when several are there.
            except Exception as error:
                errors[rank] = error
            ended.send_nowait(rank)

        with ended, next_end, anyio.move_on_after(self._timeout):
            async with anyio.create_task_group() as calls:
                for rank in range(len(call.dealt.ranks)):
                    calls.start_soon(receive, rank)
                pending = len(call.dealt.ranks)
                while pending and (call.settles or not errors):
                    await next_end.receive()
                    pending -= 1
                # A broken collective is reported at once, and Ray finds out about the death behind
                # it later.
                if pending and all(map(_may_follow_a_death, errors.values())):
                    before = len(errors)
                    with anyio.move_on_after(DEATH_KNOWN):
                        while pending and len(errors) == before:
                            await next_end.receive()
                            pending -= 1
                calls.cancel_scope.cancel()
        failed = [errors[rank] for rank in sorted(errors)]
        if failed:
            raise failed[0] if call.settles else min(failed, key=_is_no_death)
        # The block above ended by its timeout, without an error.
        if len(answers) < len(call.dealt.ranks):
            raise DeadlineExceeded(self._format_missing(answers), self._timeout or 0.0)
        collected = call.dealt.collect([answers[rank] for rank in sorted(answers)])
        return call.translate_result(collected)

    def _format_missing(self, answers: Collection[int]) -> str:
        call = self._call
        late = (rank for rank in range(len(call.dealt.ranks)) if rank not in answers)
        names = ", ".join(map(call.format_rank, late))
        return f"no answer to {call.method} came from {names}"


def _pack_shares(dealt: Dealt) -> list[tuple[Any, ...]]:
    """Return the arguments of each share as they are sent: once, where several ranks get them."""
    shares = [tuple(map(pack, share)) for share in dealt.arguments]
    # Each share goes to one rank: Ray stores it with the call.
    if len(shares) == len(dealt.ranks) or not dealt.dealing:
        return shares
    return [tuple(map(ray.put, share)) for share in shares]


def _refuse_event_loop(method: str) -> None:
    try:
        # anyio.run() would refuse as well, in a text that names no way out.
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise WouldBlock(method)


def _is_no_death(error: BaseException) -> bool:
    return not isinstance(error, WorkerDied)


def _may_follow_a_death(error: BaseException) -> bool:
    """Return True for what a rank raises when another has died in a collective."""
    return isinstance(error, CollectiveBroken) or not isinstance(error, TrinityError)
