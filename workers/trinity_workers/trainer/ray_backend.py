"""The trainer's ranks as Ray actors."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from anyio import to_thread

from trinity_events import CheckpointCoordinator
from trinity_events.checkpoints.layout import MODEL_FOLDER, TRAINER_STATE
from trinity_events.coordinator import staged_path
from trinity_events.core.file_versions import WEIGHTS_SAVE
from trinity_events.errors import GroupBroken
from trinity_events.log import Publisher, SyncEventLog, commit_version, new_producer
from trinity_events.rollouts.payloads import PayloadFault, PayloadsUnusable
from trinity_events.server import open_client
from trinity_schemas import ExperienceReference

from ..config.train_config import RunConfig
from ..rollout_engines.base import Generation, GenerationRequest
from ..storage.sealed_folders import has_weights
from ..worker_group.group import WorkerGroup
from ..worker_group.worker import Worker
from .backend import (
    NoWeightSyncGroup,
    TrainEngineWrapper,
    TrainingBatch,
    WeightSyncAddress,
    group_by_prompt,
)
from .state import TrainerState, write_trainer_state
from .workers import ROLE

logger = logging.getLogger(__name__)

SENDING_ATTEMPTS = 4
"""Attempts to send a version through a group that breaks, before the run fails."""

_SMALLEST_GROUP = 2
"""Members of a collective group: the trainer's rank 0, and one explorer."""


class Saves(NamedTuple):
    """Saves of the ranks that a checkpoint has."""

    state_dicts: int
    others: int
    """Saves of the kind `checkpoint`."""


