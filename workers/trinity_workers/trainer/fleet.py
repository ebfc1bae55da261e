"""The trainer's ranks as Ray actors."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import ray
from anyio import to_thread

from trinity_events import CheckpointCoordinator, Synchronizer
from trinity_events.checkpoint_layout import MODEL_FOLDER, TRAINER_STATE
from trinity_events.coordinator import staged_path
from trinity_events.core.file_versions import WEIGHTS_SAVE
from trinity_events.errors import GroupBroken, TrinityError
from trinity_events.log import Publisher, SyncEventLog, new_producer
from trinity_events.server import open_client
from trinity_schemas import Experience, Process

from ..collectives import CollectiveBroken
from ..config import RunConfig
from ..engines.model_folder import has_weights
from ..placement import rank_options
from ..process_exit import ExitWatch, named
from .state import TrainerState, write_trainer_state
from .worker import TrainWorker
from .wrapper import NoWeightSyncGroup, TrainEngineWrapper, WeightSyncAddress

logger = logging.getLogger(__name__)

SENDING_ATTEMPTS = 4
"""Attempts to send a version through a group that breaks, before the run fails."""

_SMALLEST_GROUP = 2
"""Members of a collective group: the trainer's rank 0, and one explorer."""
DEATH_KNOWN = 5.0
"""Seconds within which Ray knows that a worker is dead, after other ranks have noticed."""


class WorkerDied(TrinityError):
    """A worker process ended while it was needed."""


class Saves(NamedTuple):
    """Saves of the ranks that a checkpoint has."""

    state_dicts: int
    others: int
    """Saves of the kind `checkpoint`."""


