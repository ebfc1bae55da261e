"""The version of a resumed run under the sync method ``checkpoint``: its checkpoint's own files."""

from contextlib import closing
from functools import partial

import anyio
import anyio.to_thread
import msgspec
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("ray")

from tests.support.pipeline import reducer_task  # noqa: E402
from tests.support.waits import PATIENCE  # noqa: E402
from trinity_events import CheckpointCoordinator, Synchronizer, hold_checkpoint  # noqa: E402
from trinity_events.checkpoints.layout import MODEL_FOLDER  # noqa: E402
from trinity_events.coordinator import staged_path  # noqa: E402
from trinity_events.core.file_versions import WEIGHTS_SAVE, weights_save  # noqa: E402
from trinity_events.log import Publisher, SyncEventLog, new_producer, open_run  # noqa: E402
from trinity_events.server import open_client  # noqa: E402
from trinity_events.weights import model_digest  # noqa: E402
from trinity_schemas import StepRef  # noqa: E402
from trinity_workers.engines.model_folder import write_model_folder  # noqa: E402
from trinity_workers.engines.sharded import write_huggingface  # noqa: E402
from trinity_workers.explorer.run_follower import followed_run  # noqa: E402
from trinity_workers.explorer.versions import VersionFollower  # noqa: E402
from trinity_workers.learning.policy import load_policy  # noqa: E402
from trinity_workers.trainer.ray_backend import RayTrainBackend  # noqa: E402

STEP = 4


class FleetWithoutRanks(RayTrainBackend):
    """Fleet that notes what it asks of its ranks, of which it has none."""

    def __init__(self, config):
        super().__init__(config, [])
        self.methods = []

    async def _call(self, method, /, *args, **options):
        self.methods.append(method)


@pytest.fixture
def trained(policy_folder):
    """A policy with other weights than the run began with, and its tokenizer."""
    model, tokenizer = load_policy(policy_folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.125)
    return model, tokenizer


@pytest.fixture
def killed(make_config, trained, redis_url, run_id):
    """A run that left a version and its checkpoint, and nothing that says that it ended."""
    config = make_config(sync={"method": "checkpoint", "timeout": PATIENCE})
    model, tokenizer = trained
    log = SyncEventLog(open_client(redis_url), run_id)
    publisher = Publisher(log, config.epoch, new_producer("actor", 0))
    coordinator = CheckpointCoordinator(publisher, config.checkpoint_folder)
    actor = staged_path(config.checkpoint_folder, config.epoch, STEP) / MODEL_FOLDER[0]
    weights, training = actor / MODEL_FOLDER[1], actor / "optim.pt"
    describe = partial(write_huggingface, module=model, tokenizer=tokenizer)
    tensors = dict(model.named_parameters())

    async def leave():
        save = partial(write_model_folder, weights, describe, tensors.items())
        saves = partial(coordinator.save_sync, save, STEP, is_state_dict=True)
        await anyio.to_thread.run_sync(partial(saves, name=WEIGHTS_SAVE, path=weights))
        await coordinator.register_and_monitor(STEP, is_state_dict=True, state_dict_thread_count=1)
        save = partial(coordinator.save_sync, partial(training.write_text, "state"), STEP)
        await anyio.to_thread.run_sync(partial(save, name="training_state", path=training))
        await coordinator.register_and_monitor(STEP, checkpoint_thread_count=1)
        return config

    yield leave
    publisher.close()
    log.close()


async def test_a_run_that_was_killed_announces_its_checkpoints_version_anew_and_explorers_load_it(
    killed, trained, client, redis_url, run_id
):
    config = await killed()
    root = config.checkpoint_folder.parent
    epoch = await open_run(client, run_id, resume_from=StepRef(1, STEP))
    resumed = msgspec.structs.replace(config, epoch=epoch, resumed_step=STEP)
    served, _ = load_policy(config.model_folder)
    fleet = FleetWithoutRanks(resumed)
    explorer = Synchronizer(
        *(run_id, 0), redis_url=redis_url, role="explorer", checkpoint_folder=root / run_id
    )
    with closing(explorer):
        # The killed run's reducer had not promoted the checkpoint either.
        lease = hold_checkpoint(run_id, STEP, redis_url=redis_url, checkpoint_root=root)
        async with (
            reducer_task(redis_url, run_id, root),
            followed_run(run_id, redis_url) as run,
            lease as folder,
        ):
            versions = VersionFollower(run, epoch, method="checkpoint")
            before = times(folder)
            await fleet.load_checkpoint(folder, STEP)
            await fleet.save_state_dict()
            async with versions.listening():
                announced = await versions.wait(STEP, deadline=PATIENCE)
            assert (announced.epoch, announced.step) == (epoch, STEP)
            await anyio.to_thread.run_sync(explorer.apply, served, announced)
            assert times(folder) == before
        await fleet.shutdown()
    assert fleet.methods == ["load_checkpoint"], "no rank saves the version again"
    assert model_digest(served) == model_digest(trained[0])
    assert weights_save(announced).digest is not None


def times(folder):
    """Return the time at which each file of a folder was written."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
