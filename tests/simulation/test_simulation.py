"""The simulation in the suite: seeds, the histories that once failed, and planted bugs.

``make simulate`` runs as many seeds as one likes, and looks for all of the planted bugs.
"""

from __future__ import annotations

import pytest

from tests.simulation.histories import HISTORIES
from tests.simulation.mutants import MUTANTS, found_by, planted
from tests.simulation.plan import Fault, Outage, Plan, Save, Worker, draw
from tests.simulation.shrink import shrink
from tests.simulation.world import simulate, simulated
from trinity_events.log import Stream

SEEDS = 300
PARTS = 6
IN_THE_SUITE = (
    "a turn is granted to two groups at once",
    "a leader's word is not fenced",
    "a lease that lapses is ignored",
    "what was folded before is announced again",
    "an event is acknowledged before it is handled",
    "an event that was not taken is dropped in silence",
)


@pytest.mark.parametrize(
    "part",
    [0, 1, *(pytest.param(part, marks=pytest.mark.nightly) for part in range(2, PARTS))],
)
def test_nothing_goes_wrong_under_any_seed(part):
    for seed in range(part, SEEDS, PARTS):
        assert not simulate(draw(seed)), f"see: python -m tests.simulation --seed {seed}"


@pytest.mark.parametrize("number", range(len(HISTORIES)))
def test_what_once_went_wrong_does_not_again(number):
    assert simulate(HISTORIES[number]) == []


@pytest.mark.parametrize("name", IN_THE_SUITE)
def test_a_planted_bug_is_found(name):
    [mutant] = [mutant for mutant in MUTANTS if mutant.name == name]
    assert found_by(mutant) is not None


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_bug_can_still_be_planted(mutant):
    with planted(mutant):
        pass  # raises when the code no longer has the words


def test_a_run_of_a_plan_is_the_same_every_time():
    logs = []
    for _ in range(2):
        world = simulated(draw(11))
        logs.append([world.log.read_now(stream=stream, limit=10**6) for stream in Stream])
    assert logs[0] == logs[1]
    assert all(logs[0])


def test_a_failing_plan_shrinks_to_what_its_failure_needs():
    [mutant] = [mutant for mutant in MUTANTS if mutant.name == "nothing is ever overdue"]
    silent = Save(1, "weights", 0, ends="failed")
    plan = Plan(
        seed=1,
        strategy="single_node",
        workers=(Worker("north", 0), Worker("south", 1)),
        saves=(silent, Save(2, "checkpoint", 1), Save(3, "state_dict", 0, 0.3)),
        faults=(Fault("lost", "trainer", 4), Fault("killed", "reducer-1", 3)),
        outages=(Outage(1.0, 0.1),),
        members=2,
        slow=0.02,
    )
    with planted(mutant):
        short = shrink(plan, simulate)
    assert short == Plan(seed=1, workers=(Worker("north", 0),), saves=(silent,))
    assert eval(repr(short)) == short  # as it is pasted


def test_seeds_differ_in_what_they_do_and_suffer():
    plans = [draw(seed) for seed in range(200)]
    assert len({plan.strategy for plan in plans}) == 4
    assert len({fault.what for plan in plans for fault in plan.faults}) == 6
    assert sum(bool(plan.outages) for plan in plans) > 20
    assert sum(not plan.faults and not plan.outages for plan in plans) > 10
