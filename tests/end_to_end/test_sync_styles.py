"""Each sync style leaves a log with a property that every other style violates."""

from functools import partial

import anyio
import msgspec
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("reasoning_gym")

from tests.support.local_training import LocalEngine  # noqa: E402
from tests.support.pipeline import events_of, reducer_task, until  # noqa: E402
from tests.support.style_properties import PROPERTIES, reissued, stalest  # noqa: E402
from tests.support.waits import PATIENCE  # noqa: E402
from trinity_events.error_text import ungrouped  # noqa: E402
from trinity_events.log import Stream, open_run, position  # noqa: E402
from trinity_schemas import RunResumed, StepRef, StepTrained, WeightsApplied, decode_envelope  # noqa: E402
from trinity_workers.explorer import Explorer  # noqa: E402
from trinity_workers.trainer import Trainer  # noqa: E402

STEPS, PROMPTS = 6, 4


@pytest.fixture(autouse=True)
def threads():
    """An explorer sets the number of torch's threads, for its process alone."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


async def whole_log(log):
    """Return the run's events and announcements as one log, in the order of their ids."""
    found = [
        ((position(entry.id)[0], order, position(entry.id)), entry.payload)
        for order, stream in enumerate((Stream.ANNOUNCEMENTS, Stream.EVENTS))
        for entry in await log.read(stream=stream, limit=100_000)
    ]
    return [decode_envelope(payload) for _, payload in sorted(found)]


async def run(config, log):
    """Train with two explorers, and one that joins after two steps; return their results."""
    trainer, results = Trainer(config, LocalEngine(config)), {}

    async def train():
        await trainer.prepare()
        results["trainer"] = await trainer.train()
        await trainer.shutdown()

    async def explore(rank):
        explorer = Explorer(config, rank)
        await explorer.prepare()
        results[rank] = await explorer.explore()

    with ungrouped(), anyio.fail_after(2 * PATIENCE):
        async with anyio.create_task_group() as tasks:
            for task in (train, partial(explore, 0), partial(explore, 1)):
                tasks.start_soon(task)
            await until(lambda: trained(log, config.epoch, 2))
            tasks.start_soon(explore, 2)
    return results


async def trained(log, epoch, steps):
    found = [one for one in await events_of(log, StepTrained) if one.epoch == epoch]
    return len(found) >= steps


def small(make_config, **settings):
    """Return the configuration of a run that takes seconds."""
    return make_config(
        rollouts={"prompts_per_step": PROMPTS, "samples_per_prompt": 2, "claim_lease": PATIENCE},
        explorer={"groups_per_claim": 1},
        evaluation={"sets": {}},
        **settings,
    )


@pytest.mark.parametrize(
    ("style", "sync"),
    [
        ("fixed", {"interval": 2, "offset": 1}),
        ("trainer_driven", {}),
        ("explorer_driven", {"max_staleness": 2}),
        ("explorer_driven", {"interval": 3, "max_staleness": 2}),
        ("fully_async", {"max_staleness": 2}),
    ],
)
async def test_a_run_of_a_style_has_its_property_and_no_other(
    make_config, redis_url, run_id, log, style, sync
):
    sync = {"style": style, "timeout": PATIENCE, **sync}
    config = small(make_config, steps=STEPS, checkpoints={"interval": 0}, sync=sync)
    async with reducer_task(redis_url, run_id):
        results = await run(config, log)
    found = await whole_log(log)
    assert {name for name, holds in PROPERTIES.items() if holds(found)} == {style}
    assert stalest(found) <= config.staleness_bound
    assert "stale" not in reissued(found), "the default paces, and generates nothing in vain"
    assert results["trainer"].steps == STEPS
    explorers = [results[rank] for rank in range(3)]
    assert sum(one.groups for one in explorers) >= STEPS * PROMPTS
    served = {one.producer.rank: one.event.version for one in await events_of(log, WeightsApplied)}
    assert {version.step for version in served.values()} == {STEPS}
    assert sorted(served) == [0, 1, 2], "the one that joined late ends with the last version too"


@pytest.mark.parametrize("style", ["fixed", "explorer_driven", "fully_async"])
async def test_a_run_that_resumes_between_two_synchronisations_keeps_to_its_style(
    make_config, client, redis_url, run_id, log, style
):
    offset = {"offset": 1} if style == "fixed" else {}
    sync = {"style": style, "interval": 2, "timeout": PATIENCE, **offset}
    first = small(make_config, steps=3, checkpoints={"interval": 3}, sync=sync)
    async with reducer_task(redis_url, run_id):
        await run(first, log)
        epoch = await open_run(client, run_id, resume_from=StepRef(first.epoch, 3))
        config = msgspec.structs.replace(first, steps=8, epoch=epoch, resumed_step=3)
        config = config.replaced("checkpoints", interval=0)
        await run(config, log)
    whole = await whole_log(log)
    [began] = [at for at, one in enumerate(whole) if isinstance(one.event, RunResumed)]
    found = whole[began:]  # Explorers are of no epoch.
    trained = [one.event.step for one in found if isinstance(one.event, StepTrained)]
    assert trained == [4, 5, 6, 7, 8]
    assert PROPERTIES[style](found)
    assert stalest(found) <= config.staleness_bound
