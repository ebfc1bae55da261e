"""Checkpoints and state dicts that a trainer saves at one step, in either order."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest

pytest.importorskip("torch")
pytest.importorskip("ray")

from tests.support.pipeline import reducer_task
from tests.support.waits import PATIENCE, until
from trinity_events import CheckpointCoordinator
from trinity_events.core.file_versions import WEIGHTS_SAVE
from trinity_events.log import Publisher, SyncEventLog, new_producer
from trinity_events.server import open_client
from trinity_workers.trainer.ray_backend import RayTrainBackend

SHARD, HUGGINGFACE, OPTIMIZER = "model.pt", "huggingface/model.safetensors", "optim.pt"


class FleetOfFiles(RayTrainBackend):
    """Fleet whose one rank writes small files, in this process and under the names of a rank."""

    def __init__(self, config: Any) -> None:
        super().__init__(config, [])
        self.rank_log = SyncEventLog(open_client(config.redis_url), config.run_id)
        self.rank_publisher = Publisher(self.rank_log, config.epoch, new_producer("actor", 0))
        self.saves = CheckpointCoordinator(self.rank_publisher, config.checkpoint_folder)

    async def _call(self, method: str, /, *args: Any, **options: Any) -> None:
        await anyio.to_thread.run_sync(partial(self._save, method, *args, **options))

    def _save(self, method: str, path: str, step: int, **options: Any) -> None:
        save = partial(self._write, Path(path), step)
        if method == "save_weights":
            save(HUGGINGFACE, options["name"], options.get("is_state_dict", True))
        if method == "save_checkpoint":
            save(SHARD, "model_state_dict", True)
        if method in ("save_checkpoint", "save_training_state"):
            save(OPTIMIZER, "training_state", False)

    def _write(self, folder: Path, step: int, file: str, name: str, is_state_dict: bool) -> None:
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        write = partial(path.write_text, name)
        self.saves.save_sync(write, step, is_state_dict, name=name, path=path)

    def close(self) -> None:
        self.rank_publisher.close()
        self.rank_log.close()


@pytest.fixture
def fleet(make_config):
    made = FleetOfFiles(make_config(trainer={"ranks": 1}, sync={"timeout": PATIENCE}))
    yield made
    made.close()


@pytest.mark.parametrize(
    ("calls", "files"),
    [
        (["state dict", "checkpoint"], {HUGGINGFACE: WEIGHTS_SAVE}),
        (["state dict", "checkpoint", "checkpoint"], {HUGGINGFACE: WEIGHTS_SAVE}),
        (["checkpoint", "state dict"], {SHARD: "model_state_dict"}),
    ],
)
async def test_a_checkpoint_of_a_step_with_a_state_dict_is_ready_and_has_a_model(
    fleet, redis_url, run_id, tmp_path, calls, files
):
    root = tmp_path
    async with reducer_task(redis_url, run_id, root):
        for call in calls:
            await (fleet.save_checkpoint() if call == "checkpoint" else fleet.save_state_dict())
        pointer = root / run_id / "latest_checkpointed_iteration.txt"
        await until(lambda: pointer.is_file() and pointer.read_text() == "0")
        actor = root / run_id / "global_step_0" / "actor"
        for file, content in {**files, OPTIMIZER: "training_state"}.items():
            assert (actor / file).read_text() == content
        await fleet.shutdown()
