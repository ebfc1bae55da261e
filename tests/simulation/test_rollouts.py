"""No prompt is lost and none is trained twice, whatever dies; see simulation/rollouts.py."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.simulation.rollouts import MUTANTS, World
from tests.support.rollout_histories import RUN, count_raw
from trinity_events.core import Monitor, MonitorState
from trinity_events.core.audit import Auditor
from trinity_schemas import decode_envelope

SEEDS = 1000


def audited(world: World):
    auditor, monitor = Auditor(RUN), Monitor(MonitorState(run_id=RUN))
    for entry_id, payload in world.server.log:
        auditor.add(decode_envelope(payload))
        monitor.apply(entry_id, decode_envelope(payload))
    [books] = auditor.audit().lineages
    return books, monitor.state


def faults(world: World) -> list[str]:
    """Everything that is wrong with a run, by the model, the audit, the fold and the counter."""
    books, state = audited(world)
    [count] = count_raw(payload for _, payload in world.server.log)
    found = [one.name for one in books.contradictions] + count.wrong
    found += [name for name in state.anomaly_counts if name not in ("stale-epoch", "duplicate")]
    model = Counter(world.trainer.model)
    found += [f"{one} is in the model {times} times" for one, times in model.items() if times > 1]
    trained = {one for one, fate in count.fates.items() if fate == "trained"}
    dropped = sum(count.dropped.values())
    if model.keys() - set(range(count.next)):
        found.append("the model has what was never dispatched")
    if len(model) != books.trained or books.trained != count.trained:
        found.append(f"{len(model)} in the model, {books.trained} in the audit, {count.trained}")
    if trained and trained != model.keys():
        found.append("the model has other ordinals than the log")
    if count.next != len(trained) + dropped + len(count.open):
        found.append("a prompt is lost")
    return found


@pytest.mark.parametrize("some", range(10))
def test_nothing_is_lost_or_trained_twice_whatever_dies(some):
    for seed in range(some, SEEDS, 10):
        assert faults(World(seed).run()) == [], seed


def test_the_simulated_runs_crash_reissue_drop_and_discard():
    worlds = [World(seed).run() for seed in range(30)]
    books = [audited(world)[0] for world in worlds]
    assert sum(world.crashes for world in worlds) > 60
    assert sum(world.server.discarded for world in worlds) > 30
    assert sum(one.discarded_steps for one in books) > 30
    assert {why for one in books for why in one.recomputed} == {"deadline", "resumed"}
    assert any(len(one.spans) > 3 for one in books)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_pipeline_without_one_of_its_rules_is_found_out(mutant):
    def is_found_out(seed: int) -> bool:
        try:
            return bool(faults(World(seed, mutant).run()))
        except AssertionError:
            return True

    assert any(is_found_out(seed) for seed in range(40))
