"""``trinity-events explain``."""

from __future__ import annotations

from contextlib import aclosing, suppress
from functools import partial
from pathlib import Path
from typing import Annotated

import anyio
import msgspec
import typer
from msgspec import UNSET, Struct

from trinity_schemas import (
    ContractError,
    Envelope,
    EnvelopeReader,
    Event,
    Kind,
    RewardErrorReported,
    StacksTaken,
)

from ..analysis.causes import MOST_CAUSES, Cause, find_causes, find_unseen
from ..analysis.explain import explain as format_explanation
from ..analysis.explain import format_profiles, format_unfinished
from ..analysis.hosts import format_unseen
from ..analysis.outcomes import Outcome, OutcomeName, format_end, format_outcomes, get_outcome
from ..analysis.proof import Proof, ProofEntry, format_proof
from ..archive import Archive, ArchiveMissing
from ..archive.export import whole_stream
from ..core import MonitorState
from ..core.fold import decode_entry
from ..core.handlers.waits import find_wait_chains, format_stacks
from ..core.resumptions import format_resumption
from ..core.reward_errors import count_failed_prompts, format_evidence
from ..errors import TrinityError
from ..live_facts import read_live_facts
from ..log import RedisEventLog, Stream, before, require_run
from ..replay import current_state
from ..system.counts import format_count, pluralize
from ..views import waits_as_json
from ..views.as_json import causes_as_json
from ..views.documents import Explanation
from ..views.status import format_next_step
from ..views.terminal import print_out
from .last_entries import try_decode
from .options import CheckpointRoot, Json, RedisUrl, checkpoint_root, open_client, print_json

_FURTHER_REASONS = frozenset(
    (
        *("server-full", "server-read-only", "no-reducer", "reducer-behind"),
        *("stopped", "ended", "silent", "excluded", "paused", "unread-group"),
    )
)
"""Reasons of further causes that are printed; the chains of waits name the others."""


class StepNotFound(TrinityError):
    """The run has no such step.

    Attributes:
        step: The step.
        reason: What is known instead.
    """

    step: int
    reason: str
    text = "{reason}"


class NoStep(TrinityError):
    """The argument is not a step.

    Attributes:
        words: Arguments that are none; empty if a step is missing.
    """

    words: tuple[str, ...] = ()

    def __str__(self) -> str:
        if not self.words:
            return "--proof names the entries of one step: name the step, such as demo-1 100"
        return (
            "explain takes a run and a step, such as demo-1 100, and either may be left out: not "
            f"{' '.join(self.words)!r}"
        )


class _StepFacts(Struct, frozen=True, kw_only=True):
    """State of a run, with the outcomes of one step."""

    state: MonitorState
    causes: list[Cause]
    """Causes for which the run does not continue, the first cause first; at most MOST_CAUSES."""
    more_causes: int
    """Number of causes beyond these."""
    unseen: str
    """Sentence on the hosts whose processes cannot be seen; empty without."""
    now: int
    outcomes: list[Outcome]
    """Announced outcomes from the log, if the state no longer has the step."""
    proof: list[ProofEntry]
    """Entries that prove the outcomes of the step, if they are asked for."""
    stacks: list[tuple[str, StacksTaken]]
    """Stacks that were taken at deadlines, each with its entry."""
    reward_errors: dict[str, RewardErrorReported]
    """Reward errors by their entries."""