class RayTrainerFleet(TrainEngineWrapper):
    """One Ray actor a rank, each with its own engine."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._workers: list[Any] = []
        self._processes: list[Process] = []
        self._deaths = ExitWatch()
        self._step = 0
        self._version_saved: int | None = None
        """Step whose weights were last saved as a version in files."""
        self._log = SyncEventLog(open_client(config.redis_url), config.run_id)
        self._publisher = Publisher(self._log, config.epoch, new_producer("trainer"))
        self._coordinator = CheckpointCoordinator(
            self._publisher, config.checkpoint_folder, strategy=config.checkpoints.strategy
        )
        self._synchronizer = Synchronizer(
            config.run_id,
            config.epoch,
            redis_url=config.redis_url,
            weights_url=config.weights_url,
            transport=config.chunk_transport,
        )

    async def prepare(self) -> None:
        """Start the workers and load the model."""
        config = self._config
        actor = ray.remote(_worker_class(config))
        for rank in range(config.trainer.ranks):
            options, own_gpu = rank_options(config, rank)
            self._workers.append(actor.options(**options).remote(config, rank, own_gpu=own_gpu))
        self._processes = await self._ask_all("process")
        for process in self._processes:
            self._deaths.watch(process)
        host, port = await self._ask(0, "address")
        await self._ask_all("setup", host, port)
        self._shares = await self._ask_all("data_share")
        if config.transport == "collective":
            await self._ask(0, "setup_weight_sync_group", config.explorer.count)

    async def load_checkpoint(self, folder: Path, step: int) -> None:
        """Load the checkpoint of a step on every rank."""
        await self._ask_all("load_checkpoint", str(folder / "actor"))
        self._step = step

    @property
    def train_step_num(self) -> int:
        """Steps taken."""
        return self._step

    async def train_step(self, batch_exps: Sequence[Sequence[Experience]]) -> dict[str, float]:
        """Take one step on groups of samples, dealt out over the ranks; return its metrics."""
        shares = [list(batch_exps[index::count]) for index, count in self._shares]
        answers = await answers_or_cause(
            [self._ask(rank, "train_step", share) for rank, share in enumerate(shares)]
        )
        self._step += 1
        first: dict[str, float] = answers[0]
        return first

    async def save_checkpoint(
        self,
        block_until_saved: bool = False,
        save_as_hf: bool = False,
        state: TrainerState | None = None,
    ) -> None:
        """Save the whole checkpoint: each part of it has slots of its own."""
        step = self._step
        folder = staged_path(self._config.checkpoint_folder, self._config.epoch, step)
        if state is not None:
            path = folder / TRAINER_STATE
            save = partial(write_trainer_state, path, state)
            self._coordinator.save_async("trainer_state", save, step, path=path)
        saves = await self._save_parts(str(folder / MODEL_FOLDER[0]), save_as_hf=save_as_hf)
        await self._coordinator.register_and_monitor(
            step,
            state_dict_thread_count=saves.state_dicts,
            checkpoint_thread_count=saves.others + self._critic_saves + (state is not None),
        )
        if block_until_saved:
            await self.wait_for_save()

    async def _save_parts(self, path: str, *, save_as_hf: bool) -> Saves:
        """Let every rank save its part of a checkpoint; return the saves to expect."""
        step, in_files = self._step, self._config.sync.method == "checkpoint"
        if not in_files and not save_as_hf:
            await self._ask_all("save_checkpoint", path, step)
            return Saves(state_dicts=self._saves, others=self._saves)
        is_saved = self._version_saved == step
        if not is_saved:
            # No state dict, if the run's versions are those: explorers would wait for it.
            save = partial(self._ask_all, "save_weights", path, step, masters=True)
            await save(name="huggingface_model", is_state_dict=not in_files)
        await self._ask_all("save_training_state", path, step)
        models = int(not is_saved)
        return Saves(
            state_dicts=0 if in_files else models,
            others=self._saves + (models if in_files else 0),
        )

    async def save_state_dict(self, metrics: dict[str, float] | None = None) -> None:
        """Save the weights as a Hugging Face folder, and commit them as a version.

        A checkpoint of the same step rests on it. The version that a resumed run begins with is
        that of its checkpoint, whose folder is completed where it is.
        """
        config, step = self._config, self._step
        folder = staged_path(config.checkpoint_folder, config.epoch, step)
        if step == config.resumed_step:
            folder = config.resumed_folder
        weights = folder.joinpath(*MODEL_FOLDER)
        if await to_thread.run_sync(has_weights, weights):
            save = partial(self._coordinator.save_sync, lambda: None, step, is_state_dict=True)
            await to_thread.run_sync(partial(save, name=WEIGHTS_SAVE, path=weights))
        else:
            masters = config.is_save_step(step)
            path = str(folder / MODEL_FOLDER[0])
            await self._ask_all("save_weights", path, step, name=WEIGHTS_SAVE, masters=masters)
        self._version_saved = step
        await self._coordinator.register_and_monitor(
            step, is_state_dict=True, state_dict_thread_count=1, metrics=metrics
        )

    async def upload_state_dict(self, metrics: dict[str, float] | None = None) -> None:
        """Publish the weights, and commit the version."""
        await self._ask_all("upload_state_dict", self._step)
        await to_thread.run_sync(self._synchronizer.commit, self._step, metrics)

    async def sync_weight_nccl(self, metrics: dict[str, float] | None = None) -> None:
        """Send the weights through the collective group, and commit the version.

        When an explorer dies in the middle, the group is made anew with the explorers that are
        left, and all is sent again.
        """
        for attempt in range(1, SENDING_ATTEMPTS + 1):
            try:
                await self._send()
                break
            except GroupBroken as error:
                if attempt == SENDING_ATTEMPTS:
                    raise
                logger.warning("step %d: sends the weights again: %s", self._step, error)
                await self._ask(0, "setup_weight_sync_group", 1)
        await to_thread.run_sync(self._synchronizer.commit, self._step, metrics)

    async def _send(self) -> None:
        """Let every rank send; raises rank 0's error before what the others say of it."""
        ranks = range(len(self._workers))
        sent = await asyncio.gather(
            *(self._ask(rank, "sync_weight_nccl", self._step) for rank in ranks),
            return_exceptions=True,
        )
        for answer in sent:
            if isinstance(answer, BaseException):
                raise answer

    async def get_weight_sync_info(self) -> WeightSyncAddress | None:
        """Return address, port and tensors for the collective group; None without a group."""
        if self._config.transport != "collective":
            return None
        host, port = await self._ask(0, "weight_sync_address")
        described = await self._ask_all("describe_tensors")
        return host, port, described[0]

    async def setup_weight_sync_group(
        self, master_address: str, master_port: int, world_size: int, group_name: str, timeout: int
    ) -> None:
        """Form the collective group of trainer and explorers, at the trainer's own address."""
        if self._config.transport != "collective":
            raise NoWeightSyncGroup(
                f"run {self._config.run_id} has no collective group: set sync.method nccl"
            )
        host, port = await self._ask(0, "weight_sync_address")
        if (master_address, master_port) != (host, port):
            raise NoWeightSyncGroup(
                f"the group {group_name} forms at {host}:{port}, and not at "
                f"{master_address}:{master_port}: take the address of get_weight_sync_info"
            )
        if world_size < _SMALLEST_GROUP:
            raise NoWeightSyncGroup(
                f"the group {group_name} has {world_size} members: it needs the trainer and at "
                "least one explorer"
            )
        names = await self._ask(0, "setup_weight_sync_group", world_size - 1, timeout)
        logger.info("the group %s has %s", group_name, ", ".join(names))

    async def teardown_weight_sync_group(self) -> None:
        """End the group; it can be set up again."""
        if self._config.transport == "collective":
            await self._ask(0, "teardown_weight_sync_group")

    async def wait_for_save(self) -> None:
        """Wait for background saves, and raise the error of one that failed."""
        await self._ask_all("wait_on_save_thread")
        timeout = self._config.sync.timeout
        await to_thread.run_sync(self._coordinator.wait_all, timeout)

    async def shutdown(self) -> None:
        """Stop the workers."""
        await self._ask_all("shutdown")
        for worker in self._workers:
            ray.kill(worker)
        self._workers = []
        self._synchronizer.close()
        try:
            await to_thread.run_sync(self._publisher.close)
        finally:
            self._log.close()

    @property
    def _saves(self) -> int:
        """Saves of one kind: every rank's shard is one on FSDP, all ranks write one on Megatron."""
        return 1 if self._config.trainer.engine == "megatron" else len(self._workers)

    @property
    def _critic_saves(self) -> int:
        """Return the saves of the critic: its shard and its training state on each rank."""
        return 2 * len(self._workers) if self._config.algorithm.critic.use else 0

    async def _ask_all(self, method: str, *args: Any, **options: Any) -> list[Any]:
        ranks = range(len(self._workers))
        asked = [self._ask(rank, method, *args, **options) for rank in ranks]
        return await answers_or_cause(asked)

    async def _ask(self, rank: int, method: str, *args: Any, **options: Any) -> Any:
        try:
            return await getattr(self._workers[rank], method).remote(*args, **options)
        except ray.exceptions.RayActorError:
            step = self._step + (method == "train_step")  # which is not taken yet
            process = self._processes[rank] if self._processes else None
            how = "" if process is None else await to_thread.run_sync(self._deaths.how, process)
            who = named(f"trainer worker {rank}", process)
            raise WorkerDied(
                f"{who} of run {self._config.run_id} died in {method} at step {step}"
                f"{how and f': {how}'}"
            ) from None


