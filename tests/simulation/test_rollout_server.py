"""The server of the simulation answers as a real one does, call by call."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from random import Random

import anyio
import pytest
import redis

from tests.simulation.rollout_server import RolloutClientOfServer, RolloutServer
from trinity_events.errors import StaleEpoch
from trinity_events.log import open_run
from trinity_events.rollouts.streams import RolloutStreams
from trinity_events.server import Deadline
from trinity_schemas import RunKeys

CALLS = 200
OFTEN = {
    **dict.fromkeys(("issue", "claim"), 20),
    **dict.fromkeys(("answer", "fail", "renew", "look", "leave", "again", "read"), 10),
    **dict.fromkeys(("free", "begin", "mend"), 3),
    **dict.fromkeys(("vanish", "opened"), 1),
}
"""Calls, each with its weight."""
LONG = 10**9


class Both:
    """A run's streams on a real server and on the simulated one, which are asked the same."""

    def __init__(self, client, run_id: str, epoch: int, random: Random) -> None:
        self.client, self.run_id, self.random = client, run_id, random
        self.model = RolloutServer(lambda: self.epoch, anyio.current_time)
        self.epoch = epoch
        self.numbers = 0
        self.answers: list[tuple[str, str]] = []
        """Entry ids of answers on either server."""
        self.name = self.name_before = "opened"
        self.accepted = Counter[str]()
        """Number of calls that were more than refused, by name."""

    def streams(self) -> list[RolloutStreams]:
        async def call(_, question):
            return await question()

        epoch = self.random.choice([self.epoch] * 9 + [1])
        model = RolloutClientOfServer(self.model, self.run_id, call)
        return [RolloutStreams(client, self.run_id, epoch) for client in (self.client, model)]

    def request(self) -> str:
        """Return the id of a request that was written, or may be."""
        return f"{self.epoch}-{self.random.randrange(max(1, self.numbers - 6), self.numbers + 2)}"

    def rows(self) -> list[object]:
        rows: list[object] = []
        for _ in range(self.random.randrange(1, 3)):
            earlier = self.random.choice(["", "", self.request()])
            self.numbers += 1
            new = f"{self.epoch}-{self.numbers}"
            new = self.random.choice([new, new, new, self.request(), "" if earlier else new])
            rows += [earlier, self.random.choice([0, LONG]), new, f"payload of {new}".encode()]
        return rows

    async def ask(self, call):
        """Return what both answer to a call, and check that it is the same."""
        replies = []
        for streams in self.streams_of_call:
            try:
                replies.append(await call(streams))
            except Exception as error:
                replies.append(error_of(error))
        assert replies[0] == replies[1]
        self.accepted[self.name] += replies[0] not in (
            [],
            0,
            [0],
            (set(), []),
            "NOGROUP",
            "STALEEPOCH",
        )

    async def one_call(self) -> None:
        [self.name] = self.random.choices(list(OFTEN), OFTEN.values())
        if self.name_before in ("vanish", "opened") and self.random.random() < 0.8:
            self.name = "begin"
        self.name_before = self.name
        self.streams_of_call = self.streams()
        if (call := self.call_of(self.name, Deadline(60, ""))) is not None:
            await self.ask(call)
        else:
            await getattr(self, self.name)(Deadline(60, ""))

    def call_of(self, name: str, wait: Deadline):
        """Return a call that is the same on either server, and may be made once."""
        random, group = self.random, self.streams_of_call[0].group
        member, request = random.choice("abc"), self.request()
        ids = sorted({request, self.request()})
        calls = {
            "claim": lambda streams: streams.claim(member, 2, unanswered_count=3, block=0.001),
            "again": lambda streams: streams.claim_again(member, ids),
            "look": lambda streams: seen(streams, wait),
        }
        withdraw, idle = random.random() < 0.5, random.choice([0, LONG])
        written = {
            "issue": self.rows() if name == "issue" else [],
            "answer": [ids[0], 2, "e", b"x", b"y", ids[-1], 1, "r", b"z"],
            "fail": [request, "reason", "a", *random.choice([[], ["error"]])],
            "renew": [member, *ids],
            "leave": [idle, random.choice(["", member])],
        }
        if name == "mend":
            return lambda streams: streams.mend_answers(wait, "99999999999999999-1")
        if name == "begin":
            return lambda streams: streams.begin(wait, withdraw_answers=withdraw)
        if name in written:
            return lambda streams: streams.write(wait, name, group, *written[name])
        return calls.get(name)

    async def free(self, wait) -> None:
        chosen = self.random.sample(self.answers, min(2, len(self.answers)))
        for at, streams in enumerate(self.streams_of_call):
            with suppress(StaleEpoch):
                await streams.write(wait, "free", " ".join(pair[at] for pair in chosen))

    async def vanish(self, _) -> None:
        keys = RunKeys.of(self.run_id)
        await self.client.delete(keys.rollouts, keys.experiences)
        self.model.vanish()

    async def opened(self, _) -> None:
        self.epoch = await open_run(self.client, self.run_id)
        self.numbers = 0

    async def read(self, wait) -> None:
        answers = [await streams.answers_after(wait, "0-0") for streams in self.streams_of_call]
        assert [[fields for _, fields in entries] for entries in answers] == [
            [fields for _, fields in answers[0]]
        ] * 2
        self.answers = [
            (real[0].decode(), model[0].decode()) for real, model in zip(*answers, strict=True)
        ]
        newest = [await streams.newest_answer(wait) for streams in self.streams_of_call]
        assert (newest[0] == "0-0") == (newest[1] == "0-0")


async def seen(streams, wait):
    snapshot = await streams.take_snapshot(wait)
    claims = {number: claim.explorer for number, claim in snapshot.claims.items()}
    return snapshot.numbers, claims, snapshot.group_exists, snapshot.unclaimable


def error_of(error: Exception) -> str:
    """Return an error as far as its caller looks at it."""
    return str(error).partition(" ")[0] if isinstance(error, redis.RedisError) else str(error)


@pytest.mark.parametrize("seed", range(16))
async def test_every_call_is_answered_as_by_a_real_server(client, run_id, seed):
    both = Both(client, run_id, await open_run(client, run_id), Random(seed))
    for _ in range(CALLS):
        await both.one_call()
    assert both.accepted["issue"] > 10
    assert both.accepted["claim"]
