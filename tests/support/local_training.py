"""Training in the test's own process: the trainer's loop on an engine without ranks."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import anyio
import anyio.to_thread
import torch

from tests.support.weight_versions import publish
from trinity_events import Synchronizer
from trinity_events.checkpoints.layout import TRAINER_STATE, final_name
from trinity_workers.config.train_config import RunConfig
from trinity_workers.learning.policy import load_policy
from trinity_workers.trainer.backend import TrainEngineWrapper, TrainingBatch
from trinity_workers.trainer.state import TrainerState, write_trainer_state


class LocalEngine(TrainEngineWrapper):
    """Engine whose steps shift the parameters of a real policy, which it publishes for real.

    Its checkpoints hold the loop's own state alone.

    Args:
        config: The run.
        seconds: Seconds that a step takes.
    """

    def __init__(self, config: RunConfig, seconds: float = 0.0) -> None:
        self._config = config
        self._seconds = seconds
        self._step = 0

    async def prepare(self) -> None:
        self._model, _ = load_policy(self._config.model_folder)

    async def load_checkpoint(self, folder: Path, step: int) -> None:
        self._step = step

    @property
    def train_step_num(self) -> int:
        return self._step

    async def train_step(self, batch_exps: TrainingBatch) -> dict[str, float]:
        await anyio.sleep(self._seconds)
        with torch.no_grad():
            for parameter in self._model.parameters():
                parameter.add_(0.001)
        self._step += 1
        return {"loss": 0.0}

    async def upload_state_dict(self, metrics: dict[str, float] | None = None) -> None:
        await anyio.to_thread.run_sync(self._publish)

    async def sync_weight_nccl(self, metrics: dict[str, float] | None = None) -> None:
        raise NotImplementedError

    async def get_weight_sync_info(self) -> None:
        return None

    async def setup_weight_sync_group(
        self, master_address: str, master_port: int, world_size: int, group_name: str, timeout: int
    ) -> None:
        raise NotImplementedError

    async def teardown_weight_sync_group(self) -> None:
        raise NotImplementedError

    def _publish(self) -> None:
        config = self._config
        urls = {"redis_url": config.redis_url, "weights_url": config.weights_url}
        with closing(Synchronizer(config.run_id, config.epoch, **urls)) as synchronizer:
            publish(synchronizer, dict(self._model.named_parameters()), self._step)

    async def save_checkpoint(
        self,
        block_until_saved: bool = False,
        save_as_hf: bool = False,
        state: TrainerState | None = None,
    ) -> None:
        folder = self._config.checkpoint_folder / final_name(self._step)
        folder.mkdir(parents=True)
        assert state is not None
        write_trainer_state(folder / TRAINER_STATE, state)

    async def save_state_dict(self) -> None:
        raise NotImplementedError

    async def wait_for_save(self) -> None:
        pass

    async def shutdown(self) -> None:
        pass
