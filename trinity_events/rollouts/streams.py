"""Streams of requests and answers: their names, and the scripts that write them."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import anyio
import redis
import redis.asyncio

from trinity_schemas import MAX_EVENT_BYTES, RunKeys
from trinity_schemas.identity import LONGEST_NAME

from ..errors import DeadlineExceeded, EpochLost, LogExhausted, StaleEpoch
from ..log.redis.key_errors import is_exhausted, wrong_type
from ..log.redis.scripts import Scripts
from ..server import Deadline

T = TypeVar("T")

LONGEST_BLOCK = 5.0
"""Seconds that one read blocks at most; shorter than the socket's timeout."""

SUPERSEDED = "superseded"
"""Reason of an explorer that gives a request back, as it cannot get the request's exact version."""

ABORTED = "aborted"
"""Reason of an explorer that gives a request back, as a version cut its answer short."""

EXCLUDED = "excluded"
"""Reason to issue a request again whose explorer is excluded; an explorer gives it as its own."""

MALFORMED = "malformed"
"""Reason to issue a request again whose answer was malformed."""

PAYLOAD_LOST = "payload-lost"
"""Reason to issue a request again whose answer came, and whose payload is gone."""

UNAVAILABLE = "unavailable"
"""Reason to issue a request again for which something failed that its answer depends on."""

UNCLAIMABLE = "unclaimable"
"""Reason to issue a request again that was delivered and has no claim: it is in no further read."""

ANSWERS_AT_ONCE = 256
"""Maximum samples of one read."""
BYTES_AT_ONCE = 16 << 20
"""Bytes of answers from which on one read has no further one: decoded, they take ten times that."""
_ANSWER_FIELDS = (
    *(b"e", b"r", b"failed", b"reason", b"explorer", b"error"),
    *(b"dependency", b"unreachable"),
)
"""Fields of an entry of the answers; others are no part of a message."""
_KEYS = {
    **dict.fromkeys(("issue", "renew", "leave"), ("epoch", "rollouts")),
    **dict.fromkeys(("begin", "answer", "fail"), ("epoch", "rollouts", "experiences")),
    **dict.fromkeys(("free", "mend"), ("epoch", "experiences")),
}
"""Keys of the scripts that check the caller's epoch."""


def evaluation_keys(run_id: str) -> RunKeys:
    """Return the keys of a run whose requests and answers are those of its evaluations."""
    keys = RunKeys.of(run_id)
    return keys._replace(rollouts=keys.evaluations, experiences=keys.judged)


class AnswersServerFull(DeadlineExceeded):
    """The server had no memory for requests or answers until a deadline.

    Attributes: as those of :class:`.DeadlineExceeded`.
    """

    text = (
        f"{DeadlineExceeded.text}; give the server more memory than rollouts.max_bytes "
        "(maxmemory), or set rollouts.max_bytes below what it has left for answers"
    )


class SeenClaim(NamedTuple):
    """Claim of a request, as the server holds it."""

    explorer: str
    idle: float
    """Seconds since it was made or renewed."""


class RequestEntry(NamedTuple):
    """Entry of a request."""

    entry_id: str
    payload: bytes


class StreamSnapshot(NamedTuple):
    """Requests and claims at one moment."""

    uptime: float
    """Seconds since the server was started."""
    numbers: set[int]
    """Numbers of the requests that are in the stream."""
    claims: dict[int, SeenClaim]
    group_exists: bool
    """False also if the group has moved past the newest request, and would deliver none."""
    unclaimable: frozenset[int] = frozenset()
    """Numbers of requests without a claim that the group gives to no explorer any more."""


