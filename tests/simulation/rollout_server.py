"""The two streams of rollouts in this process: their scripts, and a client of them.

``test_rollout_server.py`` holds every reply of it against those of a real server.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import anyio
import redis

from trinity_events.log.position import position
from trinity_events.log.redis.scripts import _text
from trinity_schemas import RunKeys

At = tuple[int, int]
SCRIPTS = (
    *("begin", "issue", "look", "renew", "leave", "answer", "fail", "free"),
    *("read", "mend"),
)
NOTHING: At = (0, 0)


class Claimed(NamedTuple):
    """Claim of a request: its member, and the time at which it was made or renewed."""

    member: str
    at: float


@dataclass
class Group:
    """Consumer group of the requests."""

    delivered: At = NOTHING
    claims: dict[At, Claimed] = field(default_factory=dict)
    members: dict[str, float] = field(default_factory=dict)
    """Time at which each member asked last."""


class RolloutServer:
    """Server of one run's requests and answers; each method is at once, as a script is.

    Args:
        epoch: Returns the run's epoch.
        now: Returns seconds of a clock that is never set.
    """

    def __init__(self, epoch: Callable[[], int], now: Callable[[], float]) -> None:
        self._epoch, self._now = epoch, now
        self._began = now()
        self._changed = anyio.Event()
        self.vanish()

    def vanish(self) -> None:
        """Lose both streams, as a cache may."""
        self.requests: dict[At, bytes] | None = None
        self.last = self.last_answer = NOTHING
        self.groups: dict[str, Group] = {}
        self.answers: dict[At, dict[bytes, bytes]] | None = None
        self._wake()

    def restart(self) -> None:
        """Begin to count the time for which the server is up."""
        self._began = self._now()

    def epoch(self) -> int:
        """Return the run's epoch."""
        return self._epoch()

    # --- scripts, with the arguments of those in trinity_events/rollouts -----------------------

    def script(self, name: str, args: Iterable[Any]) -> Any:
        """Run a script."""
        given = [_encode(argument) for argument in args]
        if name == "look":
            return self._look(given[0].decode())
        if name == "read":
            return self._read(given[0].decode(), *map(int, given[1:]))
        if int(given[0]) != self._epoch():
            raise redis.ResponseError(f"STALEEPOCH {self._epoch()}")
        try:
            return getattr(self, f"_{name}")(*given[1:])
        finally:
            self._wake()

    def _begin(self, group: bytes, withdraw: bytes) -> bytes:
        last, self.groups = self.last, {}
        if last[0] > self._epoch():
            self.last = last = NOTHING
        self.requests = {}
        if withdraw == b"1" and self.answers is not None:
            self.answers = {}
        self.groups[group.decode()] = Group()
        return _name(last)

    def _issue(self, group: bytes, *rows: bytes) -> list[int]:
        return [self._replace(group.decode(), *rows[at : at + 4]) for at in range(0, len(rows), 4)]

    def _replace(self, group: str, earlier: bytes, idle: bytes, new: bytes, payload: bytes) -> int:
        claims = self.groups[group].claims if group in self.groups else {}
        if earlier:
            at = position(earlier.decode())
            claim = claims.get(at)
            if int(idle) and claim is not None and self._idle(claim.at) < int(idle):
                return 2
            if (self.requests or {}).pop(at, None) is None:
                return int(bool(new) and position(new.decode()) in (self.requests or {}))
            claims.pop(at, None)
        if new and (at := position(new.decode())) > self.last:
            self.requests = {**(self.requests or {}), at: payload}
            self.last = at
        return 1

    def _look(self, group: str) -> list[Any]:
        row: list[Any] = [int(self._now() - self._began), [*map(_name, self.requests or {})]]
        if group in self.groups:
            claims = sorted(self.groups[group].claims.items())
            row.append(
                [
                    [_name(at), claim.member.encode(), self._idle(claim.at), 1]
                    for at, claim in claims
                ]
            )
            row.append([])  # no process of ours leaves a request that nobody can claim
        return row

    def _renew(self, group: bytes, member: bytes, *ids: bytes) -> list[bytes]:
        consumers = self.groups.get(group.decode())
        claims = consumers.claims if consumers is not None else {}
        renewed = [
            request
            for request in ids
            if (claim := claims.get(position(request.decode()))) and claim.member == member.decode()
        ]
        for request in renewed:
            self.claim_again(group.decode(), member.decode(), [request.decode()])
        return renewed

    def _leave(self, group: bytes, idle: bytes, member: bytes) -> int:
        consumers = self.groups.get(group.decode())
        if consumers is None:
            return 0
        busy = {claim.member for claim in consumers.claims.values()}
        gone = [
            name
            for name, at in consumers.members.items()
            if name not in busy and self._idle(at) >= int(idle) and member.decode() in ("", name)
        ]
        for name in gone:
            del consumers.members[name]
        return len(gone)

    def _answer(self, group: bytes, *rows: bytes) -> list[int]:
        counted, at = [], 0
        while at < len(rows):
            end = at + 3 + int(rows[at + 1])
            samples = [{rows[at + 2]: sample} for sample in rows[at + 3 : end]]
            counted.append(self._end_claim(group, rows[at], samples))
            at = end
        return counted

    def _fail(
        self, group: bytes, request: bytes, reason: bytes, explorer: bytes, error: bytes = b""
    ) -> int:
        failed = {b"failed": request, b"reason": reason, b"explorer": explorer}
        return self._end_claim(group, request, [failed | ({b"error": error} if error else {})])

    def _end_claim(self, group: bytes, request: bytes, answers: list[dict[bytes, bytes]]) -> int:
        at, consumers = position(request.decode()), self.groups.get(group.decode())
        if consumers is None or consumers.claims.pop(at, None) is None:
            return 0
        (self.requests or {}).pop(at, None)
        for answer in answers:
            self._add_answer(answer)
        return 1

    def _free(self, ids: bytes) -> int:
        for answer_id in ids.split():
            (self.answers or {}).pop(position(answer_id.decode()), None)
        return 1

    def _mend(self, newest: bytes) -> int:
        if self.answers is not None and _name(self.last_answer) != newest:
            return 0
        self.answers, self.last_answer = None, NOTHING
        return 1

    def _read(self, cursor: str, count: int, most: int, largest: int) -> list[list[bytes]]:
        rows: list[list[bytes]] = []
        total = 0
        for entry_id, fields in self.answered_after(cursor, count):
            row = [entry_id, *(part for field in fields.items() for part in field)]
            size = sum(map(len, row[1:]))
            if size > largest:
                row = [entry_id, b"large", b"%d" % size]
            total += sum(map(len, row[1:]))
            if total > most and rows:
                break
            rows.append(row)
        return rows

    def _add_answer(self, fields: dict[bytes, bytes]) -> None:
        milliseconds, number = self.last_answer
        at = (int(self._now() * 1000) + 1, 0)
        self.last_answer = at if at > self.last_answer else (milliseconds, number + 1)
        self.answers = {**(self.answers or {}), self.last_answer: fields}

    # --- commands ------------------------------------------------------------------------------

    def pending_claims(self, group: str, member: str, count: int) -> list[dict[str, Any]]:
        """Answer XPENDING for a member."""
        claims = sorted(self._group(group).claims.items())
        names = [_name(at) for at, claim in claims if claim.member == member]
        return [{"message_id": name} for name in names[:count]]

    def claim(self, group: str, member: str, count: int) -> list[tuple[bytes, dict[bytes, bytes]]]:
        """Answer XREADGROUP for new entries, without a wait."""
        consumers = self._group(group)
        consumers.members[member] = self._now()
        new = [at for at in self.requests or {} if at > consumers.delivered][:count]
        for at in new:
            consumers.delivered = at
            consumers.claims[at] = Claimed(member, self._now())
        return self._entries(new)

    def claim_again(
        self, group: str, member: str, ids: Iterable[str]
    ) -> list[tuple[bytes, dict[bytes, bytes]]]:
        """Answer XCLAIM, for claims of any age."""
        consumers = self._group(group)
        consumers.members[member] = self._now()
        claimed = [at for at in map(position, ids) if at in consumers.claims]
        for at in claimed:
            if at in (self.requests or {}):
                consumers.claims[at] = Claimed(member, self._now())
            else:
                del consumers.claims[at]
        return self._entries(claimed)

    def answered_after(self, cursor: str, count: int) -> list[tuple[bytes, dict[bytes, bytes]]]:
        """Answer XREAD on the answers, without a wait."""
        after = position(cursor)
        new = [(at, fields) for at, fields in (self.answers or {}).items() if at > after]
        return [(_name(at), fields) for at, fields in new[:count]]

    async def wait(self, question: Callable[[], Any], seconds: float) -> Any:
        """Return the first answer that is not empty, or what there is after some seconds."""
        with anyio.move_on_after(seconds):
            while not (answer := question()):
                await self._changed.wait()
            return answer
        return question()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    def _group(self, name: str) -> Group:
        if name not in self.groups:
            raise redis.ResponseError(f"NOGROUP No such consumer group '{name}'")
        return self.groups[name]

    def _entries(self, ids: Iterable[At]) -> list[tuple[bytes, dict[bytes, bytes]]]:
        there = self.requests or {}
        return [(_name(at), {b"e": there[at]}) for at in ids if at in there]

    def _idle(self, at: float) -> int:
        return int((self._now() - at) * 1000)


