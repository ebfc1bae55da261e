"""Inspection of answers: no experience reaches training that was not checked. No I/O.

1. A group has the samples of one explorer's answer to one attempt of an ordinal that needs an
   answer; each was found to be without fault (:mod:`.experience_checks`).
2. A malformed answer counts once against the explorer that it names. After several the explorer is
   excluded, and no answer that names it is taken.
3. What an entry says withdraws no request: a request is issued again once it is gone from the
   server, which only its claim's answer removes. So a false answer cannot displace a true one.
4. Every entry is used in a group, or is to be freed.
5. No payload of a group that may be trained on is to be freed, whatever other entries name it.
6. State is bounded: samples of incomplete groups are dropped whenever all entries were read. The
   script of an answer writes a group at once, so that its other samples will not come.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from msgspec import Struct, field

from trinity_schemas import Experience, ExperienceReference, StepRef

from ..core.handlers.rollouts import format_exclusion
from .answers import Answer, Restarted, Sample, Unreadable
from .dispatch_state import AnswerGroup, DispatchState, Stands, count_sampled
from .exclusions import Exclusions
from .experience_checks import (
    LONGEST_DETAIL,
    Fault,
    find_fault,
    find_reference_fault,
    find_score_fault,
    find_version_fault,
)
from .settings import DispatchSettings
from .streams import EXCLUDED, MALFORMED

_LOGGED = 16
"""Malformed answers that are logged one by one; of later ones, those whose number is a power of 2:
an explorer may send any number of them under names that it invents."""

logger = logging.getLogger(__name__)


class _Partial(Struct):
    """Samples of an answer that were read so far, by their index."""

    samples: dict[int, Sample] = field(default_factory=dict)
    is_malformed: bool = False
    """True if one of its samples was malformed, so that the answer has been counted."""


class AnswerInspector:
    """Inspection of the answers of one epoch.

    Args:
        settings: Settings of the dispatch.
        state: State of the dispatch, of which it marks requests whose answer was refused.
        exclusions: Excluded explorers of the epoch.
        transport: Medium of the payloads that the run's ranks read; None if they read none.
    """

    def __init__(
        self,
        settings: DispatchSettings,
        state: DispatchState,
        exclusions: Exclusions,
        transport: str | None = None,
    ) -> None:
        self._transport = transport
        self.refused = False
        """True if an answer was refused since all entries were read last."""
        self._settings = settings
        self._state = state
        self._exclusions = exclusions
        self._partial: dict[tuple[int, int, int, str], _Partial] = {}
        """Incomplete groups by epoch, ordinal, attempt and explorer."""
        self._useless: list[str] = []
        self._useless_payloads: set[str] = set()
        self._published: set[StepRef] | None = None
        self._malformed = self._unreadable = 0

    def add_published(self, version: StepRef) -> None:
        """Let answers have tokens of a version; without a call they may have those of any.

        Versions are forgotten that are older than what an open request names.
        """
        named = self._state.oldest_named
        # The set stays as small as the window of staleness, however long the run is.
        oldest = self._state.oldest if named is None else min(named, self._state.oldest)
        earlier = {published for published in self._published or () if published.step >= oldest}
        self._published = earlier | {version}

    def pop_useless(self) -> list[str]:
        """Return the ids of entries that are to be freed, each once."""
        useless, self._useless = self._useless, []
        return useless

    def pop_useless_payloads(self) -> set[str]:
        """Return the names of payloads of refused entries, each once."""
        useless, self._useless_payloads = self._useless_payloads, set()
        return useless

    def refuse_payload(self, group: AnswerGroup, reason: str) -> None:
        """Count a group against its explorer whose payload is malformed, as its ranks found."""
        fault = Fault("unreadable", reason)
        self._refuse(group.ordinal, group.attempt, group.experiences[0].explorer, fault)

    def add(self, answer: Sample | Unreadable | Restarted) -> AnswerGroup | None:
        """Inspect an entry; return the group that is complete with it."""
        match answer:
            case Sample():
                return self._add_sample(answer)
            case Unreadable():
                self._add_unreadable(answer)
            case Restarted():
                # The other samples of these groups were in the stream that is gone.
                self._partial.clear()
        return None

    def add_earlier(self, answers: Iterable[Answer], stands: Stands) -> None:
        """Keep the sound groups of earlier epochs of which each token's version is current."""
        for answer in answers:
            if isinstance(answer, Restarted):
                self._partial.clear()
                continue
            sample = self._with_prompt(answer) if isinstance(answer, Sample) else None
            if sample is None:
                self._useless.append(answer.entry_id)
                continue
            if not self._is_sound(sample.experience):
                self._discard(sample)
                continue
            group = self._assemble(sample)
            if group is not None and not self._state.add_earlier(group, stands):
                self.discard_group(group)

    def end_entries(self) -> None:
        """Refuse incomplete answers, once all entries were read."""
        partial, self._partial = self._partial, {}
        for (epoch, ordinal, attempt, explorer), answer in partial.items():
            for sample in answer.samples.values():
                self._discard(sample)
            if (
                epoch == self._settings.epoch
                and not answer.is_malformed
                # An ordinal that another answer filled makes this one late, not malformed.
                and self._needs_answer(ordinal)
            ):
                count = f"{len(answer.samples)} of {self._settings.samples} samples"
                fault = Fault("request", f"it has {count}")
                self._refuse(ordinal, attempt, explorer, fault)
        # The look that read all entries also finds the requests that are gone.
        self.refused = False

    # --- entries -----------------------------------------------------------------------------

    def _add_sample(self, sample: Sample) -> AnswerGroup | None:
        experience = sample.experience
        if experience.run_id != self._settings.run_id or experience.epoch > self._settings.epoch:
            self._add_unreadable(Unreadable(sample.entry_id, "it is of another run or epoch"))
            return None
        # Late answers are normal, since a request may be issued again, and no fault of the
        # explorer.
        if experience.epoch < self._settings.epoch or self._is_answered(experience.ordinal):
            if experience.epoch == self._settings.epoch:
                self._state.count_tokens("surplus", count_sampled(experience))
            self._discard(sample)
            return None
        if experience.explorer in self._exclusions:
            # Its answer removed the request, which is issued again for a reason that uses up no
            # attempt.
            self._mark(experience.ordinal, EXCLUDED)
            self._state.count_tokens(EXCLUDED, count_sampled(experience))
            self._discard(sample)
            return None
        sample = self._with_prompt(sample)
        fault = self._find_fault(sample.experience)
        if fault is not None:
            self._state.count_tokens(MALFORMED, count_sampled(experience))
            self._discard(sample)
            self._count_malformed(
                experience.ordinal, experience.attempt, experience.explorer, fault
            )
            return None
        return self._assemble(sample)

    def _add_unreadable(self, entry: Unreadable) -> None:
        self._useless.append(entry.entry_id)
        sender = entry.sender
        if (
            sender is not None
            and (sender.run_id, sender.epoch) == (self._settings.run_id, self._settings.epoch)
            and self._needs_answer(sender.ordinal)
        ):
            if sender.explorer in self._exclusions:
                self._mark(sender.ordinal, EXCLUDED)
            else:
                fault = Fault("unreadable", entry.reason)
                self._count_malformed(sender.ordinal, sender.attempt, sender.explorer, fault)
            return
        self._unreadable += 1
        # At 1, 2, 4, 8: a writer cannot flood the trainer's output.
        if self._unreadable.bit_count() == 1:
            logger.warning(
                "run %s: the answers have entries that answer none of its requests (%d so far; the "
                "last one: %s), which are passed over",
                *(self._settings.run_id, self._unreadable, _format_reason(entry.reason)),
            )

    def _with_prompt(self, sample: Sample) -> Sample:
        """Return a sample with the prompt that it shares, if that one was read before."""
        experience = sample.experience
        partial = self._partial.get(_answer_name(experience))
        # A reference shares nothing: its prompt is in the payload of the group.
        if isinstance(experience, ExperienceReference) or not experience.shares_prompt:
            return sample
        if partial is None or 0 not in partial.samples:
            return sample
        first = partial.samples[0].experience
        if isinstance(first, ExperienceReference):
            return sample
        return sample._replace(experience=experience.with_prompt_of(first))

    def _assemble(self, sample: Sample) -> AnswerGroup | None:
        """Return the group of a sample if the sample is its last one."""
        experience = sample.experience
        name = _answer_name(experience)
        partial = self._partial.setdefault(name, _Partial())
        replaced = partial.samples.get(experience.sample)
        # A writer may send one sample twice; each entry is freed (invariant 4).
        if replaced is not None:
            self._discard(replaced)
        partial.samples[experience.sample] = sample
        if len(partial.samples) < self._settings.samples:
            return None
        del self._partial[name]
        ordered = [partial.samples[index] for index in sorted(partial.samples)]
        payloads = {sample.payload for sample in ordered}
        if len(payloads) > 1:
            for refused in ordered:
                self._discard(refused)
            fault = Fault("request", "its samples name several payloads")
            self._count_malformed(
                experience.ordinal, experience.attempt, experience.explorer, fault
            )
            return None
        first = ordered[0].experience
        payload_size = first.payload.size if isinstance(first, ExperienceReference) else 0
        return AnswerGroup(
            ordinal=experience.ordinal,
            attempt=experience.attempt,
            experiences=[sample.experience for sample in ordered],
            entry_ids=[sample.entry_id for sample in ordered],
            size=sum(sample.size for sample in ordered) + payload_size,
        )

    def discard_group(self, group: AnswerGroup) -> None:
        """Free the entries of a group, and its payload."""
        self._useless += group.entry_ids
        if group.payload is not None:
            self._useless_payloads.add(group.payload)

    def _discard(self, sample: Sample) -> None:
        self._useless.append(sample.entry_id)
        if sample.payload is not None:
            self._useless_payloads.add(sample.payload)

    # --- checks ------------------------------------------------------------------------------

    def _find_fault(self, experience: Experience | ExperienceReference) -> Fault | None:
        """Return the first fault of an answer to a request of this epoch."""
        settings, request = self._settings, self._state.open_requests.get(experience.ordinal)
        if request is None:
            return Fault(
                "request", f"it answers ordinal {experience.ordinal}, which was not asked for"
            )
        # Earlier attempts are fine: their answer may cross with the request that replaces theirs.
        if experience.attempt > request.attempt:
            return Fault(
                "request", f"it is of attempt {experience.attempt}, and {request.attempt} were made"
            )
        return self._find_content_fault(experience) or find_version_fault(
            experience,
            epoch=settings.epoch,
            exact=request.versions.oldest if request.versions.exact else None,
            published=self._published,
        )

    def _find_content_fault(self, experience: Experience | ExperienceReference) -> Fault | None:
        if experience.samples != self._settings.samples:
            return Fault(
                "request",
                f"it is one of {experience.samples} samples, not of {self._settings.samples}",
            )
        limits, sampling = self._settings.limits, self._settings.sampling
        if isinstance(experience, ExperienceReference):
            fault = self._find_payload_fault(experience) or find_reference_fault(
                experience, limits, sampling
            )
            return fault or find_score_fault(experience, limits)
        if experience.shares_prompt:
            return Fault(
                "request", f"sample {experience.sample} came without the prompt that it shares"
            )
        return find_fault(experience, limits, sampling) or find_score_fault(experience, limits)

    def _find_payload_fault(self, reference: ExperienceReference) -> Fault | None:
        payload, most = reference.payload, self._settings.answer_bytes
        if payload.transport != self._transport:
            readable = f"in {self._transport}" if self._transport else "in none"
            return Fault(
                "request",
                f"its tokens are in {payload.transport}, and the run reads payloads {readable}",
            )
        if most and payload.size > most:
            return Fault("length", f"its payload has {payload.size} bytes, above {most}")
        return None

    def _is_sound(self, experience: Experience | ExperienceReference) -> bool:
        """Return True if an answer of an earlier epoch has no fault; it counts against none."""
        of_run = experience.run_id == self._settings.run_id
        is_earlier = experience.epoch <= self._settings.epoch
        return of_run and is_earlier and self._find_content_fault(experience) is None

    def _needs_answer(self, ordinal: int) -> bool:
        return ordinal in self._state.open_requests and ordinal not in self._state.arrived

    def _is_answered(self, ordinal: int) -> bool:
        """Return True if an ordinal was asked for in this lineage, and needs no answer now."""
        return ordinal < self._state.ledger.next and not self._needs_answer(ordinal)

    # --- refusals ----------------------------------------------------------------------------

    def _count_malformed(self, ordinal: int, attempt: int, explorer: str, fault: Fault) -> None:
        """Refuse an answer for one of its samples, if it was not refused for another one."""
        name = self._settings.epoch, ordinal, attempt, explorer
        partial = self._partial.setdefault(name, _Partial())
        # Invariant 2: several bad samples of one answer count once.
        if not partial.is_malformed:
            partial.is_malformed = True
            self._refuse(ordinal, attempt, explorer, fault)

    def _refuse(self, ordinal: int, attempt: int, explorer: str, fault: Fault) -> None:
        self._mark(ordinal, MALFORMED)
        self._malformed += 1
        run_id, reason = self._settings.run_id, _format_reason(fault.detail)
        if self._malformed <= _LOGGED or self._malformed.bit_count() == 1:
            logger.warning(
                "run %s: the answer of %s to attempt %d of ordinal %d is malformed (%s): %s; it is "
                "asked for again",
                *(run_id, _format_reason(explorer), attempt, ordinal, fault.kind, reason),
            )
        excluded = self._exclusions.add_malformed(explorer, reason)
        if excluded is not None:
            logger.error(
                "run %s: %s; its requests are issued again",
                *(run_id, format_exclusion(explorer, excluded)),
            )

    def _mark(self, ordinal: int, reason: str) -> None:
        """Note why the answer of a request was refused, as the reason to issue it again."""
        request = self._state.open_requests.get(ordinal)
        if request is not None:
            # The first one stays: further samples of that answer may be refused for another reason.
            request.refusal = request.refusal or reason
            self.refused = True


def _answer_name(experience: Experience | ExperienceReference) -> tuple[int, int, int, str]:
    return experience.epoch, experience.ordinal, experience.attempt, experience.explorer


def _format_reason(text: str) -> str:
    """Return a text on one line, as far as logs and events take it."""
    return " ".join(text[: 2 * LONGEST_DETAIL].split())[:LONGEST_DETAIL]