class RolloutStreams:
    """Streams of requests and answers of a run, written in the name of one epoch.

    The consumer group bears the epoch in its name. A claim of an explorer of an older epoch is
    thus refused, although no script can make a blocking read.

    Args:
        client: Client of the server of the run's log.
        run_id: The run.
        epoch: The epoch.
        slow: Seconds beyond which a call counts as an outage of the server. The client may have
            sent a command again, without a word of it.
        keys: Keys with the streams; by default those of the run's rollouts.
    """

    def __init__(
        self,
        client: redis.asyncio.Redis,
        run_id: str,
        epoch: int,
        *,
        slow: float = math.inf,
        keys: RunKeys | None = None,
    ) -> None:
        self.client: Any = client
        self.run_id = run_id
        self.epoch = epoch
        self.keys = keys or RunKeys.of(run_id)
        self.group = f"explorers-{epoch}"
        self.answers_since = -math.inf
        """Time since which the server has answered without an outage."""
        self._cut_off = False
        """True from an outage until the server answers."""
        self._slow = slow
        self._scripts = Scripts(client, __package__)

    async def write(self, wait: Deadline, script: str, *args: object) -> Any:
        """Run a script that first checks the epoch; retry while the server is away.

        Raises:
            StaleEpoch: The run has a newer epoch; nothing was written.
            LogLost: The server does not know the epoch.
        """
        # Declared keys, as a cluster and the access rules require of scripts.
        keys = [getattr(self.keys, key) for key in _KEYS[script]]
        return await self.retry(
            wait, lambda: self._scripts(script, keys=keys, args=[self.epoch, *args])
        )

    async def take_snapshot(self, wait: Deadline) -> StreamSnapshot:
        """Return the requests in the stream, and their claims."""
        keys, args = [self.keys.rollouts], [self.group]
        up, ids, *group = await self.retry(
            wait, lambda: self._scripts("look", keys=keys, args=args)
        )
        # Without a group the script returns two values only.
        claims, unclaimable = group or ((), ())
        return StreamSnapshot(
            uptime=float(up),
            numbers={self.number_of(entry_id) for entry_id in ids},
            claims={
                self.number_of(entry_id): SeenClaim(_explorer_name(member), idle / 1000)
                for entry_id, member, idle, _ in claims
            },
            group_exists=bool(group),
            unclaimable=frozenset(self.number_of(entry_id) for entry_id in unclaimable),
        )

    async def begin(self, wait: Deadline, *, withdraw_answers: bool) -> int:
        """Make the epoch's group, withdraw all requests; return the last one's number."""
        last = await self.write(wait, "begin", self.group, int(withdraw_answers))
        # An id of another epoch has no number here: counting starts at 0.
        return max(self.number_of(last), 0)

    async def claim(
        self, member: str, count: int, *, unanswered_count: int, block: float
    ) -> tuple[set[str], list[RequestEntry]]:
        """Claim requests once, without a retry of its own; wait at most ``block`` seconds.

        Returns the entry ids of all claims that the member held before, and what it claimed now.
        More than ``unanswered_count`` of them are claims whose reply was lost. They are listed in
        the same round trip: the client may send both commands again, without a word of it.
        """
        # No transaction: a blocking read inside of MULTI does not block.
        pipe = self.client.pipeline(transaction=False)
        listed = {"min": "-", "max": "+", "count": unanswered_count + count, "consumername": member}
        pipe.xpending_range(self.keys.rollouts, self.group, **listed)
        # At least 1: BLOCK 0 waits for ever.
        milliseconds = max(1, int(block * 1000))
        offsets = {self.keys.rollouts: ">"}
        pipe.xreadgroup(self.group, member, offsets, count=count, block=milliseconds)
        # An error of the first command must not leave the second one's reply, and so its claims,
        # unread.
        replies = await pipe.execute(raise_on_error=False)
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
        pending, claimed = replies
        names = {claim["message_id"].decode() for claim in pending}
        return names, _requests(claimed[0][1] if claimed else ())

    async def claim_again(self, member: str, entry_ids: Sequence[str]) -> list[RequestEntry]:
        """Return the requests of claims that a member holds, each with a full lease."""
        return _requests(
            # XCLAIM with idle time 0 hands the claim over at once, and starts its lease again.
            await self.client.xclaim(self.keys.rollouts, self.group, member, 0, [*entry_ids])
        )

    async def newest_epoch(self, wait: Deadline) -> int:
        """Return the run's newest epoch."""
        return int(await self.retry(wait, lambda: self.client.get(self.keys.epoch)) or 0)

    async def answers_after(
        self, wait: Deadline, cursor: str, block: float | None = None
    ) -> list[tuple[bytes, dict[bytes, bytes]]]:
        """Return entries of the stream of answers; wait ``block`` seconds for the first one.

        An entry above the limit of an experience's bytes comes without its content.
        """
        args = [cursor, ANSWERS_AT_ONCE, BYTES_AT_ONCE, MAX_EVENT_BYTES]
        keys = [self.keys.experiences]
        rows = await self.retry(wait, lambda: self._scripts("read", keys=keys, args=args))
        if rows or block is None:
            return [(row[0], dict(zip(row[1::2], row[2::2], strict=True))) for row in rows]
        # No script can block, and no command that blocks has a limit of bytes: so the wait is for
        # one entry, and those that came with it are read by the next call.
        milliseconds = max(1, int(block * 1000))
        streams = {self.keys.experiences: cursor}
        reply = await self.retry(
            wait, lambda: self.client.xread(streams, count=1, block=milliseconds), block=block
        )
        return [
            (entry_id, {name: fields[name] for name in _ANSWER_FIELDS if name in fields})
            for entry_id, fields in (reply[0][1] if reply else ())
        ]

    async def mend_answers(self, wait: Deadline, newest: str) -> bool:
        """Delete the stream of answers, whose largest id a writer chose, so that it takes entries.

        Returns False if it has a larger id by now. Answers in it that a resume could have used are
        computed again: the stream is a cache.
        """
        return bool(await self.write(wait, "mend", newest))

    async def newest_answer(self, wait: Deadline) -> str:
        """Return the largest id that the stream of answers ever had; 0-0 if there is none."""
        try:
            info = await self.retry(wait, lambda: self.client.xinfo_stream(self.keys.experiences))
        except redis.ResponseError as error:
            # The server has no code for it, only the text.
            if "no such key" in str(error):
                return "0-0"
            raise
        newest: bytes = info["last-generated-id"]
        return newest.decode()

    async def retry(
        self, wait: Deadline, question: Callable[[], Awaitable[T]], *, block: float = 0.0
    ) -> T:
        """Return the server's answer; retry while it is away. Raises as :meth:`write`.

        ``block`` is the number of seconds for which the server may wait with its answer.
        """
        faults = wait.faults
        try:
            answer = await self.timed(
                lambda: wait.retry(lambda: _unless_exhausted(question)), block
            )
        except redis.ResponseError as error:
            raise self._refusal(error) or await self._conflict(error) or error from None
        except DeadlineExceeded as error:
            if type(error) is DeadlineExceeded and wait.is_refused_by(redis.OutOfMemoryError):
                raise AnswersServerFull(error.missing, error.deadline, error.reason) from None
            raise
        finally:
            self._cut_off |= wait.faults != faults
        # Counted from the first answer after the outage: before it no explorer could renew.
        if self._cut_off:
            self._cut_off, self.answers_since = False, anyio.current_time()
        return answer

    async def timed(self, call: Callable[[], Awaitable[T]], block: float = 0.0) -> T:
        """Make a call to the server, and note an outage if it takes too long."""
        began = anyio.current_time()
        try:
            return await call()
        finally:
            self._cut_off |= anyio.current_time() - began > block + self._slow

    async def _conflict(self, error: redis.ResponseError) -> Exception | None:
        if "WRONGTYPE" in str(error):
            for key in (self.keys.rollouts, self.keys.experiences):
                key_type = (await self.client.type(key)).decode()
                # A key of another program: the raw error names neither the key nor the way out.
                if key_type not in ("none", "stream"):
                    return wrong_type(key, key_type, "stream")
        return None

    def request_id(self, number: int) -> str:
        """Return the entry id of this epoch's request with a number."""
        return f"{self.epoch}-{number}"

    def number_of(self, entry_id: bytes | str) -> int:
        """Return the number of this epoch's request with an entry id; -1 for any other entry."""
        text = entry_id.decode() if isinstance(entry_id, bytes) else entry_id
        epoch, _, number = text.partition("-")
        # Compared as text: a client may write any id into a stream.
        return int(number) if epoch == str(self.epoch) and number.isdecimal() else -1

    def _refusal(self, error: redis.ResponseError) -> Exception | None:
        code, _, present = str(error).partition(" ")
        if code != "STALEEPOCH":
            return None
        epoch = int(present.split()[0])
        # A lower epoch is a server that lost its data, which a newer trainer did not cause.
        if epoch > self.epoch:
            return StaleEpoch(self.run_id, self.epoch, epoch)
        return EpochLost(self.run_id, self.epoch, epoch)


async def _unless_exhausted(question: Callable[[], Awaitable[T]]) -> T:
    """Return a server's answer. Raises LogExhausted, after which a retry may help."""
    try:
        return await question()
    except redis.ResponseError as error:
        if not is_exhausted(error):
            raise
        raise LogExhausted("the stream of answers", "trainer") from None


def _explorer_name(member: bytes) -> str:
    """Return the name of a group's member, for which a client may choose any bytes."""
    return member.decode(errors="replace")[:LONGEST_NAME]


def _requests(entries: Iterable[tuple[bytes, dict[bytes, bytes] | None]]) -> list[RequestEntry]:
    """Return the requests of entries, without those that were deleted."""
    return [
        RequestEntry(entry_id.decode(), fields.get(b"e", b""))
        for entry_id, fields in entries
        # An entry that was deleted while it was claimed comes without fields.
        if fields
    ]


def is_without_group(error: redis.ResponseError) -> bool:
    """Return True if a read failed because its consumer group or its stream is gone."""
    return str(error).startswith(("NOGROUP", "UNBLOCKED"))
