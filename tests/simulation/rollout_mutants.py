"""Planted bugs in the real code of rollouts, which their simulation must find."""

from __future__ import annotations

from tests.simulation.mutants import Mutant, _mutant, planted
from tests.simulation.rollout_server import RolloutServer
from tests.simulation.rollouts import TrainerLife, simulate
from trinity_events.rollouts.dispatch_state import DispatchState
from trinity_events.rollouts.dispatcher import RolloutDispatcher
from trinity_events.rollouts.inspection import AnswerInspector

MUTANTS = (
    _mutant(
        "a resume begins with an empty ledger",
        40,
        (TrainerLife, "_resume", "ledger = Ledger.restored(checkpoint.ledger)", "pass"),
    ),
    _mutant(
        "a checkpoint holds the newest ledger",
        40,
        (
            RolloutDispatcher,
            "ledger_at",
            "replace(self._logged_ledger, step=step)",
            "self.ledger.to_contract(step)",
        ),
    ),
    _mutant(
        "answers of every version are kept",
        100,
        (DispatchState, "add_earlier", "if not all(", "if False and not all("),
    ),
    _mutant(
        "every answer counts",
        40,
        (RolloutServer, "_end_claim", "consumers is None or", "False and"),
    ),
    _mutant(
        "a lost request is not issued again",
        40,
        (
            DispatchState,
            "observe",
            'due.append(ReissueCandidate(ordinal, open_request.refusal or "lost"))',
            "pass",
        ),
    ),
    _mutant(
        "a prompt whose reward failed is forgotten",
        40,
        (
            RolloutDispatcher,
            "_settle_failed_rewards",
            "self._state.drop(REWARD_FAILED, ordinal)",
            "del self._state.open_requests[ordinal]",
        ),
    ),
    _mutant(
        "a malformed answer is taken",
        40,
        (AnswerInspector, "_add_sample", "if fault is not None:", "if False:"),
    ),
    _mutant(
        "a malformed answer of an earlier epoch is kept",
        range(90, 200),  # those before find nothing
        (AnswerInspector, "_is_sound", "self._find_content_fault(experience) is None", "True"),
    ),
    _mutant(
        "a step may train a group again",
        40,
        (
            DispatchState,
            "take",
            "request = self.open_requests.pop(group.ordinal)",
            "request = self.open_requests[group.ordinal]",
        ),
    ),
    _mutant(
        "a payload is deleted when its group is taken",
        range(5, 40),  # 4 finds it too, after as long a time
        (
            RolloutDispatcher,
            "_take",
            "return groups",
            "return self._payloads and await self._payloads.free("
            "[group.payload for group in groups]) or groups",
        ),
    ),
    _mutant(
        "a payload is deleted before its answer is fenced",
        range(180, 400),
        (
            RolloutDispatcher,
            "_free",
            "while self._useless:",
            "self._payloads and await self._streams.retry(wait, lambda: "
            "self._payloads.free(self._useless_payloads))\n    while self._useless:",
        ),
    ),
    _mutant(
        "an ordinal whose payload is gone is forgotten",
        range(5, 40),  # 4 finds it too, after seven seconds in which nothing goes on
        (
            RolloutDispatcher,
            "return_groups",
            "self._refuse(by_ordinal[ordinal], PAYLOAD_LOST)",
            "self._state.refuse(ordinal); del self._state.open_requests[ordinal]",
        ),
    ),
    _mutant(
        "open ordinals of the checkpoint are not asked for",
        range(30, 80),  # 18 and 28 find it too, after six seconds in which nothing goes on
        (DispatchState, "next_ordinals", "self._restored[:count]", "self._restored[:0]"),
    ),
)


def found_by(mutant: Mutant) -> str | None:
    """Return the first seed that finds a bug, as text; None if none of its seeds does."""
    with planted(mutant):
        for seed in mutant.seeds:
            if simulate(seed):
                return f"seed {seed}"
    return None
