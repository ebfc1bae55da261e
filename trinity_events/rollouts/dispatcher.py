"""Dispatcher of the trainer: requests rollouts, hands out their answers, publishes each fate.

1. Every dispatched ordinal gets at most one fate: it is trained once, or dropped for one reason.
   Without a fate it stays open, and a resumed epoch requests it first.
2. An event is in the log before the requests that it announces. A request that is then never
   written is found to be missing, and issued again.
3. A call records what it begins before it waits. A call that is cancelled or fails is completed by
   the next one, which publishes and writes again what may be missing.
4. New ordinals are dispatched only while fewer than the window are open, and while their answers
   fit into the bound in bytes. Those that a step waits for are not held back by bytes.
5. Only failures of explorers use up the attempts of an ordinal. Requests that are lost, stale or
   superseded do not, nor malformed answers.
6. Answers are read by one call at a time: by `take`, or by `watch_claims` while no step is taken.
7. The payload of an answer is there until its ordinal has its final fate, and with
   ``keep_answers="checkpoint"`` until a checkpoint covers that. It is freed after the entries that
   name it are deleted, by the script that checks the epoch.
8. While what answers depend on fails for every request, one request at a time goes out, and no
   attempt is spent (:mod:`.breaker`). A step then waits for up to ``outage_timeout``.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import anyio
import redis.asyncio
from msgspec.structs import replace

from trinity_schemas import (
    ExplorerExcluded,
    ReissuedRollout,
    RewardErrorReported,
    RolloutRequest,
    RolloutsDispatched,
    RunKeys,
    StepRef,
    StepTrained,
    TrainedLedger,
    encode,
)
from trinity_schemas.rollouts import MAX_EXCLUDED_NAMES

from ..core import lineage
from ..core.handlers.rollouts import format_exclusion
from ..core.ledger import Ledger, LedgerError, ranges
from ..core.reward_errors import REWARD_FAILED
from ..diagnostics.waits import NO_REPORTS, Wait, WaitReporter
from ..errors import DeadlineExceeded, StaleEpoch, TrinityError
from ..log import AsyncPublisher
from ..log.publishing.metric_values import check_metrics, split_metrics
from ..replay import SnapshotUnreadable, current_state
from ..server import Deadline
from .answers import Answer, AnswerReader, Failed
from .breaker import CircuitBreaker, DependencyAway, DependencyFailures, Outage, Suspect
from .dispatch_state import (
    OVERLONG,
    AnswerGroup,
    DispatchState,
    HeldRequest,
    OutgoingRequest,
    ReissueCandidate,
    Stands,
    Versions,
    format_missing,
    holders_of,
)
from .exclusions import Exclusions, ExplorersExcluded, FailureStreaks
from .inspection import AnswerInspector
from .payloads.base import ANSWER_LEASE, CHECKPOINT_LEASE, PayloadStore
from .payloads.loading import PayloadFault
from .settings import DispatchSettings
from .streams import (
    ABORTED,
    EXCLUDED,
    LONGEST_BLOCK,
    MALFORMED,
    PAYLOAD_LOST,
    SUPERSEDED,
    UNAVAILABLE,
    RolloutStreams,
)

Usable = Callable[[AnswerGroup], bool | str]
Waiting = Callable[[list[HeldRequest], float], Awaitable[None]]
FindOverlong = Callable[[Sequence[int]], Awaitable[Sequence[int]]]
"""Returns those of some ordinals whose prompts are too long for a request."""
_DONE = 1
"""Reply of the script that issues requests: it replaced or withdrew the earlier request."""
_NAMED = 8
"""Maximum requests that the error of a wait names."""
_FREED_AT_ONCE = 1000  # ids of one script call: a script blocks the server while it runs
_FAILED_IN_A_ROW = 8
"""Least number of prompts in a row whose failure ends the run: one prompt may be at fault."""
_SLOW = 2.0
"""Minimum seconds of a call that count as an outage of the server."""
_LOOK = 2.0
"""Maximum seconds between two looks at the claims, so that a long wait names their holders."""
_LOOK_ANEW = 1.0
"""Maximum seconds from the last look of one step to the first one of the next."""
_LOOK_REFUSED = 0.2
"""Seconds from a look at the claims to the next one after an answer was refused. It bounds how
often a request is issued again whose every answer is refused."""
_WORDS = 0.25
"""Seconds between two descriptions of what is missing, while answers arrive."""
_GATHER = 0.002, 0.05
"""Least and most seconds for which answers gather before the next read, while several are missing.

