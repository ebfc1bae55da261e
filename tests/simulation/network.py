"""What lies between a process and the server: time, and everything that goes wrong in it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Any

import anyio
import redis

from tests.simulation.plan import Fault
from trinity_events.log import MemoryEventLog, Stream

if TYPE_CHECKING:
    from tests.simulation.world import World


class Process:
    """One life of a process: may be killed, which it does not notice, or stand still."""

    def __init__(self, world: World, name: str, epoch: int = 0) -> None:
        self.world = world
        self.name = name
        self.epoch = epoch
        """Of a worker: the one that it was started in."""
        self.scope = anyio.CancelScope()
        self.dead = False
        self.stands_until = 0.0

    def kill(self) -> None:
        """End it where it is. What it still does to put things in order reaches nobody."""
        self.dead = True
        self.scope.cancel()

    def stall(self, seconds: float) -> None:
        """Let it stand still, as a stopped process does: time passes, and it does nothing."""
        now = anyio.current_time()
        self.stands_until = now + seconds
        self.world.hampered[self.name] = self.stands_until


class Line:
    """The run's log as one process has it: each call may be late, lost, or its last.

    Has what the log has. What is done at once there, from threads, is a call here as well.
    """

    def __init__(self, world: World, process: Process) -> None:
        self.run_id = world.log.run_id
        self.keys = world.log.keys
        self.process = process
        self._world = world
        self._log: MemoryEventLog = world.log
        self._random = world.chance(process.name)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._log, name)
        if not inspect.iscoroutinefunction(method):
            return method

        async def call(*args: Any, **kwargs: Any) -> Any:
            return await self._call(name, method, args, kwargs)

        setattr(self, name, call)
        return call

    async def renew_heartbeat(self, incarnation: str, lease: float) -> None:
        """The process is alive, and will be for a lease."""
        await self._call("beat", _soon(self._log.renew_heartbeat_now), (incarnation, lease), {})

    async def clear_heartbeat(self, incarnation: str) -> None:
        """The process has nothing more to be failed for."""
        await self._call("rest", _soon(self._log.clear_heartbeat_now), (incarnation,), {})

    async def granted(self, save_id: str, seconds: float) -> bool:
        """Wait until a save's turn has come."""
        granted: bool = await self._call("granted", self._granted, (save_id,), {"seconds": seconds})
        return granted

    async def _granted(self, save_id: str, *, seconds: float) -> bool:
        give_up = anyio.current_time() + seconds
        while True:
            after = self._log.last_id_now(Stream.ANNOUNCEMENTS)
            if self._log.granted_now(save_id, 0):
                return True
            remaining = give_up - anyio.current_time()
            if remaining <= 0 or not await self._log.read_blocking(
                {Stream.ANNOUNCEMENTS: after}, seconds=remaining
            ):
                return False

    async def _call(
        self, name: str, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        fault = self._world.next_fault(self.process.name, name)
        await self._travel()
        await self._suffer(fault, "killed", "stalled", "refused")
        result = await self._on_server(method, args, kwargs)
        self._world.saw(self.process, name, args, result)
        await self._suffer(fault, "killed-after", "stalled-after", "lost")
        await self._travel()
        return result

    async def _travel(self) -> None:
        """Time on the wire, and until the process is there to send or to receive."""
        if self.process.dead:
            raise redis.ConnectionError("the process is no more")
        seconds = self._random.random()
        if seconds > 0.5:
            # Mostly soon, at times as late as it gets.
            await anyio.sleep(0.001 * seconds + self._world.plan.slow * seconds**8)
        while (stands := self.process.stands_until - anyio.current_time()) > 0:
            await anyio.sleep(stands)

    async def _suffer(self, fault: Fault | None, kill: str, stall: str, fail: str) -> None:
        if fault is None:
            return
        if fault.what == kill:
            self.process.kill()
            await anyio.sleep_forever()
        elif fault.what == stall:
            self.process.stall(fault.seconds)
            await self._travel()
        elif fault.what == fail:
            raise redis.ConnectionError(f"the connection failed: {fault}")

    async def _on_server(
        self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        away, comes = self._world.server_away()
        if away:
            raise redis.ConnectionError("connection refused")
        wait = kwargs.get("seconds", 0.0)
        if wait <= comes:
            return await method(*args, **kwargs)
        # The server goes away in the middle of the wait.
        result = await method(*args, **{**kwargs, "seconds": comes})
        if result:
            return result
        raise redis.ConnectionError("connection closed by server")


def _soon(method: Callable[..., Any]) -> Callable[..., Any]:
    async def call(*args: Any) -> Any:
        return method(*args)

    return call


def chance(seed: int, name: str) -> Random:
    """Chance of one process's own: what befalls the others does not change it."""
    return Random(f"{seed}/{name}")
