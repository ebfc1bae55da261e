"""Dispatcher of the trainer: asks for rollouts, hands them out, and tells the fate of each."""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Sequence

import anyio
import redis.asyncio
from msgspec.structs import replace

from trinity_schemas import (
    ReissuedRollout,
    RolloutRequest,
    RolloutsDispatched,
    StepRef,
    TrainedLedger,
    encode,
)

from ..core.ledger import Ledger, LedgerError, ranges
from ..errors import TrinityError
from ..log import AsyncPublisher
from ..server import Deadline
from ..waits import NO_REPORTS, Wait, WaitReporter
from .answers import AnswerReader, Failed, Useless
from .dispatch_state import DispatchState, Due, Group, HeldRequest, holders_of, object_of_wait
from .settings import DispatchSettings
from .streams import LONGEST_BLOCK, RolloutStreams

Usable = Callable[[Group], bool | str]
Waiting = Callable[[list[HeldRequest], float], Awaitable[None]]
_DONE = 1
"""Reply of the script that issues requests: it replaced or withdrew the earlier request."""
_NAMED = 8
"""Maximum requests that the error of a wait names."""
_FREED_AT_ONCE = 1000

logger = logging.getLogger(__name__)


def always(_: Group) -> bool:
    """Return True: every group is usable."""
    return True