def explain(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN] [STEP]",
            help="The run's id, by default of the newest run; and the training step.",
            show_default=False,
        ),
    ] = None,
    proof: Annotated[
        bool, typer.Option("--proof", help="Name the entries that prove the outcome of the step.")
    ] = False,
    root: CheckpointRoot = None,
    redis_url: RedisUrl = None,
    as_json: Json = False,
) -> None:
    """Explain the outcome of a step, or why it is not ready: what is missing, and since when.

    Prints one line per kind, and the cause first. The outcome of an old step is read from the log.
    Without a step, explains what a run waits for: the first cause of a standstill, then each wait,
    and what its culprit waits for.

    Example: trinity-events explain demo-1 100

    Example: trinity-events explain 100

    With --proof, each line names an entry of the log, its part in the proof and its object; the
    entry from which the outcome follows is marked with >.

    Example: trinity-events explain demo-1

    Example: trinity-events explain demo-1 100 --proof
    """
    run, step = _parse_words(words or [])
    if proof and step is None:
        raise NoStep
    facts = anyio.run(
        partial(_read_facts, redis_url, run, step, checkpoint_root(root), proof=proof)
    )
    state = facts.state
    lines = _format_run(facts) if step is None else _format_step(facts, step)
    if not as_json:
        for line in (*lines, *map(format_proof, facts.proof)):
            print_out(line, lines=False)
        return
    kinds: dict[Kind, OutcomeName] = {outcome.kind: outcome.outcome for outcome in facts.outcomes}
    # The state is what the fold knows now; announcements are read for steps that it has dropped.
    if step in state.steps:
        kinds = {
            kind: get_outcome(kind_state) for kind, kind_state in state.steps[step].kinds.items()
        }
    print_json(
        msgspec.to_builtins(
            Explanation(
                run_id=state.run_id,
                epoch=state.epoch,
                step=step,
                kinds=kinds,
                explanation=" ".join(line.strip() for line in lines),
                proof=facts.proof if proof else UNSET,
            )
        )
        | causes_as_json(facts.causes, facts.now)
        | waits_as_json(state, facts.now)
    )


def _format_step(facts: _StepFacts, step: int) -> list[str]:
    """Return the outcomes of a step, then the waits of the run if the step is not settled."""
    state, step_state = facts.state, facts.state.steps.get(step)
    lines = (
        []
        if step_state is None
        else format_explanation(state, step, now=facts.now, named=None).splitlines()
    )
    lines += format_outcomes(step, facts.outcomes)
    lines += format_end(state, step)
    lines += format_profiles(state, step)
    if not lines:
        # Raised here, and not where the step is looked up: a profile or the end of the run may be
        # all that is known of it.
        raise StepNotFound(step, _format_not_found(state, step))
    if step_state is not None and not all(kind.settled for kind in step_state.kinds.values()):
        lines += find_wait_chains(state, facts.now)
    return lines + _stacks(facts)


def _format_run(facts: _StepFacts) -> list[str]:
    """Return the waits of a run, and the steps that are neither ready nor failed."""
    state = facts.state
    chains = list(find_wait_chains(state, facts.now))
    if len(chains) == 1 and facts.causes and chains[0] in facts.causes[0].sentence:
        chains = []  # the first cause says it
    lines = [
        *(f"First cause: {cause.sentence}" for cause in facts.causes[:1]),
        *(
            f"Another cause: {cause.sentence}"
            for cause in facts.causes[1:]
            if cause.reason in _FURTHER_REASONS
        ),
        *([f"{facts.more_causes} more causes are not listed."] if facts.more_causes else []),
        *chains,
        *_reward_errors(facts),
        *format_unfinished(state, now=facts.now),
        *format_resumption(state),
        *([format_next_step(state)] if state.closed in ("failed", "interrupted") else []),
        *_stacks(facts),
    ]
    lines = lines or [
        f"No process of run {state.run_id} has reported a wait, and no step waits for anything."
    ]
    return [*lines, facts.unseen] if facts.unseen else lines


def _reward_errors(facts: _StepFacts) -> list[str]:
    """Return the first reward errors with their answers, and how many prompts were dropped."""
    lines = []
    for error in facts.state.reward_errors.values():
        lines.append(f"A reward failed: {error.sentence.rstrip('.')} (entry {error.entry_id}).")
        if (event := facts.reward_errors.get(error.entry_id)) is not None:
            lines += format_evidence(event)
    if dropped := count_failed_prompts(facts.state):
        dropped_prompts = f"{format_count(dropped, 'prompt')} {pluralize(dropped, 'was', 'were')}"
        lines.append(f"{dropped_prompts} dropped, as their rewards failed.")
    return lines


def _stacks(facts: _StepFacts) -> list[str]:
    return [line for entry, stacks in facts.stacks for line in format_stacks(entry, stacks)]


def _parse_words(words: list[str]) -> tuple[str | None, int | None]:
    if len(words) == 1 and not _is_step(words[0]):
        return words[0], None
    if len(words) > 2 or (words and not _is_step(words[-1])):
        raise NoStep(tuple(words))
    return (None if len(words) < 2 else words[0]), (int(words[-1]) if words else None)


def _is_step(word: str) -> bool:
    # isdigit() alone is true of a superscript two, which int() refuses.
    return word.isascii() and word.isdigit()