class RolloutClientOfServer:
    """Client of the server, with the methods that the code under test uses.

    Args:
        server: The server.
        run_id: The run.
        call: Makes each call: ``call(name, question, seconds)``.
    """

    def __init__(
        self,
        server: RolloutServer,
        run_id: str,
        call: Callable[[str, Callable[[], Awaitable[Any]]], Awaitable[Any]],
    ) -> None:
        self._server, self._call = server, call
        self._keys = RunKeys.of(run_id)
        self._names = {_text(name, "trinity_events.rollouts"): name for name in SCRIPTS}

    def register_script(self, source: str) -> Callable[..., Awaitable[Any]]:
        """Return a script as a function."""
        name = self._names[source]

        async def run(*, keys: list[str], args: list[Any]) -> Any:
            return await self._at_once(name, lambda: self._server.script(name, args))

        return run

    async def get(self, key: str) -> bytes:
        """Answer GET, which is asked for the epoch."""
        assert key == self._keys.epoch
        epoch: bytes = await self._at_once("get", lambda: b"%d" % self._server.epoch())
        return epoch

    async def xinfo_stream(self, key: str) -> dict[str, bytes]:
        """Answer XINFO STREAM, which is asked for the answers."""

        def info() -> dict[str, bytes]:
            if self._server.answers is None:
                raise redis.ResponseError("no such key")
            return {"last-generated-id": _name(self._server.last_answer)}

        info_fields: dict[str, bytes] = await self._at_once("xinfo_stream", info)
        return info_fields

    async def xread(self, streams: dict[str, str], *, count: int, block: int | None) -> Any:
        """Answer XREAD on the answers."""
        [(key, cursor)] = streams.items()

        async def read() -> Any:
            seconds = 0.0 if block is None else block / 1000
            return await self._server.wait(
                lambda: self._server.answered_after(cursor, count), seconds
            )

        entries = await self._call("xread", read)
        return [(key.encode(), entries)] if entries else []

    async def xclaim(
        self, key: str, group: str, member: str, min_idle: int, ids: list[str]
    ) -> list[tuple[bytes, dict[bytes, bytes]]]:
        """Answer XCLAIM."""
        entries: list[tuple[bytes, dict[bytes, bytes]]] = await self._at_once(
            "xclaim", lambda: self._server.claim_again(group, member, ids)
        )
        return entries

    def pipeline(self, *, transaction: bool) -> Pipeline:
        """Return commands that are sent at once; there is one such pair."""
        assert not transaction
        return Pipeline(self._server, self._call)

    async def _at_once(self, name: str, question: Callable[[], Any]) -> Any:
        async def ask() -> Any:
            return question()

        return await self._call(name, ask)


class Pipeline:
    """A listing of claims and a read of new ones, in one round trip."""

    def __init__(self, server: RolloutServer, call: Any) -> None:
        self._server, self._call = server, call

    def xpending_range(self, key: str, group: str, **listed: Any) -> None:
        """Add XPENDING."""
        self._listed = group, listed["consumername"], listed["count"]

    def xreadgroup(self, group: str, member: str, _: Any, *, count: int, block: int) -> None:
        """Add XREADGROUP."""
        self._read = (group, member, count), block / 1000

    async def execute(self, *, raise_on_error: bool) -> list[Any]:
        """Send both."""
        assert not raise_on_error
        replies: list[Any] = await self._call("claim", self._both)
        return replies

    async def _both(self) -> list[Any]:
        arguments, seconds = self._read
        try:
            pending = self._server.pending_claims(*self._listed)
            entries = await self._server.wait(lambda: self._server.claim(*arguments), seconds)
        except redis.ResponseError as error:
            return [error, error]
        return [pending, [(b"", entries)] if entries else []]


def _encode(value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


def _name(at: At) -> bytes:
    return b"%d-%d" % at
