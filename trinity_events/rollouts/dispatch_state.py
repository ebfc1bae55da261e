"""Decisions of a dispatcher: what to ask for, what to ask for again, what to give up. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from itertools import islice
from typing import NamedTuple

from msgspec import Struct

from trinity_schemas import Experience, OrdinalRange, StepRef, StepTrained

from ..core.ledger import Ledger, LedgerError, ranges
from ..core.ordinal_ranges import words_of_ranges
from .settings import DispatchSettings
from .streams import EXCLUDED, MALFORMED, SUPERSEDED, UNCLAIMABLE, StreamSnapshot

NOT_THE_EXPLORERS = ("stale", SUPERSEDED, "lost", MALFORMED, EXCLUDED, UNCLAIMABLE)
"""Reasons to ask again that are no failure of an attempt, and do not count against the maximum.

A malformed answer counts against its explorer, which is excluded after some. If it counted against
the prompt too, an explorer could have the run drop prompts.
"""
_NAMED = 4
"""Maximum ranges of ordinals that the object of a wait names."""


Stands = Callable[[StepRef], bool]
"""Returns True if the lineage of a run holds a weight version."""


class AnswerGroup(Struct, frozen=True, kw_only=True):
    """All samples of one ordinal, in order, with the ids of their entries."""

    ordinal: int
    attempt: int
    experiences: list[Experience]
    entry_ids: list[str]

    @property
    def oldest_step(self) -> int:
        """Step of the oldest version that sampled one of its tokens."""
        return min(one.oldest_version.step for one in self.experiences)


class HeldRequest(NamedTuple):
    """Request without an answer, with its explorer, if one has claimed it."""

    ordinal: int
    attempt: int
    explorer: str | None
    seconds: float
    """Seconds since the claim."""

    @property
    def in_words(self) -> str:
        """Return the request and its explorer in words."""
        if self.explorer is None:
            return f"{self.ordinal} (not claimed)"
        return f"{self.ordinal} (claimed by {self.explorer} {self.seconds:.0f} s ago)"


def object_of_wait(missing: Sequence[HeldRequest]) -> str:
    """Return the ordinals of missing requests in words, and which of them no explorer claims."""
    ordinals = words_of_ranges(ranges(one.ordinal for one in missing), _NAMED)
    free = sum(one.explorer is None for one in missing)
    if not free:
        return f"the rollouts of {ordinals}"
    return f"the rollouts of {ordinals} ({f'{free} ' if free < len(missing) else ''}not claimed)"


def holders_of(missing: Iterable[HeldRequest]) -> tuple[str, ...]:
    """Return the explorers that hold missing requests, those of the lowest ordinals first."""
    return tuple(dict.fromkeys(one.explorer for one in missing if one.explorer is not None))


class ReissueCandidate(NamedTuple):
    """Ordinal whose attempt counts no more."""

    ordinal: int
    reason: str
    idle: float = 0.0
    """Seconds for which its claim must be idle still; 0 if the claim does not matter."""


class Versions(NamedTuple):
    """Weight versions that may serve a request."""

    oldest: StepRef
    exact: bool = False
    """True if no version but ``oldest`` may serve it."""


class OpenOrdinal(Struct):
    """Open ordinal that was asked for."""

    versions: Versions
    """Versions that its request names."""
    attempt: int = 1
    number: int | None = None
    """Number of its request; None once the request is known to be gone."""
    failures: int = 0
    explorer: str | None = None
    claimed_at: float = 0.0
    refusal: str | None = None
    """Reason for which an answer was refused that names it; a later one may still be taken."""


class OutgoingRequest(NamedTuple):
    """Request that is to be written, in the place of an earlier one if it names one."""

    ordinal: int
    number: int
    """Number in its entry id."""
    attempt: int
    versions: Versions
    due: ReissueCandidate | None = None
    """Reason for which it is a further attempt."""
    earlier: int | None = None
    """Number of the request that it replaces."""


class DispatchState:
    """State of a dispatcher, of which every change is told by its caller, with the time.

    Ordinals that are asked for are always the lowest open ones: those that a restored ledger has
    open come first, then the next ones.
    """

    def __init__(self, settings: DispatchSettings, ledger: Ledger) -> None:
        self.settings = settings
        self.ledger = ledger
        self.asked: dict[int, OpenOrdinal] = {}
        """Ordinals that were asked for and are neither taken nor settled, ascending."""
        self.arrived: dict[int, AnswerGroup] = {}
        self.kept: dict[int, AnswerGroup] = {}
        """Answers of earlier epochs, used when their ordinal comes up."""
        self.taken: set[int] = set()
        self.oldest = -1
        """Step of the oldest version whose tokens the step in hand may train on."""
        self.number = 0
        """Number of the newest request; the entry ids of requests count on."""
        self._dropped: dict[str, list[int]] = {}
        """Ordinals that were dropped since the last step, by reason."""
        self._stale = 0
        """Answers that were too old, since the last step."""
        self._new_tasks = ledger.fingerprint not in (None, settings.fingerprint)
        if self._new_tasks:
            self._drop("task-set", ledger.open_ordinals())
        ledger.fingerprint = settings.fingerprint
        self._restored = ledger.open_ordinals()

    # --- asking ------------------------------------------------------------------------------

    def next_ordinals(self, count: int) -> list[int]:
        """Return the ordinals to ask for next, at most ``count``, as the window allows."""
        restored = self._restored[:count]
        room = min(count - len(restored), self.settings.window - self.ledger.open_count)
        return [*restored, *range(self.ledger.next, self.ledger.next + max(room, 0))]

    def lacking(self, count: int) -> int:
        """Return the number of ordinals to ask for, so that a step of ``count`` gets its groups."""
        return max(count - len(self.asked), 0)

    def ask(self, ordinals: Sequence[int], versions: Versions) -> list[int]:
        """Note that ordinals were asked for; return those that no kept answer answers."""
        self._restored = self._restored[sum(one < self.ledger.next for one in ordinals) :]
        fresh = [one for one in ordinals if one >= self.ledger.next]
        if fresh:
            self.ledger.dispatch(fresh[0], fresh[-1])
        self.asked.update((one, OpenOrdinal(versions)) for one in ordinals)
        for ordinal in ordinals:
            if ordinal in self.kept:
                self.arrived[ordinal] = self.kept.pop(ordinal)
        return [one for one in ordinals if one not in self.arrived]

    def split(
        self, due: Iterable[ReissueCandidate]
    ) -> tuple[list[ReissueCandidate], list[ReissueCandidate]]:
        """Return what to ask for again, and what to give up as its attempts are exhausted."""
        again: list[ReissueCandidate] = []
        exhausted: list[ReissueCandidate] = []
        for one in due:
            counts = one.reason not in NOT_THE_EXPLORERS
            failures = self.asked[one.ordinal].failures + counts
            (exhausted if failures >= self.settings.max_attempts else again).append(one)
        return again, exhausted

    def requests(self, ordinals: Iterable[int]) -> list[OutgoingRequest]:
        """Return the first requests of ordinals that were asked for."""
        return [self._request(one, self.asked[one].versions) for one in ordinals]

    def reissue(self, due: ReissueCandidate, newest: Versions) -> OutgoingRequest:
        """Note that the next attempt was told; return its request.

        It names the versions of the attempt before, unless they are too old to be used.
        """
        asked = self.asked[due.ordinal]
        asked.attempt += 1
        earlier = None if due.reason == "lost" else asked.number
        return self._request(due.ordinal, self.versions_for(due, newest), due, earlier)

    def versions_for(self, due: ReissueCandidate, newest: Versions) -> Versions:
        """Return the versions that may serve the next attempt.

        Explorers may no longer have the one version that an exact request named.
        """
        versions = self.asked[due.ordinal].versions
        return newest if due.reason == "stale" or versions.exact else versions

    def _request(
        self,
        ordinal: int,
        versions: Versions,
        due: ReissueCandidate | None = None,
        earlier: int | None = None,
    ) -> OutgoingRequest:
        self.number += 1
        asked = self.asked[ordinal]
        asked.refusal = None
        if earlier is None:  # Nothing can keep it from being written.
            asked.number, asked.versions, asked.explorer = self.number, versions, None
        return OutgoingRequest(ordinal, self.number, asked.attempt, versions, due, earlier)

    def written(self, request: OutgoingRequest) -> None:
        """Note that a request is in the stream, and the earlier one no more."""
        asked = self.asked.get(request.ordinal)
        if asked is None or request.due is None:
            return
        asked.failures += request.due.reason not in NOT_THE_EXPLORERS
        if request.earlier is not None and request.ordinal not in self.arrived:
            asked.number, asked.versions = request.number, request.versions
            asked.explorer = None

    @property
    def refused_in_words(self) -> str:
        """Return the answers of this step that were refused, once they fill a step.

        Their numbers are powers of two, so that they change seldom.
        """
        counts = {"stale": self._stale} | {one: len(two) for one, two in self._dropped.items()}
        told = [
            f"{1 << (count.bit_length() - 1)} or more answers were {reason}"
            for reason, count in counts.items()
            if count >= self.settings.prompts_per_step
        ]
        return f", after {' and '.join(told)}" if told else ""

    def note_stale(self) -> None:
        """Count an answer that was too old."""
        self._stale += 1

    def drop(self, reason: str, ordinal: int) -> None:
        """Give up an ordinal; the event of the next step tells it."""
        del self.asked[ordinal]
        self.arrived.pop(ordinal, None)
        self._drop(reason, [ordinal])

    def _drop(self, reason: str, ordinals: Sequence[int]) -> None:
        self.ledger.drop(reason, ordinals)
        self._dropped.setdefault(reason, []).extend(ordinals)

    # --- answers -----------------------------------------------------------------------------

    def arrive(self, group: AnswerGroup) -> bool:
        """Keep an answer; return False if its ordinal needs none."""
        asked = self.asked.get(group.ordinal)
        if asked is None or group.ordinal in self.arrived:
            return False
        asked.number = None
        self.arrived[group.ordinal] = group
        return True

    def keep(self, group: AnswerGroup, stands: Stands) -> bool:
        """Keep an answer of an earlier epoch; return False if it is of no use.

        Its ordinal needs an answer, in the same task set, and each version that sampled one of its
        tokens stands.
        """
        needed = self.ledger.is_open(group.ordinal) or group.ordinal >= self.ledger.next
        if not needed or self._new_tasks or group.ordinal in self.kept:
            return False
        if not all(stands(version) for version in _versions_of(group)):
            return False
        self.kept[group.ordinal] = group
        return True

    def refuse(self, ordinal: int) -> AnswerGroup:
        """Return the answer of an ordinal that is not to be used, and forget it."""
        return self.arrived.pop(ordinal)

    def give_back(self, number: int, reason: str) -> None:
        """Note the reason for which an explorer gave a request back; no attempt failed."""
        for asked in self.asked.values():
            if asked.number == number:
                asked.refusal = reason

    def fail(self, number: int) -> int | None:
        """Note that an explorer gave a request back; return its ordinal, if it is still open."""
        for ordinal, asked in self.asked.items():
            if asked.number == number:
                asked.number = None
                return ordinal
        return None

    @property
    def oldest_named(self) -> int | None:
        """Step of the oldest version that a request names whose answer is not taken."""
        return min((one.versions.oldest.step for one in self.asked.values()), default=None)

    def stale(self) -> list[AnswerGroup]:
        """Return the answers that hold a token which the step in hand may not train on."""
        return [one for one in self.arrived.values() if one.oldest_step < self.oldest]

    def candidates(self, count: int) -> list[AnswerGroup]:
        """Return the answers, as far as they arrived, that a step of ``count`` groups takes."""
        if self.settings.order == "arrival":
            first = self._due(count) if self.settings.when_stale == "wait" else []
            others = (one for one in self.arrived if one not in first)
            chosen = [*first, *islice(others, count - len(first))]
        else:
            chosen = list(islice(self.asked, count))
        return [self.arrived[one] for one in chosen if one in self.arrived]

    def _due(self, count: int) -> list[int]:
        """Return the ordinals without which later steps could not use all others in time.

        A request that names a version may be answered with it, so its group has a last step. At
        most ``count`` groups fit into each step before that. Groups that arrived come first.
        """
        places = {ordinal: place for place, ordinal in enumerate(self.arrived)}
        chosen: list[int] = []
        for named in sorted({one.versions.oldest.step for one in self.asked.values()}):
            due = [one for one, asked in self.asked.items() if asked.versions.oldest.step <= named]
            later_steps = max(named - self.oldest, 0)
            lacking = len(due) - later_steps * count - len(chosen)
            if lacking > 0:
                left = [one for one in due if one not in chosen]
                chosen += sorted(left, key=lambda one: places.get(one, len(places)))[:lacking]
        return chosen[:count]

    def lacks_several(self, count: int) -> bool:
        """Return True if a step of ``count`` groups waits for more than one."""
        return len(self.candidates(count)) < count - 1

    def take(self, count: int) -> list[AnswerGroup] | None:
        """Return the groups of a step, sorted; None while they are not all there."""
        groups = self.candidates(count)
        if len(groups) < count:
            return None
        for group in groups:
            del self.asked[group.ordinal], self.arrived[group.ordinal]
            self.taken.add(group.ordinal)
        return sorted(groups, key=lambda group: group.ordinal)

    def missing(self, count: int, now: float) -> list[HeldRequest]:
        """Return the requests without an answer that a step of ``count`` groups waits for."""
        lowest = self.asked if self.settings.order == "arrival" else islice(self.asked, count)
        return [self._held(one, now) for one in lowest if one not in self.arrived]

    def _held(self, ordinal: int, now: float) -> HeldRequest:
        asked = self.asked[ordinal]
        seconds = now - asked.claimed_at if asked.explorer else 0.0
        return HeldRequest(ordinal, asked.attempt, asked.explorer, seconds)

    # --- claims ------------------------------------------------------------------------------

    def observe(
        self, sight: StreamSnapshot, now: float, calm: float, excluded: Container[str] = ()
    ) -> list[ReissueCandidate]:
        """Note who holds what; return the ordinals whose attempt counts no more.

        Args:
            sight: Requests and claims on the server. All answers before it were read.
            now: Seconds of a clock that is never set.
            calm: Seconds for which the server has answered without a fault. Claims count as idle
                for no longer, so that each gets one full lease after an outage.
            excluded: Explorers whose claims count no more.
        """
        due = []
        for ordinal, asked in self.asked.items():
            if ordinal in self.arrived:
                continue
            if asked.number is None or asked.number not in sight.numbers:
                asked.number = None
                due.append(ReissueCandidate(ordinal, asked.refusal or "lost"))
                continue
            claim = sight.claims.get(asked.number)
            if claim is None:
                asked.explorer = None
                if asked.number in sight.unclaimable:
                    due.append(ReissueCandidate(ordinal, UNCLAIMABLE))
                continue
            if asked.explorer is None:
                asked.claimed_at = now - claim.idle
            asked.explorer = claim.explorer
            if claim.explorer in excluded:
                due.append(ReissueCandidate(ordinal, EXCLUDED))
            elif min(claim.idle, calm) >= self.settings.claim_lease:
                due.append(ReissueCandidate(ordinal, "lapsed", self.settings.claim_lease))
            elif calm >= self.settings.claim_lease and self._is_overdue(asked, now):
                due.append(ReissueCandidate(ordinal, "deadline"))
        return due

    def _is_overdue(self, asked: OpenOrdinal, now: float) -> bool:
        return now - asked.claimed_at >= self.settings.request_deadline

    # --- fates -------------------------------------------------------------------------------

    def told(
        self,
        step: int,
        ordinals: Sequence[int],
        *,
        metrics: dict[str, float],
        staleness: dict[int, int],
    ) -> StepTrained:
        """Return the event of a step.

        Raises:
            LedgerError: A group was not taken from this dispatcher, or was trained already.
        """
        strange = sorted(set(ordinals) - self.taken)
        if strange or len(set(ordinals)) != len(ordinals):
            raise LedgerError(
                f"step {step} cannot train ordinals {strange or sorted(ordinals)}: train each "
                "group once, that was taken"
            )
        return StepTrained(
            step=step,
            trained=ranges(ordinals),
            dropped=self.dropped,
            staleness=staleness,
            metrics=metrics,
        )

    @property
    def dropped(self) -> dict[str, tuple[OrdinalRange, ...]]:
        """Ordinals that were dropped since the last event with their fates, by reason."""
        return {reason: ranges(ordinals) for reason, ordinals in self._dropped.items()}

    def clear_dropped(self) -> None:
        """Forget the dropped ordinals, once an event with their fates is in the log."""
        self._dropped.clear()

    def train(self, ordinals: Sequence[int]) -> None:
        """Give ordinals their fate, once the event of their step is in the log."""
        self.ledger.train(ordinals)
        self.taken.difference_update(ordinals)
        self.clear_dropped()
        self._stale = 0


def _versions_of(group: AnswerGroup) -> set[StepRef]:
    return {
        version
        for experience in group.experiences
        for turn in experience.turns
        for version, _ in turn.versions
    }