class RayTrainBackend(TrainEngineWrapper):
    """One Ray actor a rank, each with its own engine.

    Args:
        config: The run.
        ranks: Handles of the actors, which may still be starting.
    """

    loads_payloads = True

    def __init__(self, config: RunConfig, ranks: Sequence[Any]) -> None:
        self._config = config
        self._ranks = ranks
        self._workers: WorkerGroup | None = None
        self._step = 0
        self._version_saved: int | None = None
        """Step whose weights were last saved as a version in files."""
        self._log = SyncEventLog(open_client(config.redis_url), config.run_id)
        deadline = config.sync.timeout
        self._publisher = Publisher(
            self._log, config.epoch, new_producer("trainer"), deadline=deadline
        )
        self._coordinator = CheckpointCoordinator(
            self._publisher, config.checkpoint_folder, strategy=config.checkpoints.strategy
        )

    async def prepare(self) -> None:
        """Wait for the workers to start, and load the model."""
        config = self._config
        self._workers = WorkerGroup(Worker, self._ranks, name=ROLE, format_death=self._format_death)
        with self._publisher.waits.waiting("its ranks to start", self._names):
            await self._workers.watch()
            await self._workers.load_methods()
        host, port = await self._call("address")
        await self._call("setup", host, port)
        if config.transport == "collective":
            await self._call("setup_weight_sync_group", config.explorer.count)

    async def load_checkpoint(self, folder: Path, step: int) -> None:
        """Load the checkpoint of a step on every rank."""
        await self._call("load_checkpoint", str(folder / MODEL_FOLDER[0]))
        self._step = step

    @property
    def train_step_num(self) -> int:
        """Steps taken."""
        return self._step

    async def train_step(self, batch_exps: TrainingBatch) -> dict[str, float]:
        """Take one step on samples, whose groups are dealt out over the ranks.

        All ranks have loaded the tokens of their groups before a step begins.
        """
        groups = group_by_prompt(batch_exps)
        if any(isinstance(group[0], ExperienceReference) for group in groups):
            # Dealt out as for the step itself: the shares of equal groups are the same each time.
            answers: list[list[PayloadFault]] = await self._call("load_payloads", groups)
            # Peers of a replica load the same groups, and a payload may go between their reads.
            if faults := {fault.ordinal: fault for answer in answers for fault in answer}:
                raise PayloadsUnusable(tuple(faults.values()))
        metrics: dict[str, float] = await self._call("train_step", groups)
        # Only now: a step in which a rank failed was not taken.
        self._step += 1
        return metrics

    async def generate_sequences(self, prompts: Sequence[GenerationRequest]) -> list[Generation]:
        """Generate one turn for each request on the ranks, with their present weights."""
        generations: list[Generation] = await self._call("generate_sequences", prompts)
        return generations

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
        # The state dict of the step lies in a folder of its own, and a checkpoint with a state
        # dict of its own would wait for that one too (core/completeness.py).
        is_saved = self._version_saved == step
        if not (in_files or save_as_hf or is_saved):
            await self._call("save_checkpoint", path, step)
            return Saves(state_dicts=self._saves, others=self._saves)
        if not is_saved:
            # No state dict, if the run's versions are those: explorers would wait for it.
            save = partial(self._call, "save_weights", path, step, masters=True)
            await save(name="huggingface_model", is_state_dict=not in_files)
        await self._call("save_training_state", path, step)
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
            # Without sync by files no explorer reads the folder, and a checkpoint may rest on it.
            masters = config.sync.method != "checkpoint" or config.is_save_step(step)
            path = str(folder / MODEL_FOLDER[0])
            await self._call("save_weights", path, step, name=WEIGHTS_SAVE, masters=masters)
        self._version_saved = step
        await self._coordinator.register_and_monitor(
            step, is_state_dict=True, state_dict_thread_count=1, metrics=metrics
        )

    async def upload_state_dict(self, metrics: dict[str, float] | None = None) -> None:
        """Publish the weights, and commit the version."""
        # The parts before the commit, which says that all of them were dispatched.
        await self._call("upload_state_dict", self._step)
        commit_version(self._publisher, self._step, metrics)

    async def sync_weight_nccl(self, metrics: dict[str, float] | None = None) -> None:
        """Send the weights through the collective group, and commit the version.

        When an explorer dies in the middle, the group is made anew with the explorers that are
        left, and all is sent again.
        """
        for attempt in range(1, SENDING_ATTEMPTS + 1):
            try:
                await self._call("sync_weight_nccl", self._step)
                break
            except GroupBroken as error:
                if attempt == SENDING_ATTEMPTS:
                    raise
                logger.warning("step %d: sends the weights again: %s", self._step, error)
                # For one explorer at least: this process does not know how many are left.
                await self._call("setup_weight_sync_group", 1)
        commit_version(self._publisher, self._step, metrics)

    async def get_weight_sync_info(self) -> WeightSyncAddress | None:
        """Return address, port and tensors for the collective group; None without a group."""
        if self._config.transport != "collective":
            return None
        host, port = await self._call("weight_sync_address")
        described = await self._call("describe_tensors")
        return host, port, described[0]

    async def setup_weight_sync_group(
        self, master_address: str, master_port: int, world_size: int, group_name: str, timeout: int
    ) -> None:
        """Form the collective group of trainer and explorers, at the trainer's own address."""
        if self._config.transport != "collective":
            raise NoWeightSyncGroup(self._config.run_id, "method")
        host, port = await self._call("weight_sync_address")
        if (master_address, master_port) != (host, port):
            raise NoWeightSyncGroup(
                self._config.run_id,
                "address",
                group_name,
                f"{host}:{port}",
                f"{master_address}:{master_port}",
            )
        if world_size < _SMALLEST_GROUP:
            raise NoWeightSyncGroup(self._config.run_id, "size", group_name, size=world_size)
        names = await self._call("setup_weight_sync_group", world_size - 1, timeout)
        logger.info("the group %s has %s", group_name, ", ".join(names))

    async def teardown_weight_sync_group(self) -> None:
        """End the group; it can be set up again."""
        if self._config.transport == "collective":
            await self._call("teardown_weight_sync_group")

    async def wait_for_save(self) -> None:
        """Wait for background saves, and raise the error of one that failed."""
        await self._call("wait_on_save_thread")
        timeout = self._config.sync.timeout
        await to_thread.run_sync(self._coordinator.wait_all, timeout)

    async def shutdown(self) -> None:
        """Stop the workers."""
        if self._workers is not None:
            await self._call("shutdown")
            # After shutdown(), which waits for background saves.
            self._workers.kill()
            self._workers = None
        try:
            await to_thread.run_sync(self._publisher.close)
        finally:
            self._log.close()

    @property
    def _saves(self) -> int:
        """Saves of one kind: every rank's shard is one on FSDP, all ranks write one on Megatron."""
        return 1 if self._config.trainer.on_megatron else self._config.trainer.rank_count

    @property
    def _critic_saves(self) -> int:
        """Return the saves of the critic: its model and its training state."""
        return 2 * self._saves if self._config.algorithm.critic.use else 0

    async def _call(self, method: str, /, *args: Any, **options: Any) -> Any:
        assert self._workers is not None
        with self._publisher.waits.waiting(f"{method} of its ranks", self._names):
            return await self._workers.call(method, *args, **options)

    @property
    def _names(self) -> list[str]:
        return [f"{ROLE}-{rank}" for rank in range(self._config.trainer.rank_count)]

    def _format_death(self, method: str) -> str:
        step = self._step + (method == "train_step")  # which is not taken yet
        return f"of run {self._config.run_id} died in {method} at step {step}"
