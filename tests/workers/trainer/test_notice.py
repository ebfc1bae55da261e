"""A trainer that is warned saves its last step, and says what was saved and what was lost."""

from __future__ import annotations

import anyio
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("reasoning_gym")

from tests.support.local_training import LocalEngine
from tests.support.pipeline import until
from tests.support.rollout_parts import samples_of
from tests.support.waits import PATIENCE
from trinity_events.checkpoints.layout import TRAINER_STATE, final_name
from trinity_events.rollouts import RolloutClient
from trinity_workers.trainer import Trainer
from trinity_workers.trainer.state import read_trainer_state

pytestmark = [pytest.mark.server, pytest.mark.usefixtures("torch_threads")]


@pytest.fixture
async def make_trainer(make_config):
    made: list[Trainer] = []

    async def prepared(engine=LocalEngine, **checkpoints) -> Trainer:
        config = make_config(
            steps=9,
            rollouts={"prompts_per_step": 1, "samples_per_prompt": 2},
            evaluation={"sets": {}},
            checkpoints={"interval": 9} | checkpoints,
        )
        made.append(Trainer(config, engine(config)))
        await made[-1].prepare()
        return made[-1]

    yield prepared
    for trainer in made:
        await trainer.shutdown()


async def take_steps(trainer: Trainer, client, count: int) -> None:
    config = trainer.config
    explorer = RolloutClient(client, config.run_id, config.epoch, "explorer-0", lease=PATIENCE)
    for step in range(1, count + 1):
        [claim] = await explorer.claim(1, seconds=PATIENCE)
        await explorer.answer(claim, samples_of(claim, explorer.name))
        await until(lambda step=step: trainer.train_step_num == step)


async def warn(trainer: Trainer, client, steps: int, seconds: float = PATIENCE) -> str:
    """Take steps, then give a notice while the next one waits for rollouts."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(trainer.train)
        await take_steps(trainer, client, steps)
        sentence = await trainer.save_on_notice(seconds)
        tasks.cancel_scope.cancel()
    return sentence


async def test_the_last_step_is_saved_and_the_wait_for_rollouts_is_cut_off(make_trainer, client):
    trainer = await make_trainer()
    sentence = await warn(trainer, client, 2)
    assert sentence.startswith("the checkpoint of step 2 was complete within ")
    assert "no step is lost" in sentence
    folder = trainer.config.checkpoint_folder / final_name(2)
    state = read_trainer_state(folder, 2)
    assert (state.ledger.trained, (folder / TRAINER_STATE).is_file()) == (2, True)


async def test_before_a_step_there_is_nothing_to_lose(make_trainer, client):
    trainer = await make_trainer()
    assert "none is lost" in await warn(trainer, client, 0)
    assert not list(trainer.config.checkpoint_folder.glob("global_step_*"))


class SlowSaves(LocalEngine):
    """Engine whose saves last for ever."""

    async def save_checkpoint(self, *_, **__) -> None:
        await anyio.sleep_forever()


async def test_a_notice_that_is_too_short_says_what_is_lost(make_trainer, client):
    trainer = await make_trainer(SlowSaves)
    sentence = await warn(trainer, client, 1, seconds=0.2)
    assert "within 0.2 s: the steps after the newest checkpoint are lost" in sentence