async def answers_or_cause(asked: Sequence[Awaitable[Any]]) -> list[Any]:
    """Return what every rank answers, or raise the first error: a death before what follows it.

    A rank that dies fails the others, sooner than it is known to be dead.
    """
    tasks = [asyncio.ensure_future(one) for one in asked]
    _, left = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    failed = _errors(tasks)
    if left and failed and all(_may_follow_a_death(one) for one in failed):
        await asyncio.wait(left, timeout=DEATH_KNOWN, return_when=asyncio.FIRST_EXCEPTION)
        failed = _errors(tasks)
    if failed:
        for one in tasks:
            one.add_done_callback(lambda task: task.cancelled() or task.exception())
        raise min(failed, key=lambda one: not isinstance(one, WorkerDied))
    return [one.result() for one in tasks]


def _errors(tasks: Sequence[asyncio.Future[Any]]) -> list[BaseException]:
    done = [one for one in tasks if one.done() and not one.cancelled()]
    return [error for one in done if (error := one.exception()) is not None]


def _may_follow_a_death(error: BaseException) -> bool:
    """Return True for what a rank raises when another has died in a collective."""
    return isinstance(error, CollectiveBroken) or not isinstance(error, TrinityError)


def _worker_class(config: RunConfig) -> type[TrainWorker]:
    if config.trainer.engine == "megatron":
        from .megatron import MegatronTrainWorker

        return MegatronTrainWorker
    return TrainWorker
