"""Client of an explorer: it claims requests, renews its claims, and answers."""

from __future__ import annotations

import logging
import secrets
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
import redis
import redis.asyncio
from msgspec import Struct

from trinity_schemas import (
    ContractError,
    Experience,
    FailedDependency,
    PayloadAddress,
    RewardErrorReported,
    RolloutRequest,
    RunKeys,
    encode,
    encode_turns,
    refer,
    share_prompts,
)
from trinity_schemas.codec import decode_request

from ..errors import DeadlineExceeded, StaleEpoch, TrinityError
from ..server import Deadline
from ..system.error_text import ungrouped
from .payloads.base import PayloadStore, digest_payload
from .streams import (
    EXCLUDED,
    LONGEST_BLOCK,
    SUPERSEDED,
    RequestEntry,
    RolloutStreams,
    is_without_group,
)

_WITHOUT_GROUP = 0.5
"""Seconds between two attempts to claim while the trainer's dispatcher has not started."""
_AT_ONCE = 0.001
"""Seconds that a read waits which first looks for claims whose reply was lost."""

logger = logging.getLogger(__name__)


class Claim(Struct, frozen=True):
    """Request that an explorer has claimed."""

    entry_id: str
    request: RolloutRequest


class SamplesDiffer(TrinityError):
    """An answer does not have the samples that its request asks for.

    Attributes:
        ordinal: Ordinal of the request.
        samples: Number of samples that it asks for.
        given: Samples of the answer, in their order.
        foreign: Index of a sample that is of another request; None if all are of this one.
    """

    ordinal: int
    samples: int
    given: tuple[int, ...] = ()
    foreign: int | None = None

    def __str__(self) -> str:
        if self.foreign is not None:
            return f"sample {self.foreign} of ordinal {self.ordinal} is of another request"
        return (
            f"ordinal {self.ordinal} asks for samples 0 to {self.samples - 1} in order: answer "
            f"with all of them, not with {list(self.given)}"
        )


