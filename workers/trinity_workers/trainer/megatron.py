"""One rank of a trainer on Megatron."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..collectives import together
from ..engines.base import NamedTensors
from ..engines.megatron import (
    MegatronEngine,
    ModelOptions,
    OptimizerOptions,
    ParallelLayout,
    leave,
)
from ..helpers.megatron import (
    SAVE_NAME,
    megatron_save_state_dict,
    megatron_sync_weight_nccl,
    megatron_upload_state_dict,
    only,
    save_as_one,
)
from ..learning.teacher import checked_teacher
from ..worker_group.megatron import MegatronWorker
from .background_saves import BackgroundSaves
from .division import micro_batch_limit
from .megatron_step import MegatronTrainingStep
from .rates import policy_rate
from .worker import TrainWorker

logger = logging.getLogger(__name__)

# What a checkpoint consists of: each part's save, and whether it is a state dict.
_SAVES = {"model": (SAVE_NAME, True), "training": ("training_state", False)}


class MegatronTrainWorker(MegatronWorker, TrainWorker):
    """Rank of the training loop with a Megatron engine."""

    def setup(self, host: str, port: int) -> None:
        """Set up the rank, and its saves in the background."""
        super().setup(host, port)
        self._saves = BackgroundSaves(self._timeout)

    def save_state_dict(self, local_path: str, global_step: int) -> None:
        """Save the model, before it returns; a checkpoint under way is waited for."""
        self._settle()
        megatron_save_state_dict(self._engine, local_path, global_step, self._coordinator, logger)

    def save_checkpoint(self, local_path: str, global_step: int) -> None:
        """Copy the model and the training state, and save them in the background.

        One checkpoint's copies are held at a time: one under way is waited for.
        """
        self._begin_saves(local_path, global_step)

    def save_training_state(self, local_path: str, global_step: int) -> None:
        """Copy optimizer and extra state, and save them in the background."""
        with only(self._engine, ["optimizer", "extra"]):
            self._begin_saves(local_path, global_step)

    def _master_params(self) -> NamedTensors | None:
        """Return None: the optimizer's state has its own copies of the parameters."""
        return None

    def _begin_saves(self, local_path: str, global_step: int) -> None:
        self._settle()
        group = self._saves.group
        for part, write in self._engine.prepare_checkpoint(local_path, group=group).items():
            name, is_state_dict = _SAVES[part]
            save = partial(
                save_as_one,
                write,
                Path(local_path) / part,
                global_step,
                self._coordinator,
                logger,
                name=name,
                is_state_dict=is_state_dict,
                group=group,
            )
            self._saves.begin(f"{name} of step {global_step}", save)

    def wait_on_save_thread(self) -> None:
        """Wait for background saves; raises what failed in them."""
        self._saves.wait()
        super().wait_on_save_thread()

    def _settle(self) -> None:
        with together():
            self._saves.settle()

    def upload_state_dict(self, global_step: int) -> None:
        """Publish the weights."""
        megatron_upload_state_dict(
            self._engine,
            self._synchronizer,
            global_step,
            logger,
            strategy=self._strategy,
        )

    def sync_weight_nccl(self, global_step: int) -> None:
        """Send the weights through the collective group."""
        megatron_sync_weight_nccl(self._engine, self._model_update_group(global_step))

    def shutdown(self) -> None:
        """Wait for background saves, as FSDP's does, and forget the layout."""
        with ExitStack() as exits:
            exits.callback(leave)
            exits.callback(super().shutdown)
            exits.callback(self._saves.close)
            self._saves.wait()

    def _make_step(self) -> Any:
        config = self._config
        pipeline = config.trainer.pipeline_parallel
        tensor = config.trainer.tensor_parallel or max(1, config.trainer.ranks // pipeline)
        settings = config.algorithm_of_step
        make = partial(
            MegatronEngine,
            device=self._device,
            layout=ParallelLayout(tensor=tensor, pipeline=pipeline),
            seed=config.seed,
        )
        policy, frozen = (
            ModelOptions(
                dtype=getattr(torch, config.model.dtype),
                fused_loss=config.trainer.fused_loss,
                offload=one,
            )
            for one in (config.trainer.policy_offload, config.trainer.reference_offload)
        )
        self._policy = make(
            config.model_folder,
            optimizer=OptimizerOptions(
                learning_rate=policy_rate(config), gradient_norm=config.trainer.gradient_norm
            ),
            model=policy,
        )
        reference = teacher = None
        if "reference_logprobs" in settings.needed_fields:
            reference = make(config.model_folder, model=frozen)
        if config.teacher_folder is not None:
            teacher = make(
                checked_teacher(config.teacher_folder, config.model_folder),
                model=frozen,
            )
        return MegatronTrainingStep(
            self._policy,
            settings,
            temperature=config.rollouts.temperature,
            limit=micro_batch_limit(config.trainer),
            reference=reference,
            teacher=teacher,
        )

    @property
    def _engine(self) -> MegatronEngine:
        return self._policy

    def load_checkpoint(self, local_path: str) -> None:
        """Load model, optimizer and random states."""
        self._policy.load_checkpoint(local_path)
