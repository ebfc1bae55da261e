"""Decisions of a dispatcher: what to request, what to request again, what to give up. No I/O.

They follow from the ledger and the calls alone. The invariants are those of :mod:`.dispatcher`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from functools import cached_property
from itertools import islice
from typing import NamedTuple

from msgspec import Struct

from trinity_schemas import (
    Experience,
    ExperienceHeader,
    ExperienceReference,
    OrdinalRange,
    StepRef,
    StepTrained,
)
from trinity_schemas.events import MOST_PHASES

from ..core.ledger import Ledger, LedgerError, ranges
from ..core.ordinal_ranges import format_ranges
from .settings import DispatchSettings
from .streams import (
    ABORTED,
    EXCLUDED,
    MALFORMED,
    PAYLOAD_LOST,
    SUPERSEDED,
    UNAVAILABLE,
    UNCLAIMABLE,
    StreamSnapshot,
)

NOT_THE_EXPLORERS = (
    *("stale", SUPERSEDED, ABORTED, "lost"),
    *(MALFORMED, EXCLUDED, UNAVAILABLE, UNCLAIMABLE),
    PAYLOAD_LOST,
)
"""Reasons to request again that are no failure of an attempt, and do not use up the attempts.

A malformed answer counts against its explorer, which is excluded after some. If it counted against
the prompt too, an explorer could have the run drop prompts.
"""
OVERLONG = "overlong"
"""Reason for which an ordinal is dropped whose prompt is longer than the run allows."""
_NAMED = 4
"""Maximum ranges of ordinals that the object of a wait names."""


Stands = Callable[[StepRef], bool]
"""Returns True if the lineage of a run holds a weight version."""


class AnswerGroup(Struct, frozen=True, kw_only=True, dict=True):
    """All samples of one ordinal, in order, with the ids of their entries.

    The samples are references if their explorer wrote the tokens into a payload.
    """

    ordinal: int
    attempt: int
    experiences: Sequence[Experience | ExperienceReference]
    entry_ids: list[str]
    size: int = 0
    """Bytes of its entries and its payload on servers, or in shared memory."""

    @property
    def payload(self) -> str | None:
        """Name of its payload; None if its samples have their tokens."""
        first = self.experiences[0] if self.experiences else None
        return first.payload.name if isinstance(first, ExperienceReference) else None

    @property
    def tokens(self) -> int:
        """Tokens that the policy sampled for it."""
        return sum(map(count_sampled, self.experiences))

    # Once: each arrival compares those of all groups, 512 of them in a step of 4,096 samples.
    @cached_property
    def oldest_step(self) -> int:
        """Step of the oldest version that sampled one of its tokens."""
        return min(experience.oldest_version.step for experience in self.experiences)


class HeldRequest(NamedTuple):
    """Request without an answer, with its explorer, if one has claimed it."""

    ordinal: int
    attempt: int
    explorer: str | None
    seconds: float
    """Seconds since the claim."""

    def format(self) -> str:
        """Return the request and its explorer in words."""
        if self.explorer is None:
            return f"{self.ordinal} (not claimed)"
        return f"{self.ordinal} (claimed by {self.explorer} {self.seconds:.0f} s ago)"


def format_missing(missing: Sequence[HeldRequest]) -> str:
    """Return the ordinals of missing requests in words, and which of them no explorer claims."""
    ordinals = format_ranges(ranges(request.ordinal for request in missing), _NAMED)
    free = sum(request.explorer is None for request in missing)
    if not free:
        return f"the rollouts of {ordinals}"
    return f"the rollouts of {ordinals} ({f'{free} ' if free < len(missing) else ''}not claimed)"


def holders_of(missing: Iterable[HeldRequest]) -> tuple[str, ...]:
    """Return the explorers that hold missing requests, those of the lowest ordinals first."""
    return tuple(
        dict.fromkeys(request.explorer for request in missing if request.explorer is not None)
    )


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


class OpenRequest(Struct):
    """Open ordinal that was dispatched."""

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


class TakenGroup(NamedTuple):
    """Group that a step has taken, with the request that it answers."""

    request: OpenRequest
    group: AnswerGroup


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
    """State of a dispatcher, which changes only by calls; its caller passes the time.

    Ordinals that are requested are always the lowest open ones: those that a restored ledger has
    open come first, then the next ones.
    """

    def __init__(self, settings: DispatchSettings, ledger: Ledger) -> None:
        self.settings = settings
        self.ledger = ledger
        self.open_requests: dict[int, OpenRequest] = {}
        """Ordinals that were dispatched and are neither taken nor settled, ascending."""
        self.arrived: dict[int, AnswerGroup] = {}
        self.earlier_answers: dict[int, AnswerGroup] = {}
        """Answers of earlier epochs, used when their ordinal comes up."""
        self.in_training: dict[int, TakenGroup] = {}
        """Groups of the step in hand, whose ordinals have no fate yet."""
        self._tokens: Counter[str] = Counter()
        """Sampled tokens that got a fate since the last step, other than ``trained``."""
        self._answer_sizes: dict[int, int] = {}
        """Bytes of the answers on the server that are not trained on yet, by ordinal."""
        self._kept_sizes: dict[int, int] = {}
        """Bytes of the answers that are kept for a checkpoint, by the step that trained on them."""
        self.oldest = -1
        """Step of the oldest version whose tokens the step in hand may train on."""
        self.needed = 0
        """Ordinals that the step in hand lacks, which no bound in bytes holds back."""
        self.number = 0
        """Number of the newest request; the entry ids of requests count on."""
        self._dropped: dict[str, list[int]] = {}
        """Ordinals that were dropped since the last step, by reason."""
        self._stale = 0
        """Answers that were too old, since the last step."""
        self._new_tasks = ledger.fingerprint not in (None, settings.fingerprint)
        # Ordinals of another task set mean other prompts: their answers would train the wrong ones.
        if self._new_tasks:
            self._drop("task-set", ledger.open_ordinals())
        ledger.fingerprint = settings.fingerprint
        # Open ordinals come first, so that a resume trains the prompts that the crash interrupted.
        self._restored = ledger.open_ordinals()

    # --- requests ----------------------------------------------------------------------------

    def next_ordinals(self, count: int) -> list[int]:
        """Return the ordinals to dispatch next, at most ``count``, as the bounds allow."""
        restored = self._restored[:count]
        room = min(count - len(restored), self.settings.window - self.ledger.open_count)
        ordinals = [*restored, *range(self.ledger.next, self.ledger.next + max(room, 0))]
        if self.settings.max_bytes is None:
            return ordinals
        free_bytes = self.settings.max_bytes - self.reserved_bytes
        for place, ordinal in enumerate(ordinals):
            if ordinal not in self.earlier_answers:  # those are on the server, and counted
                free_bytes -= self.settings.answer_bytes
            # Invariant 4: a step that waits for an ordinal would otherwise wait for its own memory.
            if free_bytes < 0 and place >= self.needed:
                return ordinals[:place]
        return ordinals

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the answers on the server, and of those that open requests may bring."""
        unanswered = len(self.open_requests) - len(self.arrived)
        # Open requests count with their maximum, as their answers may all arrive before one is
        # freed.
        held_bytes = sum(self._answer_sizes.values()) + sum(self._kept_sizes.values())
        return held_bytes + unanswered * self.settings.answer_bytes

    def lacking(self, count: int) -> int:
        """Return the number of ordinals to dispatch, so that a step of ``count`` is complete."""
        return max(count - len(self.open_requests), 0)

    def open(self, ordinals: Sequence[int], versions: Versions) -> list[int]:
        """Record the dispatch of ordinals; return those that no kept answer answers."""
        # Restored ordinals lie below the ledger's next one, and they are always the first ones.
        self._restored = self._restored[sum(ordinal < self.ledger.next for ordinal in ordinals) :]
        fresh = [ordinal for ordinal in ordinals if ordinal >= self.ledger.next]
        if fresh:
            self.ledger.dispatch(fresh[0], fresh[-1])
        self.open_requests.update((ordinal, OpenRequest(versions)) for ordinal in ordinals)
        for ordinal in ordinals:
            if ordinal in self.earlier_answers:
                self.arrived[ordinal] = self.earlier_answers.pop(ordinal)
        return [ordinal for ordinal in ordinals if ordinal not in self.arrived]

    def split(
        self, due: Iterable[ReissueCandidate]
    ) -> tuple[list[ReissueCandidate], list[ReissueCandidate]]:
        """Return what to request again, and what to give up as its attempts are exhausted."""
        again: list[ReissueCandidate] = []
        exhausted: list[ReissueCandidate] = []
        for candidate in due:
            counts = candidate.reason not in NOT_THE_EXPLORERS
            failures = self.open_requests[candidate.ordinal].failures + counts
            is_exhausted = counts and failures >= self.settings.max_attempts
            (exhausted if is_exhausted else again).append(candidate)
        return again, exhausted

    def requests(self, ordinals: Iterable[int]) -> list[OutgoingRequest]:
        """Return the first requests of ordinals that were dispatched."""
        return [
            self._request(ordinal, self.open_requests[ordinal].versions) for ordinal in ordinals
        ]

    def reissue(self, due: ReissueCandidate, newest: Versions) -> OutgoingRequest:
        """Record the reissued attempt and return its request.

        It names the versions of the attempt before, unless they are too old to be used.
        """
        open_request = self.open_requests[due.ordinal]
        open_request.attempt += 1
        # A lost request is not in the stream, so the script has nothing to replace.
        earlier = None if due.reason == "lost" else open_request.number
        return self._request(due.ordinal, self.versions_for(due, newest), due, earlier)

    def versions_for(self, due: ReissueCandidate, newest: Versions) -> Versions:
        """Return the versions that may serve the next attempt.

        Explorers may no longer have the one version that an exact request named.
        """
        versions = self.open_requests[due.ordinal].versions
        return newest if due.reason == "stale" or versions.exact else versions

    def _request(
        self,
        ordinal: int,
        versions: Versions,
        due: ReissueCandidate | None = None,
        earlier: int | None = None,
    ) -> OutgoingRequest:
        self.number += 1
        open_request = self.open_requests[ordinal]
        open_request.refusal = None
        if earlier is None:  # Nothing can keep it from being written.
            open_request.number, open_request.versions = self.number, versions
            open_request.explorer = None
        return OutgoingRequest(ordinal, self.number, open_request.attempt, versions, due, earlier)

    def written(self, request: OutgoingRequest) -> None:
        """Record that a request is in the stream, and the earlier one no more."""
        open_request = self.open_requests.get(request.ordinal)
        if open_request is None or request.due is None:
            return
        open_request.failures += request.due.reason not in NOT_THE_EXPLORERS
        # An answer may have arrived between the script's reply and this call.
        if request.earlier is not None and request.ordinal not in self.arrived:
            open_request.number, open_request.versions = request.number, request.versions
            open_request.explorer = None

    def format_refused(self) -> str:
        """Return the answers of this step that were refused, once they fill a step.

        Their numbers are powers of two, so that they change seldom.
        """
        counts = {"stale": self._stale} | {
            reason: len(ordinals) for reason, ordinals in self._dropped.items()
        }
        phrases = [
            # Each change of the text is a new report in the log, so powers of two keep them few.
            f"{1 << (count.bit_length() - 1)} or more answers were {reason}"
            for reason, count in counts.items()
            if count >= self.settings.prompts_per_step
        ]
        return f", after {' and '.join(phrases)}" if phrases else ""

    def count_tokens(self, fate: str, tokens: int) -> None:
        """Count sampled tokens that are not trained on; the event of the next step has them."""
        # Reasons may be a user's own: the event takes some dozens.
        is_named = fate in self._tokens or len(self._tokens) < MOST_PHASES - 2
        self._tokens[fate if is_named else "other"] += tokens

    def count_stale(self) -> None:
        """Count an answer that was too old."""
        self._stale += 1

    def drop(self, reason: str, ordinal: int) -> None:
        """Give up an ordinal; the event of the next step has the fate."""
        del self.open_requests[ordinal]
        self.arrived.pop(ordinal, None)
        self._answer_sizes.pop(ordinal, None)
        self._drop(reason, [ordinal])

    def _drop(self, reason: str, ordinals: Sequence[int]) -> None:
        self.ledger.drop(reason, ordinals)
        self._dropped.setdefault(reason, []).extend(ordinals)

    # --- answers -----------------------------------------------------------------------------

    def arrive(self, group: AnswerGroup) -> bool:
        """Keep an answer; return False if its ordinal needs none."""
        open_request = self.open_requests.get(group.ordinal)
        # Invariant 1: a second answer must not take the place of the first, which a step may hold.
        if open_request is None or group.ordinal in self.arrived:
            return False
        open_request.number = None
        self.arrived[group.ordinal] = group
        self._answer_sizes[group.ordinal] = group.size
        return True

    def add_earlier(self, group: AnswerGroup, stands: Stands) -> bool:
        """Keep an answer of an earlier epoch; return False if it is of no use.

        Its ordinal needs an answer, in the same task set, and each version that sampled one of its
        tokens is current.
        """
        needed = self.ledger.is_open(group.ordinal) or group.ordinal >= self.ledger.next
        # The first answer of an ordinal counts, as it does within an epoch.
        if not needed or self._new_tasks or group.ordinal in self.earlier_answers:
            return False
        # A resume rewinds the lineage: no policy of it has sampled the tokens of a version that is
        # gone.
        if not all(stands(version) for version in _versions_of(group)):
            return False
        self.earlier_answers[group.ordinal] = group
        self.count_tokens("kept", group.tokens)
        self._answer_sizes[group.ordinal] = group.size
        return True

    def forget_earlier(self, ordinal: int) -> AnswerGroup:
        """Return the answer of an earlier epoch that is not to be used, and forget it."""
        self._answer_sizes.pop(ordinal, None)
        return self.earlier_answers.pop(ordinal)

    def refuse(self, ordinal: int) -> AnswerGroup:
        """Return the answer of an ordinal that is not to be used, and forget it."""
        self._answer_sizes.pop(ordinal, None)
        return self.arrived.pop(ordinal)

    def spend_attempt(self, ordinal: int) -> None:
        """Count a failed attempt of an ordinal that is still open and unanswered."""
        if ordinal in self.open_requests and ordinal not in self.arrived:
            self.open_requests[ordinal].failures += 1

    def is_last_attempt(self, ordinal: int) -> bool:
        """Return True if one more failed attempt drops the ordinal."""
        open_request = self.open_requests.get(ordinal)
        failures = 0 if open_request is None else open_request.failures
        # Never the first one: it may be cut off by an outage that no other request has met yet.
        return failures >= max(self.settings.max_attempts - 1, 1)

    def is_alone(self, ordinal: int) -> bool:
        """Return True if no other request is open and unanswered."""
        return not self.open_requests.keys() - self.arrived - {ordinal}

    def set_refusal(self, number: int, reason: str) -> None:
        """Record the reason for which an explorer gave a request back; no attempt failed."""
        for open_request in self.open_requests.values():
            if open_request.number == number:
                # Only the reason: the request is issued again once the stream lacks it (invariant 3
                # of inspection).
                open_request.refusal = reason

    def fail(self, number: int) -> int | None:
        """Record that an explorer gave a request back; return its ordinal, if it is still open."""
        for ordinal, open_request in self.open_requests.items():
            if open_request.number == number:
                open_request.number = None
                return ordinal
        return None

    @property
    def oldest_named(self) -> int | None:
        """Step of the oldest version that a request names whose answer is not taken."""
        return min(
            (open_request.versions.oldest.step for open_request in self.open_requests.values()),
            default=None,
        )

    def stale(self) -> list[AnswerGroup]:
        """Return the answers that hold a token which the step in hand may not train on."""
        return [group for group in self.arrived.values() if group.oldest_step < self.oldest]

    def candidates(self, count: int) -> list[AnswerGroup]:
        """Return the answers, as far as they arrived, that a step of ``count`` groups takes."""
        if self.settings.order == "arrival":
            first = self._due(count) if self.settings.when_stale == "wait" else []
            others = (ordinal for ordinal in self.arrived if ordinal not in first)
            chosen = [*first, *islice(others, count - len(first))]
        else:
            # Open requests ascend, so these are the lowest ordinals.
            chosen = list(islice(self.open_requests, count))
        return [self.arrived[ordinal] for ordinal in chosen if ordinal in self.arrived]

    def _due(self, count: int) -> list[int]:
        """Return the ordinals without which later steps could not use all others in time.

        A request that names a version may be answered with it, so its group has a last step. At
        most ``count`` groups fit into each step before that. Groups that arrived come first.
        """
        places = {ordinal: place for place, ordinal in enumerate(self.arrived)}
        chosen: list[int] = []
        for named in sorted(
            {open_request.versions.oldest.step for open_request in self.open_requests.values()}
        ):
            due = [
                ordinal
                for ordinal, open_request in self.open_requests.items()
                if open_request.versions.oldest.step <= named
            ]
            # Steps after this one whose bound of staleness still admits the version.
            later_steps = max(named - self.oldest, 0)
            # Groups that fit into no later step, and so belong into this one.
            lacking = len(due) - later_steps * count - len(chosen)
            if lacking > 0:
                candidates = [ordinal for ordinal in due if ordinal not in chosen]
                chosen += sorted(candidates, key=lambda ordinal: places.get(ordinal, len(places)))[
                    :lacking
                ]
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
            # Open no more, but without a fate until its step is in the log: in_training holds it
            # between.
            request = self.open_requests.pop(group.ordinal)
            del self.arrived[group.ordinal]
            self.in_training[group.ordinal] = TakenGroup(request, group)
        # The order of arrival would make two runs of one seed differ.
        return sorted(groups, key=lambda group: group.ordinal)

    def give_back(self, ordinals: Iterable[int]) -> None:
        """Return taken groups to those that arrived, as the step was not taken."""
        for ordinal in ordinals:
            request, group = self.in_training.pop(ordinal)
            self.open_requests[ordinal] = request
            self.arrived[ordinal] = group
        # Ascending, as the lowest ordinals are those of the next step.
        self.open_requests = dict(sorted(self.open_requests.items()))

    def find_held_groups(self) -> list[AnswerGroup]:
        """Return the groups that may be trained on: that arrived, or that the step in hand has."""
        training = (entry.group for entry in self.in_training.values())
        return [*self.arrived.values(), *self.earlier_answers.values(), *training]

    def missing(self, count: int, now: float) -> list[HeldRequest]:
        """Return the requests without an answer that a step of ``count`` groups waits for."""
        lowest = (
            self.open_requests
            if self.settings.order == "arrival"
            else islice(self.open_requests, count)
        )
        return [self._held(ordinal, now) for ordinal in lowest if ordinal not in self.arrived]

    def _held(self, ordinal: int, now: float) -> HeldRequest:
        open_request = self.open_requests[ordinal]
        seconds = now - open_request.claimed_at if open_request.explorer else 0.0
        return HeldRequest(ordinal, open_request.attempt, open_request.explorer, seconds)

    # --- claims ------------------------------------------------------------------------------

    def observe(
        self, snapshot: StreamSnapshot, now: float, stable_for: float, excluded: Container[str] = ()
    ) -> list[ReissueCandidate]:
        """Record the explorers of requests; return the ordinals whose attempt counts no more.

        Args:
            snapshot: Requests and claims on the server. All answers before it were read.
            now: Seconds of a clock that is never set.
            stable_for: Seconds for which the server has answered without a fault. Claims count as
                idle for no longer, so that each gets one full lease after an outage.
            excluded: Explorers whose claims count no more.
        """
        due = []
        for ordinal, open_request in self.open_requests.items():
            if ordinal in self.arrived:
                continue
            if open_request.number is None or open_request.number not in snapshot.numbers:
                # Its request is gone, and all answers before the snapshot are read: it is lost.
                open_request.number = None
                due.append(ReissueCandidate(ordinal, open_request.refusal or "lost"))
                continue
            claim = snapshot.claims.get(open_request.number)
            if claim is None:
                open_request.explorer = None
                if open_request.number in snapshot.unclaimable:
                    due.append(ReissueCandidate(ordinal, UNCLAIMABLE))
                continue
            # The server has idle time only; renewals reset it, so the first sight dates the claim.
            if open_request.explorer is None:
                open_request.claimed_at = now - claim.idle
            open_request.explorer = claim.explorer
            if claim.explorer in excluded:
                due.append(ReissueCandidate(ordinal, EXCLUDED))
            # Idle time grows while the server is away, when no explorer can renew (decision 21).
            elif min(claim.idle, stable_for) >= self.settings.claim_lease:
                due.append(ReissueCandidate(ordinal, "lapsed", self.settings.claim_lease))
            # An explorer that hangs while its renewals continue is found by this deadline alone.
            elif stable_for >= self.settings.claim_lease and self._is_overdue(open_request, now):
                due.append(ReissueCandidate(ordinal, "deadline"))
        return due

    def _is_overdue(self, open_request: OpenRequest, now: float) -> bool:
        return now - open_request.claimed_at >= self.settings.request_deadline

    # --- fates -------------------------------------------------------------------------------

    def create_step_event(
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
        # Invariant 1, checked before the event: a fate in the log cannot be taken back.
        self.check_taken(step, ordinals)
        return StepTrained(
            step=step,
            trained=ranges(ordinals),
            dropped=self.dropped,
            staleness=staleness,
            tokens={
                **self._tokens,
                "trained": sum(self.in_training[ordinal].group.tokens for ordinal in ordinals),
            },
            metrics=metrics,
        )

    def check_taken(self, step: int, ordinals: Sequence[int]) -> None:
        """Raise LedgerError unless a step has taken ordinals, each once."""
        strange = sorted(set(ordinals) - self.in_training.keys())
        if strange or len(set(ordinals)) != len(ordinals):
            raise LedgerError("untaken", step, tuple(ranges(strange or sorted(ordinals))))

    @property
    def dropped(self) -> dict[str, tuple[OrdinalRange, ...]]:
        """Ordinals that were dropped since the last event with their fates, by reason."""
        return {reason: ranges(ordinals) for reason, ordinals in self._dropped.items()}

    def clear_dropped(self) -> None:
        """Forget the dropped ordinals, once an event with their fates is in the log."""
        self._dropped.clear()

    def train(self, ordinals: Sequence[int], step: int = 0) -> None:
        """Give ordinals their fate, once the event of their step is in the log."""
        self.ledger.train(ordinals)
        for ordinal in ordinals:
            self.in_training.pop(ordinal, None)
        self._tokens.clear()
        size = sum(self._answer_sizes.pop(ordinal, 0) for ordinal in ordinals)
        # A resume from the checkpoint before needs them, so they still take memory of the server.
        if self.settings.keep_answers == "checkpoint":
            self._kept_sizes[step] = self._kept_sizes.get(step, 0) + size
        # The event of this step has them; published twice, they would be two fates.
        self.clear_dropped()
        self._stale = 0

    def checkpoint(self, step: int) -> None:
        """Forget the answers that a checkpoint of a step covers."""
        for trained_step in [past for past in self._kept_sizes if past <= step]:
            del self._kept_sizes[trained_step]


def count_sampled(experience: ExperienceHeader) -> int:
    """Return the tokens that the policy sampled for an experience."""
    return sum(experience.version_tokens.values())


def _versions_of(group: AnswerGroup) -> set[StepRef]:
    return {version for experience in group.experiences for version in experience.version_tokens}
