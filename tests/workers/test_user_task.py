"""A run's own engine is loaded, and refused where it cannot do what is asked, before the run."""

import pytest

from tests.support.errors import raises
from trinity_schemas import PauseMode
from trinity_workers.rollout_engines.base import UpdateModeNotSupported
from trinity_workers.tasks.errors import ObjectUnusable

pytest.importorskip("torch")
pytest.importorskip("transformers")

from trinity_workers.config.sections.explorer import ExplorerConfig
from trinity_workers.config.sections.model import ModelConfig
from trinity_workers.config.sections.rollouts import RolloutsConfig
from trinity_workers.config.sections.task import TaskConfig
from trinity_workers.config.train_config import TrainConfig
from trinity_workers.launch.run_check import check_run
from trinity_workers.rewards.settings import RewardsConfig

pytestmark = pytest.mark.processes  # those of the reward function

FILES = {
    "engine.py": "def make(options):\n    raise AssertionError('no engine is made yet')\n",
    "reward.py": "def reward(question, answer):\n    return 1.0\n",
    "questions.jsonl": '{"prompt": "a", "answer": "b"}\n' * 40,
}


@pytest.fixture
def config(tmp_path, own_model_folder):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)

    def make(engine: str, pause_mode: PauseMode = "wait") -> TrainConfig:
        return TrainConfig(
            model=ModelConfig(path=str(own_model_folder())),
            task=TaskConfig(questions=f"{tmp_path}/questions.jsonl"),
            rewards=RewardsConfig(function=f"{tmp_path}/reward.py:reward"),
            explorer=ExplorerConfig(engine=f"{tmp_path}/{engine}"),
            rollouts=RolloutsConfig(pause_mode=pause_mode),
        )

    return make


async def test_an_engine_that_is_not_there_is_named(config, tmp_path):
    with raises(ObjectUnusable, fault="attribute", nearest="make"):
        await check_run(config("engine.py:makes"), tmp_path, alone=True, ray_address=None)


async def test_an_engine_that_only_finishes_its_answers_is_refused_where_they_are_to_go_on(
    config, tmp_path
):
    with raises(UpdateModeNotSupported, pause_mode="keep", modes=("wait",)):
        await check_run(config("engine.py:make", "keep"), tmp_path, alone=True, ray_address=None)
