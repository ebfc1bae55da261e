"""An explorer that dies is started again, a bounded number of times in a row."""

import pytest

pytest.importorskip("ray")

from trinity_workers.launch.actors import ActorDied
from trinity_workers.launch.explorer_restarts import MOST_RESTARTS, explore_to_the_end
from trinity_workers.rollout_engines import EngineEnded


class Dying:
    """Actors of a run, one of which dies so many times before it explores to the end."""

    def __init__(self, deaths, error=None):
        self.deaths = deaths
        self.error = error
        self.calls = []

    async def replace(self, name, actor):
        self.calls.append(actor)

    async def call(self, name, method):
        self.calls.append(method)
        if method == "explore" and self.deaths:
            self.deaths -= 1
            if self.error is not None:
                raise self.error
            raise ActorDied(name, "killed by SIGKILL")


async def explore(actors, **options):
    lines = []
    start, notify = (lambda restart: restart), lines.append
    await explore_to_the_end(actors, "explorer-1", start, notify, **options)
    return lines


async def test_it_is_prepared_again_and_each_death_is_a_line_with_its_reason():
    actors = Dying(2)
    first, second = await explore(actors)
    assert actors.calls == ["explore", 1, "prepare", "explore", 2, "prepare", "explore"]
    assert "explorer-1 of the run died: killed by SIGKILL" in first
    assert f"restart 2 of {MOST_RESTARTS}" in second


async def test_one_whose_engine_has_ended_is_started_again_too():
    actors = Dying(1, EngineEnded("vLLM", "EngineCore"))
    [line] = await explore(actors)
    assert actors.calls == ["explore", 1, "prepare", "explore"]
    assert "the process EngineCore of vLLM has ended" in line


async def test_one_that_dies_again_and_again_ends_the_run():
    actors = Dying(MOST_RESTARTS + 1)
    with pytest.raises(ActorDied):
        await explore(actors)
    assert actors.calls.count("explore") == MOST_RESTARTS + 1


async def test_deaths_that_are_long_ago_do_not_count():
    assert len(await explore(Dying(2 * MOST_RESTARTS), settled=0.0)) == 2 * MOST_RESTARTS