class RolloutDispatcher:
    """Dispatcher of one epoch: the only writer of requests, and the only reader of answers.

    Each event is in the log before the requests that it tells of. A request that is then never
    written is found to be missing and issued again, by this epoch or by the next.

    Args:
        client: Client of the server of the run's log.
        publisher: Publisher of the trainer.
        settings: Settings of the dispatch.
        ledger: Ledger of the checkpoint that the run resumes from; the dispatcher changes it.
            ``LedgerRestored`` must be in the log before the first dispatch.
        deadline: Seconds for which a write waits for a server that is away.
        waits: Reporter of the trainer's long waits for rollouts; by default none reports them.
    """

    def __init__(
        self,
        client: redis.asyncio.Redis,
        publisher: AsyncPublisher,
        settings: DispatchSettings,
        ledger: Ledger | None = None,
        *,
        deadline: float = 300.0,
        waits: WaitReporter = NO_REPORTS,
    ) -> None:
        self.settings = settings
        self.ledger = Ledger() if ledger is None else ledger
        if self.ledger.fingerprint is None:
            self.ledger.fingerprint = settings.fingerprint
        self._told = self.ledger.to_contract(0)
        """Ledger as the log tells it: after the last step, or as the run was resumed."""
        self._state = DispatchState(settings, self.ledger)
        self._publisher = publisher
        self._streams = RolloutStreams(client, settings.run_id, settings.epoch)
        self._answers = AnswerReader(self._streams)
        self._deadline = deadline
        self._waits = waits
        self._lock = anyio.Lock()
        self._number = 0
        """Number of the newest request; the entry ids of requests count on."""
        self._versions: tuple[StepRef, bool] | None = None
        self._step: int | None = None
        """Step that was trained last."""
        self._due: list[Due] = []
        """Ordinals to ask for again as soon as a step is waited for."""
        self._useless: list[str] = []
        """Entries of answers that are to be freed."""
        self._until_checkpoint: dict[int, list[str]] = {}
        """Answers that a resume may need, by the step that they were trained in."""
        self._calm_since = -math.inf
        """Time since which the server has answered without a fault."""

    async def start(self) -> None:
        """Withdraw all requests of earlier epochs, and their answers, unless a resume needs them.

        Raises:
            StaleEpoch: The run has a newer epoch.
        """
        wait = self._wait("the dispatch did not start")
        kept = self.settings.keep_answers == "checkpoint"
        self._number = await self._streams.begin(wait, withdraw_answers=not kept)
        for answer in await self._answers.rest(wait) if kept else ():
            if isinstance(answer, Group) and self._is_whole(answer) and self._state.keep(answer):
                continue
            self._useless += _entry_ids(answer)
        await self._free(wait)

    async def dispatch(self, count: int, oldest: StepRef, *, exact: bool = False) -> int:
        """Ask for the next ordinals; return their number, which the window may bound.

        Args:
            count: Number of ordinals; with 0 only the versions change, for requests to come.
            oldest: Oldest weight version that may serve them.
            exact: True if no other version may serve them.

        Raises:
            StaleEpoch: The run has a newer epoch.
            PublishError: The event was not published; nothing was asked for.
        """
        async with self._lock:
            self._versions = oldest, exact
            return await self._ask(self._wait("rollouts were not dispatched"), count)

    async def take(
        self,
        count: int,
        *,
        deadline: float,
        usable: Usable = always,
        waiting: Waiting | None = None,
    ) -> list[Group]:
        """Return the groups of one step, sorted by ordinal.

        While it waits, it asks again for what lapsed, failed or was lost, and asks for more in the
        place of dropped ordinals.

        Args:
            count: Number of groups.
            deadline: Seconds to wait for them.
            usable: Returns True if a group may be trained on, or the reason against it. A group
                that is "stale" (or False) is asked for again; any other reason drops its ordinal.
            waiting: Called while groups are missing, with the missing requests and the seconds.

        Raises:
            DeadlineExceeded: Groups are missing; it names them, and the explorers that hold them.
            StaleEpoch: The run has a newer epoch.
        """
        self._check_count(count)
        with self._waits.waiting("rollouts", deadline=deadline) as reported:
            return await self._take(count, deadline, usable, waiting, reported)

    async def _take(
        self, count: int, deadline: float, usable: Usable, waiting: Waiting | None, reported: Wait
    ) -> list[Group]:
        began = anyio.current_time()
        wait = self._wait("groups are missing", deadline)
        judged: set[str] = set()
        next_look = -math.inf
        while True:
            async with self._lock:
                await self._settle_due(wait)
                await self._ask(wait, self._state.lacking(count))
                await self._free(wait)
                if self._judge(count, usable, judged):
                    continue
                if (taken := self._state.take(count)) is not None:
                    return taken
                if anyio.current_time() >= next_look:
                    await self._look(wait)
                    next_look = anyio.current_time() + self.settings.claim_lease / 4
                    continue
            missing = self.waits_for(count)
            self._say_missing(wait, missing)
            if missing:
                reported.update(object_of_wait(missing), holders_of(missing))
            block = min(wait.left(), LONGEST_BLOCK, next_look - anyio.current_time())
            self._receive(await self._answers.next(wait, block))
            if waiting is not None and (missing := self.waits_for(count)):
                await waiting(missing, anyio.current_time() - began)

    async def trained(
        self,
        step: int,
        groups: Sequence[Group],
        *,
        metrics: dict[str, float] | None = None,
        staleness: dict[int, int] | None = None,
    ) -> None:
        """Tell the fates of a step's groups, and of ordinals dropped before it; free the answers.

        Raises:
            LedgerError: A group was not taken from this dispatcher, or was trained already.
            PublishError: The event was not published; nothing changed.
            StaleEpoch: The run has a newer epoch, and the event counts for nothing.
        """
        ordinals = [group.ordinal for group in groups]
        async with self._lock:
            event = self._state.told(
                step, ordinals, metrics=metrics or {}, staleness=staleness or {}
            )
            await self._publisher.publish(event)
            self._state.train(ordinals)
            self._step = step
            self._told = self.ledger.to_contract(step)
            entry_ids = [one for group in groups for one in group.entry_ids]
            if self.settings.keep_answers == "checkpoint":
                self._until_checkpoint.setdefault(step, []).extend(entry_ids)
            else:
                self._useless += entry_ids
            await self._free(self._wait("answers were not freed"))

    async def checkpointed(self, step: int) -> None:
        """Free the answers that a checkpoint of a step covers."""
        async with self._lock:
            for covered in [one for one in self._until_checkpoint if one <= step]:
                self._useless += self._until_checkpoint.pop(covered)
            await self._free(self._wait("answers were not freed"))

    def ledger_at(self, step: int) -> TrainedLedger:
        """Return the ledger as the checkpoint of the step that was trained last holds it.

        It is the ledger of the moment of :meth:`trained`. What was dropped or asked for since then
        is open in it, or comes next.

        Raises:
            LedgerError: Another step was trained last.
        """
        if self._step not in (None, step):
            raise LedgerError(f"the ledger is that of step {self._step}, not of step {step}")
        return replace(self._told, step=step)

    def waits_for(self, count: int | None = None) -> list[HeldRequest]:
        """Return the requests without an answer that a step of ``count`` groups waits for."""
        wanted = self.settings.prompts_per_step if count is None else count
        return self._state.missing(wanted, anyio.current_time())

    # --- asking ------------------------------------------------------------------------------

    async def _ask(self, wait: Deadline, count: int) -> int:
        ordinals = self._state.next_ordinals(count) if count > 0 else []
        if not ordinals:
            return 0
        oldest, _ = self._needed_versions()
        await self._publisher.publish(
            RolloutsDispatched(
                ordinals=ranges(ordinals),
                oldest=oldest,
                fingerprint=self.settings.fingerprint,
            )
        )
        rows: list[object] = []
        for ordinal in self._state.ask(ordinals):
            asked = self._state.asked[ordinal]
            asked.number = self._next_number()
            rows += ["", 0, *self._written(asked.number, ordinal, asked.attempt)]
        if rows:
            await self._streams.write(wait, "issue", self._streams.group, *rows)
        return len(ordinals)

    async def _settle_due(self, wait: Deadline) -> None:
        """Ask again for ordinals whose attempt counts no more, or give them up."""
        due = {one.ordinal: one for one in self._due if one.ordinal in self._state.asked}
        again, exhausted = self._state.split(due.values())
        for one in exhausted:
            await self._give_up(wait, one)
        if again:
            await self._ask_again(wait, again)
        self._due.clear()

    async def _give_up(self, wait: Deadline, due: Due) -> None:
        number = self._state.asked[due.ordinal].number
        if number is not None and due.reason != "lost":
            row = [*self._replaced(number, due), "", ""]
            [reply] = await self._streams.write(wait, "issue", self._streams.group, *row)
            if reply != _DONE:
                return  # It was answered or renewed at the last moment.
        logger.warning(
            "run %s: ordinal %d is dropped after %d failed attempts, the last one %s",
            *(self.settings.run_id, due.ordinal, self.settings.max_attempts, due.reason),
        )
        self._state.drop("attempts", due.ordinal)

    async def _ask_again(self, wait: Deadline, again: Sequence[Due]) -> None:
        oldest, _ = self._needed_versions()
        reissued = tuple(
            ReissuedRollout(
                ordinal=one.ordinal,
                attempt=self._state.asked[one.ordinal].attempt + 1,
                reason=one.reason,
            )
            for one in again
        )
        await self._publisher.publish(
            RolloutsDispatched(
                reissued=reissued, oldest=oldest, fingerprint=self.settings.fingerprint
            )
        )
        rows: list[object] = []
        numbers = []
        for one in again:
            asked = self._state.asked[one.ordinal]
            earlier = None if one.reason == "lost" else asked.number
            numbers.append(self._next_number())
            rows += self._replaced(earlier, one)
            rows += self._written(numbers[-1], one.ordinal, asked.attempt + 1)
        replies = await self._streams.write(wait, "issue", self._streams.group, *rows)
        for one, number, reply in zip(again, numbers, replies, strict=True):
            self._state.reissue(one, number if reply == _DONE else None)

    def _replaced(self, earlier: int | None, due: Due) -> list[object]:
        name = "" if earlier is None else self._streams.request_id(earlier)
        return [name, int(due.idle * 1000)]

    def _written(self, number: int, ordinal: int, attempt: int) -> list[object]:
        oldest, exact = self._needed_versions()
        request = RolloutRequest(
            run_id=self.settings.run_id,
            epoch=self.settings.epoch,
            ordinal=ordinal,
            attempt=attempt,
            samples=self.settings.samples,
            sampling=self.settings.sampling,
            oldest=oldest,
            exact=exact,
            fingerprint=self.settings.fingerprint,
            deadline=self.settings.request_deadline,
        )
        return [self._streams.request_id(number), encode(request)]

    def _next_number(self) -> int:
        self._number += 1
        return self._number

    def _needed_versions(self) -> tuple[StepRef, bool]:
        if self._versions is None:
            raise TrinityError(
                f"run {self.settings.run_id} asked for no rollouts yet: call dispatch before take, "
                "which names the weight version that may serve them"
            )
        return self._versions

    # --- answers -----------------------------------------------------------------------------

    def _receive(self, answers: Iterable[Group | Failed | Useless]) -> None:
        for answer in answers:
            if isinstance(answer, Group):
                ours = answer.experiences[0].epoch == self.settings.epoch
                if ours and self._is_whole(answer) and self._state.arrive(answer):
                    continue
            elif isinstance(answer, Failed):
                ordinal = self._state.fail(self._streams.number_of(answer.request))
                if ordinal is not None:
                    logger.warning(
                        "run %s: an attempt of ordinal %d failed: %s",
                        *(self.settings.run_id, ordinal, answer.reason),
                    )
                    self._due.append(Due(ordinal, "failed"))
            self._useless += _entry_ids(answer)

    def _is_whole(self, group: Group) -> bool:
        return len(group.experiences) == self.settings.samples

    def _judge(self, count: int, usable: Usable, judged: set[str]) -> bool:
        """Refuse groups that are not usable; return True if there were any."""
        refused = False
        for group in self._state.candidates(count):
            if group.entry_ids[0] in judged:
                continue
            judged.add(group.entry_ids[0])
            verdict = usable(group)
            if verdict is True:
                continue
            refused = True
            reason = verdict or "stale"
            self._useless += self._state.refuse(group.ordinal).entry_ids
            if reason == "stale":
                self._due.append(Due(group.ordinal, reason))
            else:
                self._state.drop(reason, group.ordinal)
        return refused

    async def _free(self, wait: Deadline) -> None:
        while self._useless:
            several = self._useless[:_FREED_AT_ONCE]
            await self._streams.write(wait, "free", *several)
            del self._useless[: len(several)]

    # --- claims ------------------------------------------------------------------------------

    async def _look(self, wait: Deadline) -> None:
        """Find requests that lapsed, are overdue, or are lost."""
        faults = wait.faults
        sight = await self._streams.look(wait, 2 * self.settings.window)
        if not sight.group_exists:
            logger.warning("run %s: the requests are gone, and issued again", self.settings.run_id)
            begun = await self._streams.begin(wait, withdraw_answers=False)
            self._number = max(self._number, begun)
            sight = await self._streams.look(wait, 2 * self.settings.window)
        self._receive(await self._answers.rest(wait))
        now = anyio.current_time()
        if wait.faults != faults:
            self._calm_since = now
        calm = min(now - self._calm_since, sight.uptime)
        due = {one.ordinal for one in self._due}
        found = self._state.observe(sight, now, calm)
        self._due += [one for one in found if one.ordinal not in due]

    # --- waits -------------------------------------------------------------------------------

    def _wait(self, missing: str, deadline: float | None = None) -> Deadline:
        text = f"run {self.settings.run_id}: {missing}"
        return Deadline(self._deadline if deadline is None else deadline, text)

    def _say_missing(self, wait: Deadline, missing: Sequence[HeldRequest]) -> None:
        named = ", ".join(one.in_words for one in missing[:_NAMED])
        more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        wait.missing = (
            f"run {self.settings.run_id}: the groups of ordinals {named}{more} did not arrive"
        )

    def _check_count(self, count: int) -> None:
        if not 1 <= count <= self.settings.window:
            raise TrinityError(
                f"a step of {count} groups cannot be taken: the window is {self.settings.window} "
                "ordinals, so take at least 1 and at most so many"
            )


def _entry_ids(answer: Group | Failed | Useless) -> list[str]:
    return answer.entry_ids if isinstance(answer, Group) else [answer.entry_id]
