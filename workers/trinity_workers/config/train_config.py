"""Configuration of a run: one type, for files, the command line, the log and every process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Self

import msgspec
from msgspec import Meta, structs

from trinity_events.checkpoints.layout import final_name
from trinity_schemas import Sampling, TransportName

from ..algorithms.settings import AlgorithmConfig
from ..evaluation.settings import EvaluationConfig
from ..rewards.settings import RewardsConfig
from ..rollout_engines.base import SAMPLING_SETTINGS
from ..rollout_engines.proof import ProofOptions
from ..section import Section
from .errors import LoggedSettingsUnreadable, TransportNotChosen
from .other_names import to_current_names
from .sections.alarms import AlarmsConfig
from .sections.checkpoints import CheckpointsConfig
from .sections.explorer import ExplorerConfig
from .sections.model import ModelConfig
from .sections.notify import NotifyConfig
from .sections.record import RecordConfig
from .sections.rollouts import RolloutsConfig
from .sections.sync import DEFAULT_PROBES, PublishedForm, SyncConfig, WeightsPath
from .sections.task import TaskConfig
from .sections.tracking import TrackingConfig
from .sections.trainer import TrainerConfig
from .sync_schedule import (
    last_step_served,
    names_exact_version,
    oldest_usable,
    staleness_bound,
)
from .types import DtypeName, NotNegative, Positive


class TrainConfig(Section, frozen=True, kw_only=True):
    """Settings of a run that are the same on every host."""

    name: str | None = None
    """The run's id. Null takes the name of the configuration file, without its ending."""
    steps: NotNegative = 300
    """Training steps. 0 trains nothing, and evaluates the model."""
    seed: Annotated[int, Meta(ge=0, le=2**32 - 1)] = 0
    """Seed of the model and of all sampling."""
    model: ModelConfig = ModelConfig()
    task: TaskConfig = TaskConfig()
    rewards: RewardsConfig = RewardsConfig()
    trainer: TrainerConfig = TrainerConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    explorer: ExplorerConfig = ExplorerConfig()
    rollouts: RolloutsConfig = RolloutsConfig()
    sync: SyncConfig = SyncConfig()
    evaluation: EvaluationConfig = msgspec.field(default_factory=EvaluationConfig)
    checkpoints: CheckpointsConfig = CheckpointsConfig()
    record: RecordConfig = RecordConfig()
    tracking: TrackingConfig = TrackingConfig()
    alarms: AlarmsConfig = AlarmsConfig()
    notify: NotifyConfig = NotifyConfig()

    def version_wanted(self, step: int) -> int:
        """Return the oldest version whose tokens step ``step`` may train on; any if negative."""
        return oldest_usable(self.sync, step)

    @property
    def staleness_bound(self) -> int:
        """Maximum staleness of a token that is trained on, in training steps."""
        return staleness_bound(self.sync)

    @property
    def algorithm_of_step(self) -> AlgorithmConfig:
        """Return the algorithm with the run's limit of tokens where it has none of its own."""
        return self.algorithm.with_limit(self.rollouts.max_new_tokens)

    @property
    def served_dtype(self) -> DtypeName:
        """Return the data type in which explorers serve the policy."""
        return self.explorer.dtype or self.model.dtype

    @property
    def published_dtype(self) -> DtypeName:
        """Return the data type in which weights are published."""
        # The narrower of both: wider bytes would travel to be rounded on arrival.
        narrow = "bfloat16" in (self.model.dtype, self.served_dtype)
        return self.sync.dtype or ("bfloat16" if narrow else "float32")

    @property
    def teacher_folder(self) -> Path | None:
        """Return the Hugging Face folder of the teacher, if the algorithm asks one."""
        path = self.algorithm.teacher.path
        return Path(path) if path is not None and self.algorithm.needs_teacher else None

    @property
    def reward_folder(self) -> Path | None:
        """Return the Hugging Face folder of the reward model, if there is one."""
        path = self.rewards.reward_model
        return None if path is None else Path(path)

    @property
    def prompts_in_flight(self) -> int:
        """Prompts that are asked for at a time, of all steps that one version may serve."""
        # Of version 0, since every version on the schedule serves as many steps.
        return self.rollouts.prompts_per_step * last_step_served(self.sync, 0)

    @property
    def window(self) -> int:
        """Maximum number of ordinals that are open at a time."""
        return self.rollouts.window or 2 * self.prompts_in_flight

    @property
    def explorers(self) -> int:
        """Explorers that the run starts with; none if the trainer's ranks answer."""
        return 0 if self.trainer.colocated else self.explorer.count

    @property
    def proof(self) -> ProofOptions:
        """Return the checks that a version must pass before an explorer serves it."""
        explorer = self.explorer
        # Files have digests as wholes alone.
        comparable = not self.explorers_pull or self.sync.method != "checkpoint"
        checks = explorer.proof or ("served" if comparable else "names")
        options = ProofOptions(
            checks=checks, layers=explorer.proof_layers, tolerance=explorer.probe_tolerance
        )
        return replace(options, min_status=explorer.min_proof or options.best_status)

    @property
    def probes(self) -> int:
        """Return the number of probes that are sealed with each version."""
        if self.sync.probes is not None:
            return self.sync.probes
        return DEFAULT_PROBES if self.proof.runs_probes and not self.trainer.colocated else 0

    @property
    def publishes_tensor_digests(self) -> bool:
        """Return True if explorers need them: chunks with deltas cannot be compared with a model.

        vLLM's workers compare with the version itself.
        """
        return self.proof.compares_tensors and self.explorers_pull and self.sync.full_every > 1

    @property
    def explorers_pull(self) -> bool:
        """Return True if explorers pull the weights, and not processes of vLLM."""
        # vLLM's workers have Synchronizers of their own; an explorer that fetched too would do it
        # for nothing.
        return self.explorer.engine not in {"vllm", "vllm-server"}

    @property
    def groups_per_claim(self) -> int:
        """Requests that an explorer, or the trainer's ranks, claim at a time."""
        # Rounded up: else the last prompts of a step would wait for a second claim.
        share = -(-self.rollouts.prompts_per_step // max(self.explorers, 1))
        return self.explorer.groups_per_claim or share

    @property
    def sampling(self) -> Sampling:
        """Settings with which explorers sample for training."""
        rollouts = self.rollouts
        return Sampling(
            max_new_tokens=rollouts.max_new_tokens,
            temperature=rollouts.temperature,
            top_p=rollouts.top_p,
            top_k=rollouts.top_k,
            min_p=rollouts.min_p,
            repetition_penalty=rollouts.repetition_penalty,
            stop=rollouts.stop,
            seed=self.seed,
        )

    @property
    def sampling_settings(self) -> frozenset[str]:
        """Settings of sampling that requests have, and that an engine may lack."""
        default = RolloutsConfig()
        sampled = (self.rollouts, *self.evaluation.sets.values())
        return frozenset(
            name
            for name in SAMPLING_SETTINGS
            for settings in sampled
            # Sets of held-out questions lack some of them, such as stop strings.
            if getattr(settings, name, None) not in (None, getattr(default, name))
        )

    def last_step_served(self, step: int) -> int:
        """Return the last training step that rollouts of the version of ``step`` are asked for."""
        return min(self.steps, last_step_served(self.sync, step))

    def prompts_open(self, *, begun: int, version: int, oldest_named: int | None) -> int:
        """Return the number of prompts that may be open when a version is published.

        Args:
            begun: Training steps whose groups were taken.
            version: Step of the version.
            oldest_named: Oldest version that an open request names; None without one.
        """
        sync, prompts = self.sync, self.rollouts.prompts_per_step
        if sync.when_stale == "drop" and not names_exact_version(sync):
            # Nothing is too far ahead: what is too old is dropped, and the window bounds it.
            return min(self.window, (self.steps - begun) * prompts)
        last = self.last_step_served(version)
        if (
            sync.when_stale == "pace"
            and self.rollouts.order == "arrival"
            and oldest_named is not None
        ):
            # Whatever is overtaken is trained on in time: all that is open is, whatever its order.
            last = min(last, oldest_named + self.staleness_bound + 1)
        return max(last - begun, 0) * prompts

    @property
    def published_form(self) -> PublishedForm:
        """Form in which weights are published; only memory takes another one than full tensors."""
        if self.sync.method != "memory":
            return "full"
        if self.sync.publish == "auto":
            return "shards" if self.trainer.rank_count > 1 else "full"
        return self.sync.publish

    @property
    def publishes_shards(self) -> bool:
        """Return True if every rank publishes its shards, or a snapshot of them."""
        return self.published_form != "full"

    def is_sync_step(self, step: int) -> bool:
        """Return True if weights are published after the step; after the last they always are."""
        return step % self.sync.interval == 0 or step == self.steps

    def is_save_step(self, step: int) -> bool:
        """Return True if a checkpoint is written after the step; it always is after the last."""
        interval = self.checkpoints.interval
        return interval > 0 and (step % interval == 0 or step == self.steps)

    def is_hf_save_step(self, step: int) -> bool:
        """Return True if a checkpoint of the step has its model as a Hugging Face folder."""
        which = self.checkpoints.save_hf_checkpoint
        return which == "always" or (which == "last" and step == self.steps)

    def replaced(self, section: str, **values: Any) -> Self:
        """Return the configuration with other values in one section, which are not checked."""
        changed = structs.replace(getattr(self, section), **values)
        return structs.replace(self, **{section: changed})

    @property
    def keeps_versions(self) -> bool:
        """Return True if versions can be installed later; a collective group keeps none."""
        return self.sync.method != "nccl"

    def to_text(self) -> str:
        """Return the settings as JSON, for the event that opens the run."""
        # Without the fields of a RunConfig: its URLs may hold passwords, and its paths are of one
        # host.
        values = {name: getattr(self, name) for name in TrainConfig.__struct_fields__}
        return msgspec.json.encode(values).decode()

    @classmethod
    def from_text(cls, text: str) -> TrainConfig:
        """Decode settings from JSON, which may have former names.

        Raises:
            LoggedSettingsUnreadable: The writer's version does not fit.
        """
        try:
            values = msgspec.json.decode(text)
            if isinstance(values, dict):
                values = to_current_names(values)
            return msgspec.convert(values, TrainConfig)
        # Deep nesting raises RecursionError: the log's writer may be any process.
        except (msgspec.DecodeError, RecursionError) as error:
            raise LoggedSettingsUnreadable(str(error)) from None

    def placed(
        self,
        *,
        run_id: str,
        epoch: int,
        redis_url: str,
        weights_url: str,
        checkpoint_folder: Path,
        resumed_step: int | None = None,
        discards_answers: bool = False,
    ) -> RunConfig:
        """Return the run's configuration for the processes of one host."""
        return RunConfig(
            run_id=run_id,
            epoch=epoch,
            redis_url=redis_url,
            weights_url=weights_url,
            checkpoint_folder=checkpoint_folder,
            model_folder=Path(self.model.path) if self.model.path else checkpoint_folder / "model",
            resumed_step=resumed_step,
            discards_answers=discards_answers,
            **{name: getattr(self, name) for name in TrainConfig.__struct_fields__},
        )


class RunConfig(TrainConfig, frozen=True, kw_only=True):
    """Configuration of a run for each of its processes."""

    run_id: str
    epoch: Positive
    """Epoch that was taken when the run was opened; its processes receive it and never read it."""
    redis_url: str
    weights_url: str
    """URL of the weight chunks' server, for transports that use one."""
    checkpoint_folder: Path
    """Directory of the run below the reducer's checkpoint root."""
    model_folder: Path
    """Hugging Face folder of the initial policy."""
    resumed_step: int | None = None
    """Step of the checkpoint that the trainer loads first; None for the initial policy."""
    discards_answers: bool = False
    """True to train on no answer of an earlier epoch, as rewards are computed in another way."""

    @property
    def resumed_folder(self) -> Path:
        """Return the folder of the checkpoint that the trainer loads first."""
        assert self.resumed_step is not None
        return self.folder_of(self.resumed_step)

    def folder_of(self, step: int) -> Path:
        """Return the folder of a ready step."""
        return self.checkpoint_folder / final_name(step)

    @property
    def transport(self) -> WeightsPath:
        """Return the transport of the weights. Raises TransportNotChosen without one."""
        if self.trainer.colocated:
            return "none"
        if self.sync.method != "memory":
            return "collective" if self.sync.method == "nccl" else "files"
        if self.sync.transport == "auto":
            raise TransportNotChosen(self.run_id)
        return self.sync.transport

    @property
    def chunk_transport(self) -> TransportName:
        """Return the transport of a Synchronizer, where it publishes anything."""
        match self.transport:
            # Never used, as nothing is published; a Synchronizer takes no transport of files.
            case "files" | "none":
                return "redis"
            case path:
                return path