In between it is :data:`_GATHER_SHARE` of the wait so far. Reads then grow with the logarithm of the
wait, and the trainer's processor time does not grow with the length of answers.
"""
_GATHER_SHARE = 1 / 16

logger = logging.getLogger(__name__)


class RolloutsFailed(TrinityError):
    """Prompts fail in each attempt: several in a row, or one that may not be dropped.

    Attributes:
        run_id: The run.
        ordinal: Ordinal of the last prompt that failed.
        reason: Reason of its last failure.
        in_a_row: Prompts that failed without an answer between them.
        attempts: Attempts that each of them had.
    """

    run_id: str
    ordinal: int
    reason: str
    in_a_row: int = 1
    attempts: int = 1
    text = "run {run_id}: {_prompts} {attempts} attempts, the last one: {reason}"

    @property
    def _prompts(self) -> str:
        if self.in_a_row > 1:
            return f"{self.in_a_row} prompts in a row failed in each of"
        return f"question {self.ordinal} failed in each of"


class RewardsFailed(RolloutsFailed):
    """The reward of a prompt failed, or rewards failed in a row.

    Attributes:
        explorer: Explorer that could not judge its answers.
    """

    explorer: str = ""
    text = (
        "run {run_id}: {_rewards} on {_explorer}: {_reason} (see its traceback with trinity-events "
        "explain {run_id}): mend the reward and resume the run, or choose drop_group or score in "
        "rewards.on_error for single errors"
    )

    @property
    def _rewards(self) -> str:
        if self.in_a_row == 1:
            return f"the reward of question {self.ordinal} failed"
        return (
            f"the rewards of {self.in_a_row} requests in a row failed, the last one of question "
            f"{self.ordinal}"
        )

    @property
    def _explorer(self) -> str:
        name = self.explorer if self.explorer.isprintable() else repr(self.explorer)
        return name or "an explorer"

    @property
    def _reason(self) -> str:
        return " ".join(self.reason.split()).rstrip(".")


class DispatchMisused(TrinityError):
    """A step's groups were asked for before any were dispatched, or too many of them.

    Attributes:
        run_id: The run.
        count: Number of the groups; None before any were dispatched.
        window: Number of ordinals that are open at most.
    """

    run_id: str
    count: int | None = None
    window: int = 0

    def __str__(self) -> str:
        if self.count is None:
            return (
                f"run {self.run_id} asked for no rollouts yet: call dispatch before take, which "
                "names the weight version that may serve them"
            )
        return (
            f"a step of {self.count} groups cannot be taken: the window is {self.window} ordinals, "
            "so take at least 1 and at most so many"
        )


class _Dispatch(NamedTuple):
    """Ordinals that are dispatched in one event."""

    ordinals: list[int]
    versions: Versions
    overlong: Sequence[int]
    """Those that get no request, and are dropped at once."""


class _FailedReward(NamedTuple):
    """Request whose reward failed, and what becomes of it."""

    ordinal: int
    error: RewardErrorReported | None
    """Error that is to be in the log before the dispatch ends."""
    end: RewardsFailed | None
    """Error that ends the dispatch for it, if one does."""


class DiscardedAnswers(Protocol):
    """Record of the answers that no step trains on."""

    def add(self, group: AnswerGroup, fate: str) -> None:
        """Keep an answer, whose payload is there until the next :meth:`read` has returned."""
        ...

    async def read(self) -> None:
        """Read the payloads of the answers that were added, which are freed next."""
        ...

    async def record(self, step: int) -> None:
        """Record the answers that came while a step was filled, whose event is published next."""
        ...


def always(_: AnswerGroup) -> bool:
    """Return True: every group is usable."""
    return True


def _is_never_current(_: StepRef) -> bool:
    """Return False: no answer of an earlier epoch is to be kept."""
    return False


class RolloutDispatcher:
    """Dispatcher of one epoch: the only writer of requests, and the only reader of answers.

    Answers that are malformed are refused, and an explorer that sends several is excluded
    (:mod:`.inspection`).

    Args:
        client: Client of the server of the run's log.
        publisher: Publisher of the trainer; None publishes nothing, as for evaluations, whose
            requests have no fate.
        settings: Settings of the dispatch.
        ledger: Ledger of the checkpoint that the run resumes from; the dispatcher changes it.
            ``LedgerRestored`` must be in the log before the first dispatch.
        deadline: Seconds for which a write waits for a server that is away.
        waits: Reporter of the trainer's long waits for rollouts; by default none reports them.
        keys: Keys with the streams; by default those of the run's rollouts.
        shares: Dispatcher of the same epoch, whose excluded explorers and circuit breaker are those
            of this one too; by default it has its own.
        payloads: Store of the tokens of answers; None if all answers have them in the stream.
        discarded: Record of the answers that no step trains on; None for none.

    Attributes:
        find_overlong: Finds prompts that are too long, if set before the first dispatch. Their
            ordinals are dropped before they are requested, and the next ones take their place.
    """

    find_overlong: FindOverlong | None = None

    def __init__(  # noqa: PLR0913  # what the dispatchers of an epoch share, each by its name
        self,
        client: redis.asyncio.Redis,
        publisher: AsyncPublisher | None,
        settings: DispatchSettings,
        ledger: Ledger | None = None,
        *,
        deadline: float = 300.0,
        waits: WaitReporter = NO_REPORTS,
        keys: RunKeys | None = None,
        shares: RolloutDispatcher | None = None,
        payloads: PayloadStore | None = None,
        discarded: DiscardedAnswers | None = None,
    ) -> None:
        self.exclusions: Exclusions = Exclusions() if shares is None else shares.exclusions
        self.breaker: CircuitBreaker = CircuitBreaker() if shares is None else shares.breaker
        self.settings = settings
        self.ledger = Ledger() if ledger is None else ledger
        if self.ledger.fingerprint is None:
            self.ledger.fingerprint = settings.fingerprint
        self._logged_ledger = self.ledger.to_contract(0)
        """Ledger that follows from the log: after the last step, or as the run was resumed."""
        self._state = DispatchState(settings, self.ledger)
        self._publisher = publisher
        self._streams = RolloutStreams(
            client,
            settings.run_id,
            settings.epoch,
            # A call that is slower than a quarter of the lease may hide an outage that let claims
            # lapse.
            slow=max(_SLOW, settings.claim_lease / 4),
            keys=keys,
        )
        self._answers = AnswerReader(self._streams)
        self._payloads = payloads
        self._discarded = discarded
        self._inspector = AnswerInspector(
            settings,
            self._state,
            self.exclusions,
            None if payloads is None else payloads.transport,
        )
        self._deadline = deadline
        self._waits = waits
        # Orders the calls that publish and write; reads of answers need no lock.
        self._lock = anyio.Lock()
        self._undispatched: _Dispatch | None = None
        """Ordinals whose dispatch may not be in the log yet."""
        self._dispatched_count = 0
        """Number of ordinals dispatched and not dropped, since the last call that returned."""
        self._unwritten: list[OutgoingRequest] = []
        """Requests that are announced, and may not be in the stream yet."""
        self._newest: Versions | None = None
        self._step: int | None = None
        """Step that was trained last."""
        self._due: dict[int, ReissueCandidate] = {}
        """Ordinals to request again as soon as a step is waited for."""
        self._useless: list[str] = []
        """Entries of answers that are to be freed."""
        self._useless_payloads: set[str] = set()
        """Payloads to free, once the entries that name them are freed."""
        self._next_renewal = -math.inf
        """Time from which the leases of payloads are to be renewed."""
        self._is_taking = False
        """True while a step's groups are waited for, by a call that reads answers itself."""
        self._looked_at = -math.inf
        self._next_removal = -math.inf
        """Time from which the group's idle members are to be removed."""
        self._until_checkpoint: dict[int, list[AnswerGroup]] = {}
        """Answers that a resume may need, by the step that they were trained in."""
        self._failed_in_a_row = 0
        """Ordinals that were given up since the last answer."""
        self._last_failure = ""
        limit = settings.max_consecutive_failures
        self._streaks = None if limit is None else FailureStreaks(self.exclusions, limit)
        self._failed_rewards: list[_FailedReward] = []
        """Requests whose reward failed, and whose ordinals are not dropped yet."""
        self._dependencies = DependencyFailures(self.breaker, self._streams.group)

    async def start(self, stands: Stands | None = None) -> None:
        """Withdraw all requests of earlier epochs, and their answers, unless a resume needs them.

        With ``keep_answers="checkpoint"`` answers stay whose tokens are all of current versions.

        Args:
            stands: Returns True if a weight version is current; by default, if the log's lineage
                has it.

        Raises:
            StaleEpoch: The run has a newer epoch.
        """
        wait = self._wait("the dispatch did not start")
        settings = self.settings
        # Rewards of another reward function would be trained as those of this one.
        keeps_answers = settings.keep_answers == "checkpoint" and not settings.discards_earlier
        # First of all: the script removes the groups of older epochs, whose explorers then claim
        # nothing more.
        # Answers with payloads are read before they are withdrawn, as they name what to free.
        withdraws = not keeps_answers and self._payloads is None
        self._state.number = await self._streams.begin(wait, withdraw_answers=withdraws)
        if not keeps_answers:
            stands = _is_never_current
        async for answers in self._answers.read_all(wait):
            # Read only if there are answers: the lineage is the state of the whole run.
            stands = stands or await self._lineage(wait)
            self._inspector.add_earlier(answers, stands)
        self._inspector.end_entries()
        await self._renew_payloads(wait)
        await self._free(wait)

    async def _lineage(self, wait: Deadline) -> Stands:
        """Return a function that returns True if the lineage in the log holds a version."""
        try:
            assert self._publisher is not None  # answers are kept for resumes of training alone
            log = self._publisher.log
            state = await wait.retry(lambda: current_state(log))
        # Answers are a cache: computed again, they cost time, and training must not fail for them.
        except SnapshotUnreadable as error:
            logger.warning("run %s: no answers are kept: %s", self.settings.run_id, error)
            return _is_never_current
        return partial(lineage.is_in_lineage, state)

    async def dispatch(self, count: int, oldest: StepRef, *, exact: bool = False) -> int:
        """Request the next ordinals; return their number, which the window may bound.

        Ordinals of prompts that are too long are dropped, and do not count.

        The next call completes a dispatch that was cancelled or failed, and counts its ordinals.

        Args:
            count: Number of ordinals; with 0 only the versions change, for requests to come.
            oldest: Oldest weight version that may serve them.
            exact: True if no other version may serve them.

        Raises:
            StaleEpoch: The run has a newer epoch.
            PublishError: The event may not be in the log; the next call publishes it again.
        """
        async with self._lock:
            self._newest = Versions(oldest, exact)
            self._state.needed = 0
            wait = self._wait("rollouts were not dispatched")
            # First what an earlier call left behind (invariant 3), whose ordinals count for this
            # one.
            await self._complete(wait)
            await self._request_more(wait, count - self._dispatched_count)
            dispatched_count, self._dispatched_count = self._dispatched_count, 0
            return dispatched_count

    def add_published(self, version: StepRef) -> None:
        """Let answers have tokens of a version; call it before the version is published.

        Without a call, they may have tokens of any version of this epoch or an earlier one.
        """
        self._inspector.add_published(version)

    async def take(
        self,
        count: int,
        *,
        deadline: float,
        oldest: int = -1,
        usable: Usable = always,
        waiting: Waiting | None = None,
    ) -> list[AnswerGroup]:
        """Return the groups of one step, sorted by ordinal.

        While it waits, it asks again for what lapsed, failed, was lost or is too old, and asks for
        more in the place of dropped ordinals.

        Args:
            count: Number of groups.
            deadline: Seconds to wait for them.
            oldest: Step of the oldest version whose tokens the step may train on.
            usable: Returns True if a group may be trained on, or the reason against it. A group
                that is "stale" (or False) is asked for again; any other reason drops its ordinal.
            waiting: Called while groups are missing, with the missing requests and the seconds.

        Raises:
            DeadlineExceeded: Groups are missing; it names them, and the explorers that hold them.
            ExplorersExcluded: The same, and it names the explorers that were excluded.
            RolloutsFailed: As many prompts in a row as a step has, at least 8, were given up.
            RewardsFailed: The reward of a prompt failed and ``on_reward_error`` is "fail", or so
                many failed in a row.
            StaleEpoch: The run has a newer epoch.
        """
        self._check_count(count)
        self._state.oldest = oldest
        self._is_taking = True
        try:
            return await self._take_or_explain(count, deadline, usable, waiting)
        finally:
            self._is_taking = False

    async def watch_claims(self) -> None:
        """Ask again for what lapsed, failed or was lost between two steps, until cancelled.

        Run it next to the loop that trains. Ordinals without attempts left, and rewards that
        failed, are left to the next `take`, which drops them or raises. So is a server that is
        away: its outage is no error of the training.

        Raises:
            StaleEpoch: The run has a newer epoch.
        """
        every = min(self.settings.claim_lease / 4, _LOOK)
        while True:
            await anyio.sleep(every)
            try:
                await self._look_between_steps(every)
            except StaleEpoch:
                raise
            # Training does not need the server now; the next take meets the outage, and has a
            # deadline.
            except TrinityError as error:
                logger.warning(
                    "run %s: claims were not looked at while it trains: %s",
                    *(self.settings.run_id, error),
                )

    async def _look_between_steps(self, deadline: float) -> None:
        async with self._lock:
            # Invariant 6: two readers would each miss the answers of the other.
            if self._is_taking or not self._state.open_requests:
                return
            wait = self._wait("claims were not looked at", deadline)
            await self._complete(wait)
            await self._observe(wait)
            self._discard_due()
            again, _ = self._state.split(self._due.values())
            if again := self._admit(again):
                await self._reissue(wait, again)

    async def _take_or_explain(
        self, count: int, deadline: float, usable: Usable, waiting: Waiting | None
    ) -> list[AnswerGroup]:
        with self._waits.waiting("rollouts", deadline=deadline) as reported:
            try:
                return await self._take(count, deadline, usable, waiting, reported)
            except DependencyAway:
                raise
            except DeadlineExceeded as error:
                if not self.exclusions.names:
                    raise
                raise ExplorersExcluded(
                    error.missing,
                    error.deadline,
                    error.reason,
                    run_id=self.settings.run_id,
                    exclusions=tuple(self.exclusions.all),
                ) from None

    async def _take(
        self, count: int, deadline: float, usable: Usable, waiting: Waiting | None, reported: Wait
    ) -> list[AnswerGroup]:
        began = anyio.current_time()
        wait = self._wait("groups are missing", deadline)
        judged: set[str] = set()  # a group is judged once, however often the loop runs
        every = min(self.settings.claim_lease / 4, _LOOK)
        next_look = self._looked_at + min(every, _LOOK_ANEW)
        next_words = -math.inf
        while True:
            async with self._lock:
                # A cancelled call may have left an announcement without its requests (invariant 3).
                await self._complete(wait)
                await self._settle_due(wait)
                self._state.needed = self._state.lacking(count)
                await self._request_more(wait, self._state.needed)
                self._dispatched_count = 0
                await self._free(wait)
                if self._refuse_stale() or self._judge(count, usable, judged):
                    continue
                if (groups := self._state.take(count)) is not None:
                    return groups
                if anyio.current_time() >= next_look:
                    await self._observe(wait)
                    next_look, next_words = self._looked_at + every, -math.inf
                    # What lapsed or was lost is requested again before the wait for it begins.
                    continue
            now = anyio.current_time()
            if (outage := self._dependencies.outage) is not None:
                self._await_end(outage, wait, reported, began)
            elif now >= next_words and (missing := self.waits_for(count)):
                next_words = now + _WORDS
                self._set_missing(wait, missing)
                reported.deadline = now - began + wait.left()
                reported.update(
                    format_missing(missing) + self._state.format_refused(), holders_of(missing)
                )
            # Outside of the lock: a dispatch from another task must not wait for answers.
            block = min(wait.left(), LONGEST_BLOCK, next_look - anyio.current_time())
            # An arrival wakes the read; the looks at the claims bound it, and nothing polls.
            answers = await self._answers.next(wait, block)
            if outage is not None:
                # The whole deadline is left for the groups, also if this answer ends the outage.
                wait.renew()
            self._receive(answers)
            if self._inspector.refused:
                next_look = min(next_look, self._looked_at + _LOOK_REFUSED)
            if answers and self._state.lacks_several(count):
                # One round trip for many samples: answers of a batch arrive within milliseconds.
                least, most = _GATHER
                share = _GATHER_SHARE * (anyio.current_time() - began)
                await anyio.sleep(min(max(least, share), most))
            if waiting is not None and (missing := self.waits_for(count)):
                await waiting(missing, anyio.current_time() - began)

    def _await_end(self, outage: Outage, wait: Deadline, reported: Wait, began: float) -> None:
        """Name an outage in the wait for groups, whose deadline begins again when it ends.

        Raises:
            DependencyAway: It has lasted for too long.
        """
        now, timeout = anyio.current_time(), self.settings.outage_timeout
        if now - outage.began >= timeout:
            raise DependencyAway(
                "rollouts were not answered",
                timeout,
                outage.reason,
                run_id=self.settings.run_id,
                dependency=outage.dependency,
            )
        wait.renew()
        # Until when the outage is waited for, and then once more for the groups.
        reported.deadline = outage.began - began + timeout
        reported.update(outage.format(), is_outage=True)

    async def trained(
        self,
        step: int,
        groups: Sequence[AnswerGroup],
        *,
        metrics: Mapping[str, object] | None = None,
        staleness: dict[int, int] | None = None,
    ) -> None:
        """Tell the fates of a step's groups, and of ordinals dropped before it; free the answers.

        Raises:
            MetricRefused: A metric is no number. The step is published, without it.
            LedgerError: A group was not taken from this dispatcher, or was trained already.
            PublishError: The event was not published; nothing changed.
            StaleEpoch: The run has a newer epoch, and the event counts for nothing.
        """
        ordinals = [group.ordinal for group in groups]
        numbers, refused = split_metrics(metrics)
        async with self._lock:
            event = self._state.create_step_event(
                step, ordinals, metrics=numbers, staleness=staleness or {}
            )
            if self._discarded is not None:
                # Before the log has their fates: a record of all answers lacks none of these.
                await self._discarded.record(step)
            # Before the state changes: after a failure the caller may publish the same step again.
            await self._publish(event)
            self._state.train(ordinals, step)
            self._step = step
            # A copy of this moment: the live ledger has dispatches that this step's checkpoint may
            # lack.
            self._logged_ledger = self.ledger.to_contract(step)
            if self.settings.keep_answers == "checkpoint":
                self._until_checkpoint.setdefault(step, []).extend(map(_without_tokens, groups))
            else:
                self._discard(groups)
            wait = self._wait("answers were not freed")
            if not self._useless:
                # The log takes events of older epochs, which count for nothing. The script refuses
                # such a trainer, also where answers are kept (seed 1622 of the simulation).
                await self._streams.write(wait, "free", "")
            await self._free(wait)
            await self._remove_members(wait)
        # Last, as the step is trained whatever its metrics are.
        check_metrics(step, refused)

    async def publish_dropped(self) -> None:
        """Publish the fates of ordinals dropped since the last step, if no step is to follow.

        Raises:
            PublishError: The event was not published; nothing changed.
        """
        async with self._lock:
            if self._discarded is not None:
                await self._discarded.record((self._step or 0) + 1)
            if self._state.dropped:
                await self._publish(
                    RolloutsDispatched(
                        dropped=self._state.dropped, fingerprint=self.settings.fingerprint
                    )
                )
                self._state.clear_dropped()

    async def checkpointed(self, step: int) -> None:
        """Free the answers that a checkpoint of a step covers."""
        async with self._lock:
            for covered in [
                trained_step for trained_step in self._until_checkpoint if trained_step <= step
            ]:
                self._discard(self._until_checkpoint.pop(covered))
            self._state.checkpoint(step)
            await self._free(self._wait("answers were not freed"))

    async def return_groups(
        self, groups: Sequence[AnswerGroup], faults: Sequence[PayloadFault]
    ) -> None:
        """Take the groups of a step back that cannot be taken, as payloads cannot be used.

        The next `take` requests the ordinals of the faults again, and those of payloads that are
        found to be gone now. It returns the other groups as they were.

        Args:
            groups: All groups of the step.
            faults: Faults of payloads, as :class:`.PayloadsUnusable` has them.

        Raises:
            LedgerError: A group was not taken from this dispatcher, or was trained already.
            StaleEpoch: The run has a newer epoch.
        """
        async with self._lock:
            wait = self._wait("payloads were not looked for")
            # Before anything changes (invariant 3): one outage of their medium may lose them all.
            gone = await self._find_gone(wait, groups)
            ordinals = [group.ordinal for group in groups]
            self._state.check_taken((self._step or 0) + 1, ordinals)
            self._state.give_back(ordinals)
            by_ordinal = {group.ordinal: group for group in groups}
            refused = {fault.ordinal: fault for fault in faults}
            for ordinal in sorted(refused.keys() | gone):
                fault = refused.get(ordinal)
                self._refuse(by_ordinal[ordinal], PAYLOAD_LOST)
                if fault is not None and fault.kind != "missing":
                    # The explorer wrote it, and no attempt of its prompt has failed.
                    self._inspector.refuse_payload(by_ordinal[ordinal], fault.detail)
                    self._due[ordinal] = ReissueCandidate(ordinal, MALFORMED)

    async def release(self) -> None:
        """Free the answers that no step takes any more, unless a resume may use them.

        Call it after the last step: what dispatches ahead brought would be there until its leases
        end.
        """
        if self.settings.keep_answers == "checkpoint":
            return
        async with self._lock:
            for group in [*self._state.arrived.values()]:
                self._discard([self._state.refuse(group.ordinal)])
            await self._free(self._wait("answers were not freed"))

    def ledger_at(self, step: int) -> TrainedLedger:
        """Return the ledger as the checkpoint of the step that was trained last holds it.

        It is the ledger of the moment of :meth:`trained`. What was dropped or dispatched since then
        is open in it, or comes next.

        Raises:
            LedgerError: Another step was trained last.
        """
        # A ledger of another step would train prompts twice, or never, after a resume.
        if self._step not in (None, step):
            raise LedgerError("step", step, actual=self._step)
        return replace(self._logged_ledger, step=step)

    @property
    def open_count(self) -> int:
        """Number of ordinals that were dispatched, and are neither taken nor dropped."""
        return len(self._state.open_requests)

    @property
    def oldest_named(self) -> int | None:
        """Step of the oldest version that a request names whose answer is not taken."""
        return self._state.oldest_named

    def waits_for(self, count: int | None = None) -> list[HeldRequest]:
        """Return the requests without an answer that a step of ``count`` groups waits for."""
        group_count = self.settings.prompts_per_step if count is None else count
        return self._state.missing(group_count, anyio.current_time())

    # --- requests ----------------------------------------------------------------------------

    async def _request_more(self, wait: Deadline, count: int) -> None:
        if self._dependencies.outage is not None:
            # What is open probes the dependency; without it one new ordinal has to.
            is_waiting = bool(self._state.open_requests.keys() - self._state.arrived)
            now = anyio.current_time()
            count = self._dependencies.admit(max(count, 0), is_waiting, now)
            if ordinals := self._state.next_ordinals(count):
                self._dependencies.start_probe(ordinals[0], now)
        while count > 0 and (ordinals := self._state.next_ordinals(count)):
            overlong = [] if self.find_overlong is None else await self.find_overlong(ordinals)
            # Recorded before anything waits: a cancelled call leaves it to the next one (invariant
            # 3).
            self._undispatched = _Dispatch(ordinals, self._needed_versions(), overlong)
            await self._complete(wait)
            count -= len(ordinals) - len(overlong)

    async def _complete(self, wait: Deadline) -> None:
        """Publish exclusions and dispatches that the log may lack, and write their requests."""
        while self._publisher is not None and self.exclusions.unpublished:
            await self._publish(self.exclusions.unpublished[0])
            # After the event: a cancellation between the two publishes it twice, which changes
            # nothing.
            del self.exclusions.unpublished[0]
        if self._undispatched is not None:
            ordinals, versions, overlong = self._undispatched
            # Invariant 2. The other way round, a crash leaves requests of ordinals that no log
            # knows.
            await self._publish_dispatched(versions, RolloutsDispatched(ordinals=ranges(ordinals)))
            self._undispatched = None
            unanswered, dropped = self._state.open(ordinals, versions), set(overlong)
            for ordinal in overlong:
                self._state.drop(OVERLONG, ordinal)
            rest = [ordinal for ordinal in unanswered if ordinal not in dropped]
            self._unwritten += self._state.requests(rest)
            self._dispatched_count += len(ordinals) - len(overlong)
        if self._unwritten:
            rows = [part for outgoing in self._unwritten for part in self._row(outgoing)]
            replies = await self._streams.write(wait, "issue", self._streams.group, *rows)
            # After the reply: a script that is sent again adds no entry twice, as the ids are ours.
            written, self._unwritten = self._unwritten, []
            for request, reply in zip(written, replies, strict=True):
                if reply == _DONE:
                    self._state.written(request)

    async def _settle_due(self, wait: Deadline) -> None:
        """Request ordinals again whose attempt counts no more, or give them up."""
        await self._settle_failed_rewards()
        self._discard_due()
        again, exhausted = self._state.split(self._due.values())
        for due in exhausted:
            await self._give_up(wait, due)
            del self._due[due.ordinal]
        if again := self._admit(again):
            await self._reissue(wait, again)

    def _admit(self, again: list[ReissueCandidate]) -> list[ReissueCandidate]:
        """Return what may be requested again now: all, or a probe during an outage."""
        now = anyio.current_time()
        admitted = again[: self._dependencies.admit(len(again), self._is_probed(), now)]
        if admitted and self._dependencies.outage is not None:
            self._dependencies.start_probe(admitted[0].ordinal, now)
        return admitted

    def _is_probed(self) -> bool:
        """Return True if the request that probes a dependency is out, and not answered."""
        probe = self._dependencies.probe
        unanswered = self._state.open_requests.keys() - self._state.arrived
        return probe in unanswered and probe not in self._due

    def _discard_due(self) -> None:
        """Forget the candidates whose ordinals need no request any more."""
        needed = self._state.open_requests.keys() - self._state.arrived
        self._due = {ordinal: due for ordinal, due in self._due.items() if ordinal in needed}

    async def _settle_failed_rewards(self) -> None:
        """Drop the ordinals whose reward failed, each once; raise the error that ends the run.

        With "fail" the ordinal stays open: a resume, with a mended reward, requests it again.
        """
        while self._failed_rewards:
            ordinal, error, end = self._failed_rewards[0]
            if end is not None:
                if self._publisher is not None and error is not None:
                    # Its explorer reports it too, maybe after the run is closed.
                    epoch = self.settings.epoch
                    await self._publish(replace(error, epoch=epoch, ordinal=ordinal))
                    self._failed_rewards[0] = _FailedReward(ordinal, None, end)
                raise end
            if ordinal in self._state.open_requests and ordinal not in self._state.arrived:
                # One message of an explorer can name an ordinal that was answered by another.
                self._state.drop(REWARD_FAILED, ordinal)
            del self._failed_rewards[0]

    async def _give_up(self, wait: Deadline, due: ReissueCandidate) -> None:
        number = self._state.open_requests[due.ordinal].number
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
        self._failed_in_a_row += 1
        # A lapsed claim has no message; its reason is the word of the dispatcher.
        reason = self._last_failure if due.reason == "failed" else due.reason
        if not self.settings.may_drop:
            raise RolloutsFailed(
                self.settings.run_id, due.ordinal, reason, attempts=self.settings.max_attempts
            )
        # So many prompts in a row point at the explorers, and dropping them would consume the
        # tasks.
        if self._failed_in_a_row >= max(self.settings.prompts_per_step, _FAILED_IN_A_ROW):
            raise RolloutsFailed(
                self.settings.run_id,
                due.ordinal,
                reason,
                self._failed_in_a_row,
                self.settings.max_attempts,
            )

    async def _reissue(self, wait: Deadline, again: Iterable[ReissueCandidate]) -> None:
        newest = self._needed_versions()
        by_versions = defaultdict[Versions, list[ReissueCandidate]](list)
        for due in again:
            by_versions[self._state.versions_for(due, newest)].append(due)
        # An event names one range of versions, so attempts with other ranges need another event.
        for versions, several in by_versions.items():
            reissued = tuple(
                ReissuedRollout(
                    ordinal=due.ordinal,
                    attempt=self._state.open_requests[due.ordinal].attempt + 1,
                    reason=due.reason,
                )
                for due in several
            )
            await self._publish_dispatched(versions, RolloutsDispatched(reissued=reissued))
            for due in several:
                # After the event: if it fails, the candidate is due still, with the same attempt
                # number.
                del self._due[due.ordinal]
                self._unwritten.append(self._state.reissue(due, newest))
        await self._complete(wait)

    async def _publish_dispatched(self, versions: Versions, event: RolloutsDispatched) -> None:
        event = replace(
            event,
            oldest=versions.oldest,
            exact=versions.exact,
            fingerprint=self.settings.fingerprint,
        )
        await self._publish(event)

    async def _publish(
        self, event: RolloutsDispatched | StepTrained | ExplorerExcluded | RewardErrorReported
    ) -> None:
        if (publisher := self._publisher) is not None:
            await self._streams.timed(lambda: publisher.publish(event))

    def _row(self, request: OutgoingRequest) -> list[object]:
        """Return a request as the script that issues requests takes it."""
        payload = RolloutRequest(
            run_id=self.settings.run_id,
            epoch=self.settings.epoch,
            ordinal=request.ordinal,
            attempt=request.attempt,
            samples=self.settings.samples,
            sampling=self.settings.sampling,
            oldest=request.versions.oldest,
            exact=request.versions.exact,
            fingerprint=self.settings.fingerprint,
            deadline=self.settings.request_deadline,
            # The newest ones, since the field is bounded.
            excluded=tuple(self.exclusions.names[-MAX_EXCLUDED_NAMES:]),
            payloads=None if self._payloads is None else self._payloads.transport,
            last_attempt=self._state.is_last_attempt(request.ordinal),
        )
        earlier = self._replaced(request.earlier, request.due)
        return [*earlier, self._streams.request_id(request.number), encode(payload)]

    def _replaced(self, earlier: int | None, due: ReissueCandidate | None) -> list[object]:
        name = "" if earlier is None else self._streams.request_id(earlier)
        # Milliseconds, as XPENDING counts: the script replaces no claim that was renewed since the
        # look.
        return [name, 0 if due is None else int(due.idle * 1000)]

    def _needed_versions(self) -> Versions:
        if self._newest is None:
            raise DispatchMisused(self.settings.run_id)
        return self._newest

    # --- answers -----------------------------------------------------------------------------

    def _receive(self, answers: Iterable[Answer]) -> None:
        for answer in answers:
            if isinstance(answer, Failed):
                self._receive_failure(answer)
            elif (group := self._inspector.add(answer)) is not None:
                self._count_answer(group)
                if self._state.arrive(group):
                    self._failed_in_a_row = 0
                else:
                    # An answer that came too late still takes memory of the server.
                    self._discard([group])
                    self._state.count_tokens("surplus", group.tokens)
                    if self._discarded is not None:
                        self._discarded.add(group, "surplus")

    def _receive_failure(self, failed: Failed) -> None:
        self._useless.append(failed.entry_id)
        number = self._streams.number_of(failed.request)
        # No failure of the prompt: excluded explorers must not use up its attempts.
        if failed.reason == EXCLUDED or failed.explorer in self.exclusions:
            self._state.set_refusal(number, EXCLUDED)
            self._inspector.refused = True
        elif (ordinal := self._state.fail(number)) is not None:
            self._record_failure(ordinal, failed)

    def _record_failure(self, ordinal: int, failed: Failed) -> None:
        if failed.reason in (SUPERSEDED, ABORTED):
            self._due[ordinal] = ReissueCandidate(ordinal, failed.reason)
            return
        if failed.dependency:
            self._record_unavailable(ordinal, failed)
            return
        logger.warning(
            "run %s: an attempt of ordinal %d failed: %s",
            *(self.settings.run_id, ordinal, failed.reason),
        )
        end = self._count_failure(ordinal, failed, of_reward=failed.error is not None)
        if failed.error is not None:
            self._failed_rewards.append(_FailedReward(ordinal, failed.error, end))
            return
        self._last_failure = failed.reason
        self._due[ordinal] = ReissueCandidate(ordinal, "failed")

    def _record_unavailable(self, ordinal: int, failed: Failed) -> None:
        """Issue a request again for which a dependency failed; see the breaker for its attempt."""
        logger.info(
            "run %s: ordinal %d was given back by %s: %s",
            *(self.settings.run_id, ordinal, failed.explorer, failed.reason),
        )
        self._due[ordinal] = ReissueCandidate(ordinal, UNAVAILABLE)
        spent = self._dependencies.add_failure(
            self._dependencies.make_suspect(ordinal, failed.explorer, failed.reason),
            failed.dependency,
            unreachable=failed.unreachable,
            is_alone=self._state.is_alone(ordinal),
            now=anyio.current_time(),
        )
        self._spend(spent)

    def _spend(self, suspects: Iterable[Suspect]) -> None:
        for suspect in suspects:
            self._state.spend_attempt(suspect.ordinal)
            self._last_failure = suspect.reason
            if self._streaks is not None:
                # An explorer that alone does not reach the dependency is excluded in the end.
                self._streaks.add_failure(suspect.explorer, suspect.reason, of_reward=False)

    def _count_answer(self, group: AnswerGroup) -> None:
        """Count an answer, or a failed request if all its samples have a score for an error."""
        first = group.experiences[0]
        if not all(sample.reward_error for sample in group.experiences):
            if self._streaks is not None:
                self._streaks.add_answer(first.explorer)
            self._spend(self._dependencies.add_answer(anyio.current_time()))
            return
        # With `score` such a request arrives as an answer, which must not end a streak of
        # errors.
        failed = Failed(group.entry_ids[0], "", first.reward_error, first.explorer)
        end = self._count_failure(group.ordinal, failed, of_reward=True)
        if end is not None:
            self._failed_rewards.append(_FailedReward(group.ordinal, None, end))

    def _count_failure(
        self, ordinal: int, failed: Failed, *, of_reward: bool
    ) -> RewardsFailed | None:
        """Count a failed request against its explorer; return the error that ends the run."""
        streaks, in_a_row = self._streaks, 1
        if streaks is not None:
            excluded = streaks.add_failure(failed.explorer, failed.reason, of_reward=of_reward)
            if excluded is not None:
                logger.error(
                    "run %s: %s; its requests are issued again",
                    *(self.settings.run_id, format_exclusion(failed.explorer, excluded)),
                )
            in_a_row = streaks.rewards_failed
        is_final = failed.error is not None and self.settings.on_reward_error == "fail"
        # Other failures end the run by their attempts: see _give_up.
        if not of_reward or not (is_final or (streaks is not None and streaks.ends_run)):
            return None
        return RewardsFailed(
            run_id=self.settings.run_id,
            ordinal=ordinal,
            explorer=failed.explorer,
            reason=failed.reason,
            in_a_row=in_a_row,
        )

    def _refuse_stale(self) -> bool:
        """Refuse all groups that are too old; return True if there were any."""
        stale = self._state.stale()
        for group in stale:
            self._refuse(group, "stale")
        return bool(stale)

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
            self._refuse(group, verdict or "stale")
        return refused

    def _refuse(self, group: AnswerGroup, reason: str) -> None:
        self._discard([self._state.refuse(group.ordinal)])
        self._state.count_tokens(reason, group.tokens)
        if self._discarded is not None and reason != PAYLOAD_LOST:
            self._discarded.add(group, reason)
        if reason in ("stale", PAYLOAD_LOST):
            if reason == "stale":
                self._state.count_stale()
            self._due[group.ordinal] = ReissueCandidate(group.ordinal, reason)
        else:
            self._state.drop(reason, group.ordinal)

    def _discard(self, groups: Iterable[AnswerGroup]) -> None:
        """Free the entries and payloads of groups with the next call of :meth:`_free`."""
        for group in groups:
            self._useless += group.entry_ids
            if group.payload is not None:
                self._useless_payloads.add(group.payload)

    async def _free(self, wait: Deadline) -> None:
        self._useless += self._inspector.pop_useless()
        self._useless_payloads |= self._inspector.pop_useless_payloads()
        while self._useless:
            several = self._useless[:_FREED_AT_ONCE]
            await self._streams.write(wait, "free", " ".join(several))
            # After the reply: freed twice is harmless, and forgotten would leak memory.
            del self._useless[: len(several)]
        if self._discarded is not None:
            await self._discarded.read()
        # Only now (invariant 7): the script refuses a trainer whose answers a newer epoch keeps.
        if self._payloads is not None and self._useless_payloads:
            store, used = self._payloads, set(self._held_payloads())
            # Any writer can name a payload: one that is in use stays (invariant 5 of inspection).
            useless = self._useless_payloads - used
            await self._streams.retry(wait, lambda: store.free(useless))
            self._useless_payloads -= useless | used

    def _held_payloads(self) -> list[str]:
        """Return the names of the payloads that the run may still need."""
        covered_later = (group for groups in self._until_checkpoint.values() for group in groups)
        names = (group.payload for group in (*self._state.find_held_groups(), *covered_later))
        return [name for name in names if name is not None]

    async def _renew_payloads(self, wait: Deadline) -> None:
        """Renew the leases of payloads that may be needed; request again what has lost its own."""
        if (store := self._payloads) is None or anyio.current_time() < self._next_renewal:
            return
        self._next_renewal = anyio.current_time() + ANSWER_LEASE / 4
        names = self._held_payloads()
        there = await self._streams.retry(wait, lambda: store.renew(names, self._payload_lease))
        gone = set(names) - there
        for group in [*self._state.arrived.values()]:
            if group.payload in gone:
                self._refuse(group, PAYLOAD_LOST)
        for group in [*self._state.earlier_answers.values()]:
            if group.payload in gone:
                self._discard([self._state.forget_earlier(group.ordinal)])
                self._state.count_tokens(PAYLOAD_LOST, group.tokens)

    async def _find_gone(self, wait: Deadline, groups: Iterable[AnswerGroup]) -> set[int]:
        """Return the ordinals of groups whose payloads are gone."""
        by_name = {group.payload: group.ordinal for group in groups if group.payload is not None}
        if (store := self._payloads) is None or not by_name:
            return set()
        names = [*by_name]
        there = await self._streams.retry(wait, lambda: store.renew(names, self._payload_lease))
        return {ordinal for name, ordinal in by_name.items() if name not in there}

    @property
    def _payload_lease(self) -> float:
        keeps_answers = self.settings.keep_answers == "checkpoint"
        return CHECKPOINT_LEASE if keeps_answers else ANSWER_LEASE

    # --- claims ------------------------------------------------------------------------------

    async def _observe(self, wait: Deadline) -> None:
        """Find requests that lapsed, are overdue, or are lost."""
        snapshot = await self._streams.take_snapshot(wait)
        if not snapshot.group_exists:
            logger.warning("run %s: the requests are gone, and issued again", self.settings.run_id)
            # A server that lost its memory, or a group that a user deleted: answers that are there
            # still count.
            begun = await self._streams.begin(wait, withdraw_answers=False)
            self._state.number = max(self._state.number, begun)
            snapshot = await self._streams.take_snapshot(wait)
        # After the snapshot: a request that is gone in it is then either answered here or lost.
        async for answers in self._answers.read_all(wait):
            self._receive(answers)
        self._inspector.end_entries()
        now = anyio.current_time()
        # Claims that aged while the server or the network was away get one full lease.
        stable_for = min(now - self._streams.answers_since, snapshot.uptime)
        for due in self._state.observe(snapshot, now, stable_for, self.exclusions):
            # The first reason stays: a failure that is recorded counts as one, and "lost" would
            # not.
            self._due.setdefault(due.ordinal, due)
        await self._renew_payloads(wait)
        # After the reads, which may take long: the period is between looks, not their starts.
        self._looked_at = anyio.current_time()
        await self._remove_members(wait)

    async def _remove_members(self, wait: Deadline) -> None:
        """Remove explorers from the group, at times, that hold nothing and ask for nothing."""
        now = anyio.current_time()
        if now >= self._next_removal:
            self._next_removal = now + self.settings.idle_member / 2
            idle = int(self.settings.idle_member * 1000)
            await self._streams.write(wait, "leave", self._streams.group, idle, "")

    # --- waits -------------------------------------------------------------------------------

    def _wait(self, missing: str, deadline: float | None = None) -> Deadline:
        text = f"run {self.settings.run_id}: {missing}"
        return Deadline(self._deadline if deadline is None else deadline, text)

    def _set_missing(self, wait: Deadline, missing: Sequence[HeldRequest]) -> None:
        named = ", ".join(request.format() for request in missing[:_NAMED])
        more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        wait.missing = (
            f"run {self.settings.run_id}: the groups of ordinals {named}{more} did not arrive"
        )

    def _check_count(self, count: int) -> None:
        if not 1 <= count <= self.settings.window:
            raise DispatchMisused(self.settings.run_id, count, self.settings.window)


def _without_tokens(group: AnswerGroup) -> AnswerGroup:
    """Return what is needed to free a group; its tokens would be a step's memory."""
    if group.payload is None:
        return replace(group, experiences=())
    return replace(group, experiences=group.experiences[:1])
