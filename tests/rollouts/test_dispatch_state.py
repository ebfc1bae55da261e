"""The decisions of a dispatcher follow from what it was told alone."""

import pytest

from tests.support.errors import raises
from tests.support.rollout_parts import settings
from trinity_events.core.ledger import Ledger
from trinity_events.rollouts.dispatch_state import (
    AnswerGroup,
    DispatchState,
    HeldRequest,
    ReissueCandidate,
    Versions,
    format_missing,
    holders_of,
)
from trinity_events.rollouts.settings import InvalidDispatchSetting
from trinity_events.rollouts.streams import SeenClaim, StreamSnapshot
from trinity_schemas import StepRef

LEASE, DEADLINE = 10.0, 100.0
FIRST, NEWEST = Versions(StepRef(1, 0)), Versions(StepRef(1, 7), exact=True)


def reissue(state, due):
    """Issue an ordinal again, as if the server did at once."""
    request = state.reissue(due, NEWEST)
    state.written(request)
    return request


@pytest.fixture
def state():
    given = {"claim_lease": LEASE, "request_deadline": DEADLINE, "max_attempts": 2}
    made = DispatchState(settings("run", 1, **given), Ledger())
    made.requests(made.open(made.next_ordinals(2), FIRST))
    return made


def snapshot(**idle):
    claims = {int(name[1:]): SeenClaim("a", seconds) for name, seconds in idle.items()}
    return StreamSnapshot(uptime=1e6, numbers={1, 2}, claims=claims, group_exists=True)


def test_a_claim_lapses_after_its_lease_and_an_unclaimed_request_never(state):
    assert state.observe(snapshot(n1=LEASE - 1), now=1000, stable_for=1e6) == []
    assert state.observe(snapshot(n1=LEASE), now=1001, stable_for=1e6) == [
        ReissueCandidate(0, "lapsed", LEASE)
    ]
    assert state.observe(snapshot(), now=1e9, stable_for=1e6) == []


def test_a_claim_lapses_no_sooner_than_one_lease_after_an_outage(state):
    assert state.observe(snapshot(n1=50 * LEASE), now=1000, stable_for=LEASE - 1) == []
    assert state.observe(snapshot(n1=50 * LEASE), now=1001, stable_for=LEASE) == [
        ReissueCandidate(0, "lapsed", LEASE)
    ]


def test_a_claim_that_is_renewed_for_ever_is_overdue_after_the_deadline(state):
    state.observe(snapshot(n1=0.0), now=1000, stable_for=1e6)
    assert state.observe(snapshot(n1=0.0), now=1000 + DEADLINE - 1, stable_for=1e6) == []
    assert state.observe(snapshot(n1=0.0), now=1000 + DEADLINE, stable_for=LEASE - 1) == []
    assert state.observe(snapshot(n1=0.0), now=1000 + DEADLINE, stable_for=1e6) == [
        ReissueCandidate(0, "deadline")
    ]


def test_a_request_that_is_not_there_is_lost(state):
    gone = StreamSnapshot(uptime=1e6, numbers={2}, claims={}, group_exists=True)
    assert state.observe(gone, now=1, stable_for=1) == [ReissueCandidate(0, "lost")]


def test_failed_attempts_exhaust_and_stale_or_lost_ones_do_not(state):
    """Invariant 5 of dispatcher.py."""
    for reason in ("stale", "lost", "stale", "lost"):
        again, exhausted = state.split([ReissueCandidate(0, reason)])
        assert exhausted == []
        reissue(state, again[0])
    for reason in ("lapsed", "deadline", "failed"):
        assert state.split([ReissueCandidate(1, reason)]) == ([ReissueCandidate(1, reason)], [])
    reissue(state, ReissueCandidate(1, "lapsed"))
    assert state.split([ReissueCandidate(1, "failed")]) == ([], [ReissueCandidate(1, "failed")])
    assert (state.open_requests[0].attempt, state.open_requests[1].attempt) == (5, 2)


@pytest.mark.parametrize("reason", ["lapsed", "deadline", "failed", "lost"])
def test_a_request_that_is_issued_again_names_its_own_version(state, reason):
    assert reissue(state, ReissueCandidate(0, reason)).versions == FIRST
    assert reissue(state, ReissueCandidate(0, "stale")).versions == NEWEST, "its own is too old"
    assert reissue(state, ReissueCandidate(0, reason)).versions == NEWEST


@pytest.mark.parametrize(
    ("name", "value", "fault"),
    [("window", 1, "window"), ("max_attempts", 0, "count"), ("claim_lease", 0.0, "seconds")],
)
def test_settings_that_cannot_work_are_refused(name, value, fault):
    with raises(InvalidDispatchSetting, name=name, value=value, fault=fault):
        settings("run", 1, **{name: value})


def test_a_second_answer_of_an_ordinal_is_not_kept(state):
    first, second = (
        AnswerGroup(ordinal=0, attempt=attempt, experiences=[], entry_ids=[f"{attempt}-0"])
        for attempt in (1, 2)
    )
    assert state.arrive(first)
    assert not state.arrive(second)
    assert state.candidates(1) == [first]


@pytest.mark.parametrize(
    ("explorers", "what", "holders"),
    [
        (["a", "b", "a"], "the rollouts of 3 to 5", ("a", "b")),
        (["b", None, None], "the rollouts of 3 to 5 (2 not claimed)", ("b",)),
        ([None, None], "the rollouts of 3 to 4 (not claimed)", ()),
    ],
)
def test_a_wait_names_the_missing_ordinals_and_their_holders(explorers, what, holders):
    missing = [HeldRequest(3 + at, 1, explorer, 7.0) for at, explorer in enumerate(explorers)]
    assert (format_missing(missing), holders_of(missing)) == (what, holders)