class RolloutClient:
    """Client of one explorer in one epoch.

    Args:
        client: Client of the server of the run's log.
        run_id: The run.
        epoch: The epoch; a newer one ends every call with StaleEpoch.
        name: Name of the explorer, which no other client of the run has at the time: a client takes
            up what its name has claimed.
        lease: Seconds after which a claim that is not renewed lapses, as the dispatcher has it.
        deadline: Seconds for which a call waits for a server that is away.
        keys: Keys with the streams; by default those of the run's rollouts.
        payloads: Store of the tokens of answers, for requests that name its medium; None sends
            them through the stream itself.
    """

    def __init__(
        self,
        client: redis.asyncio.Redis,
        run_id: str,
        epoch: int,
        name: str,
        *,
        lease: float,
        deadline: float = 300.0,
        keys: RunKeys | None = None,
        payloads: PayloadStore | None = None,
    ) -> None:
        self._payloads = payloads
        self.name = name
        self.discarded = 0
        """Answers that came after another attempt had taken their place."""
        self.is_excluded = False
        """True once a request names this explorer as excluded; it claims nothing more then."""
        self._lease = lease
        self._deadline = deadline
        self._streams = RolloutStreams(client, run_id, epoch, keys=keys)
        self._unanswered_ids: set[str] = set()
        """Entry ids of the claims that were handed out and are not answered."""
        self._lost_ids: set[str] = set()
        """Entry ids of the claims that a block of :meth:`renewing` has lost."""
        # Two claims at a time would each take the other's for lost replies.
        self._claiming = anyio.Lock()
        self._sure = False
        """False if the server may hold claims of this name that were never handed out."""

    async def claim(self, count: int, *, seconds: float) -> list[Claim]:
        """Return at most ``count`` requests; wait at most ``seconds`` for the first one.

        Claims whose reply was lost come first, also those of an earlier process of this name. An
        explorer that the trainer has excluded gets none, after ``seconds``.

        Raises:
            StaleEpoch: The run has a newer epoch.
        """
        wait = self._wait("no requests were claimed")
        give_up = anyio.current_time() + seconds
        while True:
            # The sleep keeps a loop of claims from spinning; the explorer may still serve another
            # epoch.
            if self.is_excluded:
                await anyio.sleep(seconds)
                return []
            remaining = max(give_up - anyio.current_time(), 0.0)
            async with self._claiming:
                claims = await self._read(
                    # A third of the lease, so that a lost reply is found and claimed again before
                    # its claim lapses.
                    wait,
                    count,
                    min(remaining, LONGEST_BLOCK, self._lease / 3),
                )
            if claims or anyio.current_time() >= give_up:
                return claims

    async def renew(self, claims: Iterable[Claim]) -> list[Claim]:
        """Extend claims by one lease; return those that are still held.

        It never extends the deadline of a request.

        Raises:
            StaleEpoch: The run has a newer epoch.
        """
        to_renew = list(claims)
        if not to_renew:
            return []
        renewed = await self._write("renew", self.name, *(claim.entry_id for claim in to_renew))
        names = {entry_id.decode() for entry_id in renewed}
        return [claim for claim in to_renew if claim.entry_id in names]

    async def answer(self, claim: Claim, experiences: Sequence[Experience]) -> bool:
        """Answer a request with all its samples; return False if the answer was discarded.

        An answer is discarded after another one, and after the request was issued again.

        Raises:
            TrinityError: The samples are not those that the request asks for.
            StaleEpoch: The run has a newer epoch; nothing was written.
        """
        [counted] = await self.answer_all([(claim, experiences)])
        return counted

    async def answer_all(self, answers: Sequence[tuple[Claim, Sequence[Experience]]]) -> list[bool]:
        """Answer several requests in one call; return for each what :meth:`answer` does.

        Raises: as :meth:`answer`; nothing was written then.
        """
        if not answers:
            return []
        for claim, experiences in answers:
            _check_samples(claim.request, experiences)
        # A request that was answered, replaced or withdrawn never comes back: no answer to it
        # counts, and its payload would take memory until the end of its lease.
        is_lost = [claim.entry_id in self._lost_ids for claim, _ in answers]
        sent = [answer for answer, lost in zip(answers, is_lost, strict=True) if not lost]
        addresses = await self._write_payloads(sent)
        rows: list[object] = []
        for (claim, experiences), address in zip(sent, addresses, strict=True):
            rows += [claim.entry_id, len(experiences)]
            if address is not None:
                rows += ["r", *map(encode, refer(experiences, address))]
            else:
                # The prompt travels once for a group: it may be most of an answer.
                rows += ["e", *map(encode, share_prompts(experiences))]
        # One script acknowledges and adds, so the first of two answers counts (decision 21).
        replies = iter(await self._write("answer", *rows))
        counted = [not lost and bool(next(replies)) for lost in is_lost]
        # After the reply: an answer that failed leaves its claim to be answered again.
        self._unanswered_ids.difference_update(claim.entry_id for claim, _ in answers)
        self.discarded += counted.count(False)
        return counted

    async def _write_payloads(
        self, answers: Sequence[tuple[Claim, Sequence[Experience]]]
    ) -> Sequence[PayloadAddress | None]:
        """Write the tokens of answers, before the script of their answer; return where they lie."""
        payloads: dict[str, bytes] = {}
        addresses: list[PayloadAddress | None] = []
        store = self._payloads
        for claim, experiences in answers:
            if store is None or claim.request.payloads != store.transport:
                addresses.append(None)
                continue
            # A new name for each attempt to answer: a payload that was lost on its way, or that of
            # an earlier call, is never taken for this one.
            name, payload = secrets.token_hex(16), encode_turns(experiences)
            payloads[name] = payload
            addresses.append(
                PayloadAddress(
                    transport=store.transport,
                    name=name,
                    size=len(payload),
                    digest=digest_payload(payload),
                )
            )
        if store is None or not payloads:
            return addresses
        wait = self._wait("the tokens of answers were not written")
        # A death from here on leaves payloads that no entry names, and so does an answer that is
        # discarded: their leases end. The explorer deletes none: the reply that its answer counted
        # may be lost, and the script that is sent again says that it does not (seed 40 of the
        # simulation).
        await self._streams.retry(wait, lambda: store.write(payloads))
        return addresses

    async def fail(
        self,
        claim: Claim,
        reason: str,
        error: RewardErrorReported | None = None,
        *,
        dependency: FailedDependency | None = None,
    ) -> None:
        """Give a request back, so that the dispatcher issues it again at once.

        Args:
            claim: Claim of the request.
            reason: Reason in words.
            error: Error of the reward function, if that is what failed. The dispatcher then applies
                ``DispatchSettings.on_reward_error``, and does not issue the request again.
            dependency: Something else that failed, such as a service. The dispatcher then issues
                the request again, and spends its attempt only if other requests are answered.

        Raises:
            StaleEpoch: The run has a newer epoch; nothing was written.
        """
        row: list[object] = [claim.entry_id, reason, self.name]
        row += (
            []
            if error is None and dependency is None
            else [b"" if error is None else encode(error)]
        )
        if dependency is not None:
            row += [dependency.name, "1" if dependency.unreachable else "0"]
        await self._write("fail", *row)
        self._unanswered_ids.discard(claim.entry_id)

    async def give_back(self, claim: Claim, reason: str = SUPERSEDED) -> None:
        """Give a request back that is to be issued again; no attempt failed.

        Args:
            claim: Claim of the request.
            reason: ``SUPERSEDED`` if its exact version is superseded here, or ``ABORTED`` if a
                version that came cut its answer short.

        Raises:
            StaleEpoch: The run has a newer epoch; nothing was written.
        """
        await self.fail(claim, reason)

    async def leave(self, *, deadline: float = 5.0) -> None:
        """Leave the group of explorers, if no claim is held; else the dispatcher sees to it later.

        Args:
            deadline: Seconds for which it waits for a server that is away. It then leaves untold.
        """
        # Leaving is a courtesy: the dispatcher removes idle members by itself.
        with suppress(DeadlineExceeded, StaleEpoch):
            wait = self._wait("the explorer did not leave", deadline)
            # The script keeps a member with claims: its removal would drop them from the pending
            # list.
            await self._streams.write(wait, "leave", self._streams.group, 0, self.name)

    @asynccontextmanager
    async def renewing(self, claims: Iterable[Claim]) -> AsyncIterator[list[Claim]]:
        """Renew claims within a block; yield a list of those that are held, which shrinks.

        A newer epoch cancels the block, which then raises StaleEpoch. Within the block, an answer
        to a claim that is not held any more is discarded without being sent.
        """
        held_claims = list(claims)
        lost_ids: set[str] = set()

        async def renew() -> None:
            while held_claims:
                # Two renewals may be lost before a claim lapses.
                await anyio.sleep(self._lease / 3)
                renewed = {claim.entry_id: claim for claim in held_claims}
                still = {claim.entry_id for claim in await self.renew(renewed.values())}
                # In place: the caller's block holds this list.
                held_claims[:] = [claim for claim in held_claims if claim.entry_id in still]
                lost_ids.update(renewed.keys() - still)
                self._lost_ids |= lost_ids

        try:
            with ungrouped():
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(renew)
                    yield held_claims
                    # Without it the group would wait for the renewals, which end only with the
                    # last claim.
                    tasks.cancel_scope.cancel()
        finally:
            self._lost_ids -= lost_ids

    async def _read(self, wait: Deadline, count: int, block: float) -> list[Claim]:
        try:
            requests = await self._streams.retry(
                wait, lambda: self._claim(count, block), block=block
            )
        except redis.ResponseError as error:
            if not is_without_group(error):
                raise
            # The group of this epoch is gone either before the trainer starts or after a newer
            # epoch began.
            await self._check_epoch(wait)
            await anyio.sleep(min(_WITHOUT_GROUP, block))
            return []
        claims = []
        for entry_id, payload in requests:
            try:
                claims.append(Claim(entry_id, decode_request(payload)))
            # Given back rather than ignored: a claim without an answer would lapse only after a
            # lease.
            except ContractError:
                await self._write("fail", entry_id, "unreadable", self.name)
        # Requests carry the exclusions, since an explorer has no other channel from the dispatcher.
        if any(self.name in claim.request.excluded for claim in claims):
            await self._end_claiming(claims)
            return []
        # Only what the caller receives: other claims of this name count as lost replies.
        self._unanswered_ids.update(claim.entry_id for claim in claims)
        return claims

    async def _end_claiming(self, claims: Iterable[Claim]) -> None:
        """Give requests back, since the trainer takes no answers of this explorer."""
        self.is_excluded = True
        logger.error(
            "run %s: the trainer has excluded %s (trinity-events explain %s has the reason): it "
            "answers nothing more in epoch %d",
            *(self._streams.run_id, self.name, self._streams.run_id, self._streams.epoch),
        )
        for claim in claims:
            await self._write("fail", claim.entry_id, EXCLUDED, self.name)

    async def _claim(self, count: int, block: float) -> list[RequestEntry]:
        """Return at most ``count`` requests, first those whose claim the server never told."""
        # Claims whose reply was lost would wait behind a read that blocks.
        present = block if self._sure else _AT_ONCE
        self._sure = False  # until the reply is here
        claimed_ids, requests = await self._streams.claim(
            self.name, count, unanswered_count=len(self._unanswered_ids), block=present
        )
        # Claims that lapsed and went to another explorer are forgotten.
        self._unanswered_ids &= claimed_ids
        if untold := sorted(claimed_ids - self._unanswered_ids)[:count]:
            requests = await self._streams.claim_again(self.name, untold) + requests
        # More than the caller takes: the rest are claims that the next call must find.
        self._sure = len(requests) <= count
        return requests[:count]

    async def _check_epoch(self, wait: Deadline) -> None:
        """Raise StaleEpoch if the group of this epoch is gone because of a newer epoch."""
        streams = self._streams
        present = await streams.newest_epoch(wait)
        if present > streams.epoch:
            raise StaleEpoch(streams.run_id, streams.epoch, present, "this explorer")

    async def _write(self, script: str, *args: object) -> Any:
        wait = self._wait(f"the script {script} was not run")
        return await self._streams.write(wait, script, self._streams.group, *args)

    def _wait(self, missing: str, deadline: float | None = None) -> Deadline:
        seconds = self._deadline if deadline is None else deadline
        return Deadline(seconds, f"run {self._streams.run_id}, {self.name}: {missing}")


def _check_samples(request: RolloutRequest, experiences: Sequence[Experience]) -> None:
    expected = request.run_id, request.epoch, request.ordinal, request.attempt, request.samples
    for index, experience in enumerate(experiences):
        if (
            experience.run_id,
            experience.epoch,
            experience.ordinal,
            experience.attempt,
            experience.samples,
        ) != expected:
            raise SamplesDiffer(request.ordinal, request.samples, foreign=index)
    if [experience.sample for experience in experiences] != list(range(request.samples)):
        given = tuple(experience.sample for experience in experiences)
        raise SamplesDiffer(request.ordinal, request.samples, given)
