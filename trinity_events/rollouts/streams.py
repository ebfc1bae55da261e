"""Streams of requests and answers: their names, and the scripts that write them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import redis
import redis.asyncio

from trinity_schemas import RunKeys

from ..errors import LogLost, StaleEpoch
from ..log.scripts import Scripts
from ..server import Deadline

T = TypeVar("T")

LONGEST_BLOCK = 5.0
"""Seconds that one read blocks at most; shorter than the socket's timeout."""

_KEYS = {
    **dict.fromkeys(("begin", "issue", "renew", "forget"), ("epoch", "rollouts")),
    **dict.fromkeys(("answer", "fail"), ("epoch", "rollouts", "experiences")),
    "free": ("epoch", "experiences"),
}
"""Keys of the scripts that check the caller's epoch."""


class RolloutStreams:
    """Streams of requests and answers of a run, written in the name of one epoch.

    The consumer group bears the epoch in its name. A claim of an explorer of an older epoch is
    thus refused, although no script can make a blocking read.
    """

    def __init__(self, client: redis.asyncio.Redis, run_id: str, epoch: int) -> None:
        self.client: Any = client
        self.run_id = run_id
        self.epoch = epoch
        self.keys = RunKeys.of(run_id)
        self.group = f"explorers-{epoch}"
        self._scripts = Scripts(client, __package__)

    async def write(self, wait: Deadline, script: str, *args: object) -> Any:
        """Run a script that first checks the epoch; retry while the server is away.

        Raises:
            StaleEpoch: The run has a newer epoch; nothing was written.
            LogLost: The server does not know the epoch.
        """
        keys = [getattr(self.keys, key) for key in _KEYS[script]]
        return await self.ask(wait, lambda: self._scripts(script, keys=keys, args=self._args(args)))

    async def look(self, wait: Deadline, limit: int) -> Any:
        """Return the number of requests in the stream and the claims, if there is a group."""
        keys, args = [self.keys.rollouts], [self.group, limit]
        return await self.ask(wait, lambda: self._scripts("look", keys=keys, args=args))

    async def begin(self, wait: Deadline, *, anew: bool) -> int:
        """Make the epoch's group; return the number of the last request of this epoch."""
        last = await self.write(wait, "begin", self.group, int(anew))
        epoch, number = last.decode().split("-")
        return int(number) if int(epoch) == self.epoch else 0

    async def ask(self, wait: Deadline, question: Callable[[], Awaitable[T]]) -> T:
        """Return the server's answer; retry while it is away. Raises as :meth:`write`."""
        try:
            return await wait.ask(question)
        except redis.ResponseError as error:
            raise self._refusal(error) or error from None

    def request_id(self, number: int) -> str:
        """Return the entry id of this epoch's request with a number."""
        return f"{self.epoch}-{number}"

    def _args(self, args: Sequence[object]) -> list[Any]:
        return [self.epoch, *args]

    def _refusal(self, error: redis.ResponseError) -> Exception | None:
        code, _, present = str(error).partition(" ")
        if code != "STALEEPOCH":
            return None
        found = int(present.split()[0])
        if found > self.epoch:
            return StaleEpoch(
                f"run {self.run_id} was opened anew as epoch {found}: this process is of epoch "
                f"{self.epoch}, and ends"
            )
        return LogLost(
            f"the server holds epoch {found} of run {self.run_id}, and this process is of epoch "
            f"{self.epoch}: the server lost data, so open the run anew"
        )


def is_without_group(error: redis.ResponseError) -> bool:
    """Return True if a read failed because its consumer group does not exist."""
    return str(error).startswith("NOGROUP")
