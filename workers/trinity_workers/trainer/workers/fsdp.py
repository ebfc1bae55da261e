"""One rank of the trainer."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from trinity_events import CheckpointCoordinator, Synchronizer
from trinity_events.coordinator import PlannedSave
from trinity_events.diagnostics.phase_names import IDLE
from trinity_events.diagnostics.phases import PhaseClock, PhaseReports
from trinity_events.log import Publisher, SyncEventLog, new_producer
from trinity_events.rollouts.payloads import PayloadFault, PayloadsUnusable, load_groups
from trinity_events.server import open_client
from trinity_events.weights import ModelUpdateGroup
from trinity_schemas import Experience, ExperienceHeader, ExperienceReference, Probes, StepRef

from ...algorithms.collate import collate, padding_row
from ...config.answer_limits import read_answer_limits
from ...config.train_config import RunConfig
from ...engines.base import NamedTensors, per_tensor_params
from ...engines.state_files import count_bytes, write_state
from ...helpers import (
    SaveTarget,
    fsdp_save_state_dict,
    fsdp_sync_weight_nccl,
    fsdp_upload_state_dict,
    save_huggingface,
    strategy_for,
)
from ...helpers.full_tensors import full_tensors, in_dtype
from ...helpers.huggingface import QueueLimits
from ...record.recorder import DROPPED_SAMPLES, RecordCounts, RolloutRecorder
from ...rollout_engines.base import Generation, GenerationRequest
from ...rollouts.payloads import open_payload_reader
from ...runtime.collectives import summed, together
from ...runtime.garbage import exempt_loaded_objects
from ...worker_group.dispatch import Dispatch
from ...worker_group.registered import register
from ..models.fsdp import make_step
from ..probes import VersionProber
from ..step.base import Models
from . import ROLE
from .profiling import StepProfiler
from .rank import TrainingRank
from .rollouts import RankRollouts, rank_rollouts

logger = logging.getLogger(__name__)


_PHASES = {
    "load_payloads": "training",
    "train_step": "training",
    "generate_sequences": "generating",
    "upload_state_dict": "publishing",
    "sync_weight_nccl": "publishing",
    "save_state_dict": "saving",
    "save_checkpoint": "saving",
    "save_weights": "saving",
    "save_training_state": "saving",
    "wait_on_save_thread": "saving",
    "shutdown": "saving",
}
"""Phase of a rank within a call of a method."""


class TrainWorker(TrainingRank):
    """Holds one rank's engine. All ranks call its methods together.

    But for process() and address(), which are not collective.
    """

    def __init__(self, config: RunConfig, rank: int, *, own_gpu: bool = False) -> None:
        super().__init__(config, rank, own_gpu=own_gpu)
        self._steps_taken = config.resumed_step or 0
        """Training steps taken."""
        self._prober: VersionProber | None = None
        self._loaded: dict[str, list[Experience]] = {}
        """Groups whose tokens were loaded for the next step, by the name of their payload."""
        self._recorder: RolloutRecorder | None = None
        """Recorder of this rank's rollouts; None if another rank of its replica records them."""
        self._clock = PhaseClock("waiting-trainer")
        self._phases: PhaseReports | None = None

    def execute(self, method: str, is_answering: bool, /, *args: Any, **options: Any) -> Any:
        """Call a method in its phase: between calls a rank waits for the trainer's process."""
        with self._clock.phase(_PHASES.get(method, IDLE)):
            return super().execute(method, is_answering, *args, **options)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def setup(self, host: str, port: int) -> None:
        """Join the process group and load the model."""
        self.join(host, port)
        self.open(self._make_step())
        self._rollouts: RankRollouts | None = None
        if self._config.trainer.colocated:
            self._rollouts = rank_rollouts(self._config, self._device, self._engine)
        # Here, and not in open(): ranks of roles are called past execute(), and measure no phases.
        self._phases = PhaseReports(
            self._clock,
            self._publisher.publish,
            gpus=float(self._device.type == "cuda"),
            cores=torch.get_num_threads(),
        )
        self._clock.end_start()
        exempt_loaded_objects()

    def open(self, step: Any) -> None:
        """Open the log and the way of the weights, for the models of a training step.

        Args:
            step: Training step that computes with them, of this engine.
        """
        config = self._config
        self._step = step
        self._models: Models = step.models
        self._limits = read_answer_limits(config)
        self._payloads = open_payload_reader(config)
        self._log = SyncEventLog(open_client(config.redis_url), config.run_id)
        deadline = config.sync.timeout
        self._publisher = Publisher(
            self._log, config.epoch, new_producer(ROLE, self._rank), deadline=deadline
        )
        self._profiler = StepProfiler(config, ROLE, self._rank, self._publisher.publish)
        self._coordinator = CheckpointCoordinator(
            self._publisher, config.checkpoint_folder, strategy=config.checkpoints.strategy
        )
        self._synchronizer = Synchronizer(
            config.run_id,
            config.epoch,
            redis_url=config.redis_url,
            weights_url=config.weights_url,
            transport=config.chunk_transport,
            role=ROLE,
            rank=self._rank,
            full_every=config.sync.full_every,
            tensor_digests=config.publishes_tensor_digests,
            dtype=self._published_dtype,
            deadline=deadline,
        )
        self._strategy = strategy_for(config.published_form, config.sync.timeout)

    @property
    def _published_dtype(self) -> torch.dtype | None:
        """Data type to convert published weights to; None to publish those of the engine."""
        name = self._config.published_dtype
        if name == self._config.model.dtype:
            return None
        published: torch.dtype = getattr(torch, name)
        return published

    def _make_step(self) -> Any:
        return make_step(self._config, self._device)

    @property
    def _engine(self) -> Any:
        """Engine of the policy."""
        return self._models.policy

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, local_path: str) -> None:
        """Load models, optimizers, schedules and random states, of verified files."""
        mode = self._config.checkpoints.verify
        self._engine.verify_mode = mode
        self._engine.load_checkpoint(local_path)
        if self._models.critic is not None:
            self._models.critic.verify_mode = mode
            self._models.critic.load_checkpoint(str(critic_folder(local_path)))

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE_PROTO, all_answer=True)
    def load_payloads(self, groups: Sequence[Sequence[ExperienceHeader]]) -> list[PayloadFault]:
        """Load the tokens of this rank's groups for the next step; return their faults."""
        self._loaded = {}  # those of a step that another rank could not load
        try:
            loaded = load_groups(self._payloads, groups, self._limits, self._config.sampling)
        except PayloadsUnusable as error:
            return [*error.faults]
        for group, samples in zip(groups, loaded, strict=True):
            if isinstance(group[0], ExperienceReference):
                self._loaded[group[0].payload.name] = samples
        return []

    def _with_tokens(self, group: Sequence[ExperienceHeader]) -> Sequence[Experience]:
        first = group[0]
        if isinstance(first, ExperienceReference):
            return self._loaded[first.payload.name]
        return cast("Sequence[Experience]", group)

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE_PROTO)
    def train_step(self, groups: Sequence[Sequence[ExperienceHeader]]) -> dict[str, float]:
        """Take one step on this rank's groups; metrics are of all ranks.

        The tokens of references were loaded by :meth:`load_payloads`.
        """
        padding = self._engine.tokenizer.pad_token_id
        with together():  # a rank with bad groups must not leave the others
            batch = padding_row(padding)
            samples = [self._with_tokens(group) for group in groups]
            if groups:
                batch = collate(samples, padding, vocabulary_size=self._limits.vocabulary_size)
        self._loaded = {}
        self._steps_taken += 1
        self._open_recorder()
        if self._recorder is None:
            samples = []  # their memory is free while the step computes
        with self._profiler.step(self._steps_taken):
            metrics: dict[str, float] = self._step.learn(
                batch.to(self._device), step=self._steps_taken
            )
        return metrics | self._record(samples)

    def _record(self, groups: Sequence[Sequence[Experience]]) -> dict[str, float]:
        """Record the samples of the step; return the losses of the record so far. Collective."""
        if self._config.record.rollouts == "none":
            return {}
        counts = RecordCounts()
        with together():  # with `all` it waits, and may fail on this rank alone
            if self._recorder is not None and groups:
                self._recorder.add(self._steps_taken, groups, self._step.pop_batch())
            if self._recorder is not None:
                counts = self._recorder.counts
        totals = {
            DROPPED_SAMPLES: summed(counts.dropped_samples),
            "record/removed_steps": summed(counts.removed_steps),
        }
        return {name: float(total) for name, total in totals.items() if total}

    def _open_recorder(self) -> None:
        """Start the recorder with the first step: workers of single roles take none."""
        if self._recorder is not None or self._config.record.rollouts == "none":
            return
        place, last = self.rank_info(), self._config.trainer.pipeline_parallel - 1
        # One rank of each replica, of the last stage, which has the log-probabilities.
        if (place.tp_rank, place.cp_rank, place.pp_rank) == (0, 0, last):
            self._recorder = RolloutRecorder(
                self._config, self._rank, self._publisher.waits, log=self._log
            )
            self._step.keeps_batch = True

    @register(dispatch_mode=Dispatch.MEGATRON_PP_AS_DP_PROTO)
    def generate_sequences(self, prompts: Sequence[GenerationRequest]) -> list[Generation]:
        """Generate one turn for each request with the weights of the last step, in order."""
        assert self._rollouts is not None  # the run is colocated
        return self._rollouts.generate(prompts, StepRef(self._config.epoch, self._steps_taken))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_state_dict(self, local_path: str, global_step: int) -> None:
        """Save the sharded model in the background."""
        fsdp_save_state_dict(self._engine, local_path, global_step, self._coordinator, logger)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, local_path: str, global_step: int) -> None:
        """Save the sharded model and the training state, both in the background."""
        self.save_state_dict(local_path, global_step)
        self.save_training_state(local_path, global_step)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_weights(
        self,
        local_path: str,
        global_step: int,
        *,
        name: str,
        is_state_dict: bool = True,
        masters: bool = False,
    ) -> None:
        """Save the weights as a Hugging Face folder, written in the background by rank 0.

        Args:
            local_path: Folder of the step's files.
            global_step: The training step.
            name: Name of the save.
            is_state_dict: True for a state dict, False for a part of a checkpoint.
            masters: Save the optimizer's copies of the parameters, for a checkpoint to rest on.
        """
        tensors = self._master_params() if masters else None
        if not masters and self._published_dtype is not None:
            tensors = in_dtype(full_tensors(self._engine), self._published_dtype)
        save_huggingface(
            self._engine,
            local_path,
            global_step,
            self._coordinator,
            logger,
            target=SaveTarget(name, is_state_dict),
            tensors=tensors,
            limits=QueueLimits(deadline=self._config.sync.timeout),
        )

    def _master_params(self) -> NamedTensors | None:
        """Return the parameters in the optimizer's dtype; None if they are served in it."""
        params: NamedTensors = self._engine.master_params()
        return params

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_training_state(self, local_path: str, global_step: int) -> None:
        """Save optimizer, scheduler and random states, and the critic, in the background."""
        self._save_training_state("training_state", self._engine, Path(local_path), global_step)
        if self._models.critic is not None:
            self.save_critic(local_path, global_step)

    def save_critic(self, local_path: str, global_step: int) -> None:
        """Save the critic next to the policy's folder, in the background."""
        critic, folder = self._models.critic, critic_folder(local_path)
        fsdp_save_state_dict(
            critic,
            str(folder),
            global_step,
            self._coordinator,
            logger,
            name="critic",
            is_state_dict=False,
        )
        self._save_training_state("critic_training_state", critic, folder, global_step)

    def _save_training_state(self, name: str, engine: Any, folder: Path, step: int) -> None:
        files: dict[Path, dict[str, Any]] = engine.training_files(folder)

        def save() -> None:
            for path, state in files.items():
                write_state(path, state)

        path, *more = files
        self._coordinator.save_async(
            name,
            PlannedSave(save=save, nbytes=sum(map(count_bytes, files.values()))),
            step,
            path=[path, *more] if more else path,
            ranks=self._config.trainer.rank_count,
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def upload_state_dict(self, global_step: int) -> None:
        """Publish the weights."""
        fsdp_upload_state_dict(
            self._engine,
            self._synchronizer,
            global_step,
            logger,
            strategy=self._strategy,
            probes=self._compute_probes(),
        )

    def _compute_probes(self) -> Probes | None:
        """Return the probes of the weights of now, if the run seals any. Collective."""
        if not self._config.probes:
            return None
        if self._prober is None:
            limits = read_answer_limits(self._config)
            self._prober = VersionProber(
                self._config,
                self._step,
                self._device,
                vocabulary_size=limits.vocabulary_size,
                positions=limits.max_positions,
            )
        return self._prober.compute()

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def weight_sync_address(self) -> tuple[str, int]:
        """Return the address and the port where rank 0 listens for explorers."""
        info = self._synchronizer.get_weight_sync_info()
        assert info is not None  # the trainer listens from the first question on
        return info.address, info.port

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def describe_tensors(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """Return name, dtype and shape of each tensor as it is published. Collective."""
        sent = self._synchronizer.published_dtype
        return [
            (name, str(sent(tensor.dtype)).removeprefix("torch."), tuple(tensor.shape))
            for name, tensor in per_tensor_params(self._engine)
        ]

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def setup_weight_sync_group(
        self, explorers: int, timeout: float | None = None
    ) -> tuple[str, ...]:
        """Wait, on rank 0 alone, for so many explorers; return the names of those that came."""
        return self._synchronizer.setup_weight_sync_group(
            explorers, self._config.sync.timeout if timeout is None else timeout
        )

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def teardown_weight_sync_group(self) -> None:
        """End the group, on rank 0 alone."""
        self._synchronizer.teardown_weight_sync_group()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, settles=True)
    def sync_weight_nccl(self, global_step: int) -> None:
        """Send the weights through the collective group."""
        probes = self._compute_probes()
        fsdp_sync_weight_nccl(self._engine, self._model_update_group(global_step, probes))

    def _model_update_group(
        self, global_step: int, probes: Probes | None
    ) -> ModelUpdateGroup | None:
        if self._rank != 0:
            return None
        return self._synchronizer.model_update_group(global_step, probes)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def wait_on_save_thread(self) -> None:
        """Wait for this rank's background saves; raises what failed in them."""
        self._coordinator.wait_all(self._config.sync.timeout)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def shutdown(self) -> None:
        """Wait for background saves, and leave the process group; raises what failed in them."""
        with ExitStack() as exits:
            # Last, and also after an error: saves in the background may still use the group.
            exits.callback(dist.destroy_process_group)
            self.close()

    def close(self) -> None:
        """Wait for background saves, and close what :meth:`open` opened; raises what failed."""
        with ExitStack() as exits:
            # Callbacks run in reverse: a version in the background is published before its ways
            # close.
            exits.callback(self._log.close)
            exits.callback(self._publisher.close)
            exits.callback(self._synchronizer.close)
            exits.callback(self._strategy.close)
            if self._phases is not None:
                exits.callback(self._phases.close)
            if self._recorder is not None:
                exits.callback(self._recorder.close)
            self._coordinator.wait_all(self._config.sync.timeout)


def critic_folder(local_path: str) -> Path:
    """Return the folder of the critic, beside the policy's in a checkpoint."""
    return Path(local_path).with_name("critic")