def _format_not_found(state: MonitorState, step: int) -> str:
    newest = f"its newest step is {max(state.steps)}" if state.steps else "it has no step yet"
    if step <= state.trainer_step:
        newest = (
            f"it has gone on to step {state.trainer_step}, and neither published the weights of "
            "that one nor saved it"
        )
    return (
        f"nothing is known of step {step} in epoch {state.epoch} of run {state.run_id}: "
        f"{newest} (see trinity-events status {state.run_id})"
    )


async def _read_facts(
    redis_url: str | None, run: str | None, step: int | None, root: Path, *, proof: bool
) -> _StepFacts:
    async with open_client(redis_url) as client:
        log = RedisEventLog(client, await require_run(client, run))
        archive = Archive(root / log.run_id, log.run_id)
        state = await current_state(log)
        facts = await read_live_facts(client, log.run_id)
        outcomes: list[Outcome] = []
        # The state holds recent steps only; the outcome of an older one is in the log or the
        # archive.
        if step is not None and step not in state.steps:
            outcomes = await _announced(log, archive, step)
        entries: list[ProofEntry] = []
        if proof and step is not None:
            entries = await _proof(log, archive, step)
        stacks = await _stacks_in(log, archive, state)
        errors = await _reward_errors_in(log, archive, state)
        causes = find_causes(state, facts)
        return _StepFacts(
            state=state,
            causes=causes[:MOST_CAUSES],
            more_causes=max(0, len(causes) - MOST_CAUSES),
            unseen=format_unseen(find_unseen(state, facts)),
            now=facts.now,
            outcomes=outcomes,
            proof=entries,
            stacks=stacks,
            reward_errors=errors,
        )


async def _stacks_in(
    log: RedisEventLog, archive: Archive, state: MonitorState
) -> list[tuple[str, StacksTaken]]:
    """Return the stacks that the state names, from the entries that have them."""
    stacks = []
    for entry_id in state.stacks.values():
        event = await _read_event(log, archive, entry_id)
        if isinstance(event, StacksTaken):
            stacks.append((entry_id, event))
    return stacks


async def _reward_errors_in(
    log: RedisEventLog, archive: Archive, state: MonitorState
) -> dict[str, RewardErrorReported]:
    """Return the reward errors that the state names, from the entries that have them."""
    errors = {}
    for error in state.reward_errors.values():
        event = await _read_event(log, archive, error.entry_id)
        if isinstance(event, RewardErrorReported):
            errors[error.entry_id] = event
    return errors


async def _read_event(log: RedisEventLog, archive: Archive, entry_id: str) -> Event | None:
    """Return the event of an entry; None if it cannot be read."""
    # The state keeps the entry's id alone: stacks and answers may be large.
    async with aclosing(whole_stream(log, Stream.EVENTS, archive, before(entry_id))) as entries:
        entry = await anext(entries, None)
    envelope = None if entry is None else try_decode(entry)
    return envelope.event if isinstance(envelope, Envelope) else None


async def _proof(log: RedisEventLog, archive: Archive, step: int) -> list[ProofEntry]:
    """Return the entries that prove the outcome of a step, from the whole log."""
    # Of several attempts only those count that the announcement names, so that announcements come
    # first.
    proof, decode = Proof(step), EnvelopeReader().decode
    for stream, add in (
        (Stream.ANNOUNCEMENTS, proof.add_announcement),
        (Stream.EVENTS, proof.add),
    ):
        async for entry in whole_stream(log, stream, archive):
            with suppress(ContractError):
                add(entry.id, decode_entry(log.run_id, entry.payload, decode))
    return proof.entries


async def _announced(log: RedisEventLog, archive: Archive, step: int) -> list[Outcome]:
    """Return the outcome of each kind and epoch of a step, from the log."""
    outcomes: dict[tuple[int, str], Outcome] = {}
    try:
        async for entry in whole_stream(log, Stream.ANNOUNCEMENTS, archive):
            outcome = Outcome.from_announcement(entry.id, try_decode(entry), step)
            if outcome is not None:
                # By epoch too: after a resume a step may be announced again.
                outcomes[outcome.epoch, outcome.kind] = outcome
    except ArchiveMissing as error:
        raise StepNotFound(step, f"step {step} was settled long ago, and {error}") from None
    return list(outcomes.values())
