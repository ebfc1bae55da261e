"""No prompt is lost and none is trained twice, whatever dies; see simulation/rollouts.py."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.simulation.mutants import planted
from tests.simulation.rollout_mutants import MUTANTS, found_by
from tests.simulation.rollouts import World, audited, simulate
from trinity_events.core.reward_errors import REWARD_FAILED
from trinity_schemas import decode_envelope

SEEDS = 1000
PARTS = 20
BOUNDARIES = {
    **dict.fromkeys(("append", "issue", "look", "xread", "free", "begin"), "trainer"),
    **dict.fromkeys(("load", "payload-free"), "trainer"),
    **dict.fromkeys(("claim", "answer", "renew", "payload-write"), "explorer"),
}
"""Calls to the server, and the process that makes each."""


@pytest.mark.parametrize(
    "part",
    [0, *(pytest.param(part, marks=pytest.mark.nightly) for part in range(1, PARTS))],
)
def test_nothing_is_lost_or_trained_twice_whatever_dies(part):
    for seed in range(part, SEEDS, PARTS):
        assert simulate(seed) == [], f"see: python -m tests.simulation --rollouts --seed {seed}"


def test_processes_end_before_and_after_each_call_and_old_ones_wake_up():
    worlds = [World(seed).run() for seed in range(150)]
    ends = Counter[tuple[str, str, str]]()
    for world in worlds:
        ends.update(world.ends)
    for call, process in BOUNDARIES.items():
        assert ends[process, call, "before"], f"no {process} ended before {call}"
        assert ends[process, call, "after"], f"no {process} ended after {call}"
    assert sum(world.woken for world in worlds) > 50
    assert sum(world.discarded for world in worlds) > 50
    assert sum(world.returned for world in worlds) > 5
    books = [audited(world)[0] for world in worlds]
    reasons = {why for lineage in books for why in lineage.recomputed}
    assert reasons >= {"resumed", "stale", "failed", "lapsed", "lost", "payload-lost"}
    reasons = {why for lineage in books for why in lineage.dropped}
    assert reasons == {"filtered", "attempts", REWARD_FAILED}
    assert sum(lineage.discarded_steps for lineage in books) > 50
    assert any(len(lineage.spans) > 3 for lineage in books)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_planted_bug_is_found(mutant):
    assert found_by(mutant) is not None


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_bug_can_still_be_planted(mutant):
    with planted(mutant):
        pass  # raises when the code no longer has the words


def test_the_run_of_a_seed_is_the_same_every_time():
    worlds = [World(7).run() for _ in range(2)]
    first, second = ([(entry.id, *content(entry)) for entry in entries(world)] for world in worlds)
    assert first == second


def entries(world):
    return world.log.read_now(limit=10**6)


def content(entry):
    envelope = decode_envelope(entry.payload)
    return envelope.epoch, envelope.event
