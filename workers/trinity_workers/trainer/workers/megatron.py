"""One rank of a trainer on Megatron."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ...engines.base import NamedTensors
from ...engines.megatron import MegatronEngine, leave
from ...helpers.megatron import (
    SAVE_NAME,
    megatron_save_state_dict,
    megatron_sync_weight_nccl,
    megatron_upload_state_dict,
    only,
    save_as_one,
)
from ...runtime.collectives import together
from ...storage.load_verification import write_manifest_together
from ...worker_group.megatron import MegatronWorker
from ..models.megatron import make_step
from .background_saves import BackgroundSaves
from .fsdp import TrainWorker, critic_folder

logger = logging.getLogger(__name__)

# What a checkpoint consists of: each part's save, and whether it is a state dict.
_SAVES = {"model": (SAVE_NAME, True), "training": ("training_state", False)}
_CRITIC_SAVES = {"model": ("critic", False), "training": ("critic_training_state", False)}


class MegatronTrainWorker(MegatronWorker, TrainWorker):
    """Rank of the training loop with a Megatron engine."""

    _background_saves: BackgroundSaves | None = None

    @property
    def _saves(self) -> BackgroundSaves:
        """Saves in the background, which all ranks use together. Collective at the first use.

        A role's rank 0 opens its run alone, if it forms the group of explorers first.
        """
        if self._background_saves is None:
            # Made late, as new_group() needs all ranks of the default group.
            self._background_saves = BackgroundSaves(self._timeout)
        return self._background_saves

    def save_state_dict(self, local_path: str, global_step: int) -> None:
        """Save the model, before it returns; a checkpoint under way is waited for."""
        self._settle()
        megatron_save_state_dict(self._engine, local_path, global_step, self._coordinator, logger)

    def save_checkpoint(self, local_path: str, global_step: int) -> None:
        """Copy the models and the training state, and save them in the background.

        One checkpoint's copies are held at a time: one under way is waited for.
        """
        self._settle()
        self._begin_saves(self._engine, Path(local_path), global_step, _SAVES)
        if self._models.critic is not None:
            self._begin_critic_saves(local_path, global_step)

    def save_training_state(self, local_path: str, global_step: int) -> None:
        """Copy optimizer and extra state, and the critic, and save them in the background."""
        self._settle()
        with only(self._engine, ["optimizer", "extra"]):
            self._begin_saves(self._engine, Path(local_path), global_step, _SAVES)
        if self._models.critic is not None:
            self._begin_critic_saves(local_path, global_step)

    def save_critic(self, local_path: str, global_step: int) -> None:
        """Copy the critic, and save it next to the policy's folder in the background.

        A checkpoint under way is waited for, as in :meth:`save_checkpoint`.
        """
        self._settle()
        self._begin_critic_saves(local_path, global_step)

    def _begin_critic_saves(self, local_path: str, global_step: int) -> None:
        folder = critic_folder(local_path)
        self._begin_saves(self._models.critic, folder, global_step, _CRITIC_SAVES)

    def _master_params(self) -> NamedTensors | None:
        """Return None: the optimizer's state has its own copies of the parameters."""
        return None

    def _begin_saves(
        self, engine: MegatronEngine, folder: Path, step: int, saves: dict[str, tuple[str, bool]]
    ) -> None:
        group = self._saves.group
        for part, write in engine.prepare_checkpoint(str(folder), group=group).items():
            name, is_state_dict = saves[part]
            save = partial(
                save_as_one,
                dataclasses.replace(
                    write, save=partial(_write_listed, write, folder / part, group)
                ),
                folder / part,
                step,
                self._coordinator,
                logger,
                name=name,
                is_state_dict=is_state_dict,
                group=group,
            )
            self._saves.begin(f"{name} of step {step}", save)

    def wait_on_save_thread(self) -> None:
        """Wait for background saves; raises what failed in them."""
        self._saves.wait()
        super().wait_on_save_thread()

    def _settle(self) -> None:
        # A rank whose saves are late stops all of them, or the others would wait for it in the next
        # collective.
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
            probes=self._compute_probes(),
        )

    def sync_weight_nccl(self, global_step: int) -> None:
        """Send the weights through the collective group."""
        probes = self._compute_probes()
        megatron_sync_weight_nccl(self._engine, self._model_update_group(global_step, probes))

    def shutdown(self) -> None:
        """Wait for background saves, leave the process group, and forget the layout."""
        with ExitStack() as exits:
            exits.callback(leave)
            super().shutdown()

    def close(self) -> None:
        """Wait for background saves, as FSDP's does, and close them."""
        with ExitStack() as exits:
            exits.callback(super().close)
            if self._background_saves is not None:
                exits.callback(self._background_saves.close)
                self._background_saves.wait()

    def _make_step(self) -> Any:
        return make_step(self._config, self._device)


def _write_listed(write: Callable[[], None], folder: Path, group: dist.ProcessGroup) -> None:
    """Write a part of a checkpoint, and the manifest of its folder. Collective.

    The ranks digest what they wrote together; rank 0's save then lists it without another read.
    """
    write()
    write_manifest_together(folder, group)
