"""Configuration of a run: one type, for files, the command line, the log and every process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import msgspec
from msgspec import Meta, structs

from trinity_events.checkpoint_layout import final_name
from trinity_events.errors import TrinityError
from trinity_schemas import MemoryTransport, RunTransport, Sampling, SaveStrategy

from ..algorithms.settings import AlgorithmConfig
from ..algorithms.settings import contradictions as algorithm_contradictions
from ..engines.offload import FrozenOffload, Offload
from ..evaluation.settings import EvaluationConfig
from ..evaluation.settings import contradictions as evaluation_contradictions
from ..learning.lora_settings import LoraConfig
from ..learning.lora_settings import contradictions as lora_contradictions
from ..rewards.settings import RewardsConfig
from ..rewards.settings import contradictions as reward_contradictions
from ..rollout_engines.base import OnUpdate
from ..section import Section
from .rules.colocated import contradictions as colocated_contradictions
from .rules.trainer import contradictions as trainer_contradictions
from .sync_method import contradictions as method_contradictions
from .sync_schedule import contradictions as sync_contradictions
from .sync_schedule import (
    last_step_served,
    names_exact_version,
    oldest_usable,
    publishes_on_demand,
    staleness_bound,
)

EngineName = Literal["fsdp", "megatron", "verl"]
SyncMethod = Literal["memory", "nccl", "checkpoint"]
TransportChoice = Literal["auto", MemoryTransport]
WeightsPath = Literal[RunTransport, "files", "none"]
PublishedForm = Literal["shards", "snapshot", "full"]
PublishName = Literal["auto", PublishedForm]
SyncStyle = Literal["fixed", "trainer_driven", "explorer_driven", "fully_async"]
WhenStale = Literal["drop", "wait", "pace"]
OnDamage = Literal["stop", "previous"]
DtypeName = Literal["float32", "bfloat16"]

Positive = Annotated[int, Meta(ge=1)]
NotNegative = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(gt=0)]
Cpus = Annotated[float, Meta(gt=0)]
LONGEST_WAIT_FOR_RUN = 7 * 24 * 3600
"""Seconds; an explorer reads its wait from the log, whose writer must not keep it for ever."""


class BadSettings(TrinityError):
    """Raised if a run's settings, from the user or from the log, are invalid."""

    is_lasting = True


class ModelConfig(Section, frozen=True, kw_only=True):
    """The policy that the run starts from."""

    path: str | None = None
    """Hugging Face folder of the policy. Null makes a small policy, and warms it up on the
    built-in task that the run has."""
    dtype: DtypeName = "float32"
    """Data type in which the policy computes while it is trained. The optimizer works on float32
    copies of the parameters."""
    lora: LoraConfig = LoraConfig()


class TaskConfig(Section, frozen=True, kw_only=True):
    """Questions, and the rewards of their answers."""

    name: str = "spell-backward"
    """Task: a built-in one, an entry point, `module:attribute` or `./file.py:attribute`."""
    questions: str | None = None
    """Source of the questions: a JSONL or Parquet file, `reasoning-gym:NAME` or `datasets:NAME`.
    Null takes those of the task itself."""
    prompt: str = "prompt"
    """Field of a question's record that holds the prompt: text, or a list of chat messages. It may
    be a path, such as `extra_info.question`."""
    answer: str | None = "answer"
    """Field of a question's record that holds the right answer, for the reward. It may be a path,
    such as `reward_model.ground_truth`. Null if no record has one."""
    reward: str | None = None
    """Reward function, `module:attribute` or `./file.py:attribute`. Null takes the task's own."""
    reward_deadline: Seconds = 30.0
    """Seconds that the reward of one answer may take; its process is ended after them."""
    environment: str | None = None
    """Environment of episodes with several turns, `module:attribute` or `./file.py:attribute`.
    Null ends each episode after the policy's first turn."""
    environment_deadline: Seconds = 30.0
    """Seconds that one reply of the environment may take; its process is ended after them."""
    options: dict[str, Any] = msgspec.field(default_factory=dict)
    """Options that are given to the task by name."""


class TrainerConfig(Section, frozen=True, kw_only=True):
    """Training: the engine, its ranks and the optimizer."""

    engine: EngineName = "fsdp"
    """Engine that holds and trains the model: this project's FSDP or Megatron engine, or veRL's
    FSDP engine."""
    ranks: Positive = 2
    """Trainer processes (ranks)."""
    cpus: Cpus | None = None
    """CPUs that Ray reserves for each rank, and its threads. Null reserves one; without
    RAY_ADDRESS the ranks then share the threads of the host."""
    tensor_parallel: Positive | None = None
    """On Megatron, ranks that share every layer. By default all of a pipeline stage do."""
    pipeline_parallel: Positive = 1
    """On Megatron, number of pipeline stages."""
    virtual_pipeline: Annotated[int, Meta(ge=2)] | None = None
    """On Megatron, chunks of the model on each pipeline stage. Null is one."""
    expert_parallel: Positive = 1
    """On Megatron, ranks that share the experts of a layer."""
    context_parallel: Positive = 1
    """Ranks that share a sequence. More than 1 is refused: its attention runs on no CPU, so that
    no test could check it."""
    sequence_parallel: bool = False
    """Share activations between tensor-parallel ranks. It is refused, as `context_parallel`."""
    distributed_optimizer: bool = False
    """On Megatron, keep a part of the optimizer's state on each data-parallel rank. Its state does
    not load, so `checkpoints.interval` must be 0."""
    colocated: bool = False
    """Let the ranks answer the rollouts themselves, between two steps, with the weights that they
    hold. The run then starts no explorers, and publishes no weights."""
    rollout_tensor_parallel: Positive | None = None
    """On Megatron, ranks that share every layer while they generate: the weights change to that
    layout for the answers of a claim. Null is `tensor_parallel`."""
    recompute: bool = False
    """Compute each layer's activations again in the backward pass instead of storing them: less
    memory, and about a third more time."""
    cpu_offload: bool = False
    """On FSDP, keep parameters, gradients and optimizer state in the host's memory; a layer's
    parameters are on the GPU while it computes."""
    packing: bool = False
    """On FSDP, compute the rows of a micro-batch as one row without padding."""
    learning_rate: Annotated[float, Meta(ge=0)] = 5e-4
    """Learning rate of AdamW after the warm-up."""
    ramp_steps: NotNegative = 20
    """Steps in which the learning rate rises from 0 to its value."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after the ramp: constant, or down to 0 at the end of `steps`, on
    a line or on half a cosine."""
    micro_batch_rows: Positive | None = None
    """Maximum rows of a forward and backward pass on a rank; gradients add up over the passes, and
    are those of all rows at once. Null takes all."""
    micro_batch_tokens: Positive | None = None
    """Maximum tokens of a forward and backward pass on a rank, padding included: rows of similar
    length are passed together. A longer row is passed alone. Null takes all."""
    fused_loss: bool = False
    """Compute log-probabilities and entropies from the last hidden states, a chunk of tokens at a
    time. The logits of a pass are then never in memory at once, and are computed twice."""
    profile_steps: tuple[Positive, ...] = ()
    """Training steps that torch.profiler traces, such as `[3, 4]`. Each rank writes a file for
    Perfetto below `profiles` in the run's folder, and an event names it."""
    profile_ranks: tuple[NotNegative, ...] | None = None
    """Ranks that trace these steps. Null is all."""
    gradient_norm: Annotated[float, Meta(gt=0)] = 1.0
    """Norm to which gradients are clipped."""
    max_skipped_steps: Positive = 3
    """Steps in a row without an update, because a loss or a gradient is not finite, after which the
    run fails. A step that skips one is reported as `train/skipped_updates`."""
    policy_offload: Offload = Offload()
    critic_offload: Offload = Offload()
    reference_offload: FrozenOffload = FrozenOffload()


class ExplorerConfig(Section, frozen=True, kw_only=True):
    """Explorers: how many there are, and how they generate."""

    count: Positive = 1
    """Explorer processes that the run starts with; others may come and go."""
    engine: str = "huggingface"
    """Rollout engine: `huggingface`, an entry point, `module:attribute`, `./file.py:attribute`."""
    engine_options: dict[str, Any] = msgspec.field(default_factory=dict)
    """Options that are given to the rollout engine by name."""
    dtype: DtypeName | None = None
    """Data type in which explorers serve the policy. Null is `model.dtype`."""
    deterministic: bool = False
    """Generate each prompt's samples by themselves, so that they depend on no other prompt and on
    no number of explorers. It is slower."""
    groups_per_claim: Positive | None = None
    """Prompts that an explorer claims at a time. Null is a step's prompts over `explorer.count`."""
    cpus: Cpus | None = None
    """CPUs that Ray reserves for each explorer, and its threads. Null reserves one; without
    RAY_ADDRESS the explorers then share the threads of the host."""
    wait_for_run: Annotated[float, Meta(ge=0, le=LONGEST_WAIT_FOR_RUN)] = 300.0
    """Seconds that an explorer, which is started by itself, waits for the run to be opened again
    after its trainer failed, was interrupted or died. 0 ends the explorer with its trainer."""


class RolloutsConfig(Section, frozen=True, kw_only=True):
    """Rollouts: what is asked for in each step, and how it is sampled."""

    prompts_per_step: Positive = 16
    """Prompts whose groups of answers one training step takes."""
    samples_per_prompt: Positive = 16
    """Answers sampled for each prompt; they are one group."""
    max_new_tokens: Positive = 7
    """Tokens after which an answer is cut off."""
    temperature: Annotated[float, Meta(gt=0)] = 1.0
    """Temperature of sampling."""
    max_turns: Positive = 1
    """Turns of the policy after which an episode with an environment ends."""
    order: Literal["ordinal", "arrival"] = "ordinal"
    """Groups that a step takes: those of the lowest ordinals, or those that arrive first."""
    window: Positive | None = None
    """Maximum number of prompts that are open at a time. Null is twice the prompts in flight."""
    claim_lease: Seconds = 10.0
    """Seconds after which the requests of an explorer that is silent are issued again."""
    request_deadline: Seconds = 300.0
    """Seconds after which a claimed request is issued again, however lively its explorer is."""
    max_attempts: Positive = 3
    """Failed attempts after which a prompt is dropped."""
    on_update: OnUpdate = "finish"
    """Treatment of answers that are being generated when a weight version arrives. `finish` ends
    them with the old version first. The others go on with the new one: `keep_cache` with the old
    version's key-value cache, `recompute_cache` with a new cache of the same tokens. Each token
    has a version of its own."""
    keep_answers: Literal["trained", "checkpoint"] = "trained"
    """Moment at which answers are deleted: their step is trained, or a checkpoint covers it. With
    the latter, a resumed run trains on them again and generates nothing twice."""


class SyncConfig(Section, frozen=True, kw_only=True):
    """Weights on their way from the trainer to the explorers."""

    style: SyncStyle = "trainer_driven"
    """Side that begins a synchronisation, and what waits for it: see docs/sync.md. Trinity-RFT's
    names dynamic_by_trainer and dynamic_by_explorer are read too."""
    interval: Positive = 1
    """Steps between two weight versions: the trainer's steps or, if explorers ask for versions,
    those of an explorer."""
    offset: NotNegative = 0
    """Explorer steps by which explorers lag behind the schedule of the style fixed. 0 alternates
    exploring and training."""
    max_staleness: NotNegative | None = None
    """Training steps that a token's version may be behind when it is trained on. 0 is strictly
    on-policy. Null is what the style fixed needs, else twice the interval, less one: explorers may
    be one version behind."""
    when_stale: WhenStale = "pace"
    """Policy that keeps to the bound: pace asks for no more than can be trained in time; wait lets
    the trainer wait for rollouts that the next step could not use; drop lets explorers run ahead,
    and issues again what is too old."""
    method: SyncMethod = "memory"
    """Way of the weights: through memory (see `transport`); sent to all explorers at once by a
    collective group (nccl: NCCL on GPUs, Gloo on CPUs); or as files of a checkpoint folder, which
    explorers load."""
    transport: TransportChoice = "auto"
    """Transport of the method `memory`: shared memory (shm, every explorer on the trainer's host),
    Ray's object store (ray, every explorer in its cluster), or Redis; auto takes the first that
    all processes can use."""
    publish: PublishName = "auto"
    """Published form of the weights: shards, each from the rank that holds it, while training
    waits; a snapshot of the shards, while training continues; or full tensors, from rank 0. Auto
    is shards if there are several ranks."""
    dtype: DtypeName | None = None
    """Data type in which weights are published. Null is the one that explorers serve in, or
    `model.dtype` if that is narrower."""
    full_every: Positive = 1
    """Weight versions from one published in full to the next; versions between them are deltas
    where these are smaller. 1 publishes all in full."""
    tensor_digests: bool = False
    """Digest each tensor separately too: explorers then digest their models' tensors before they
    report a version as served, and manifests show the tensors that two versions share."""
    timeout: Seconds = 300.0
    """Maximum seconds to wait for weights, experiences or a save."""


class CheckpointsConfig(Section, frozen=True, kw_only=True):
    """Checkpoints of the training state."""

    interval: NotNegative = 100
    """Steps between two checkpoints, and one after the last step; 0 writes none."""
    keep: NotNegative = 2
    """Number of the newest ready checkpoints to keep; 0 keeps all. A reducer that the command does
    not start has its own. Trinity-RFT's name max_checkpoints_to_keep is read too; there, 0 is the
    default."""
    save_hf_checkpoint: Literal["never", "last", "always"] = "never"
    """Checkpoints whose model is a Hugging Face folder with weights, which other programs load and
    a resume too: none, that of the last step, or all. Trinity-RFT's default is last."""
    strategy: SaveStrategy = "unrestricted"
    """Strategy that limits concurrent saves."""
    root: str | None = None
    """Folder with one checkpoint directory per run. Null is `checkpoints` below TRINITY_HOME."""
    mirror: str | None = None
    """URL of object storage for fsspec, such as `s3://bucket/path`. Each ready checkpoint is copied
    there, and a resume fetches one that is not below `root`. Null copies none."""
    on_damage: OnDamage = "stop"
    """Treatment of a damaged or missing newest checkpoint at a resume: stop names the newest older
    one that is whole, and previous continues from it."""


class TrackingConfig(Section, frozen=True, kw_only=True):
    """Trackers of experiments, which get the run's metrics."""

    trackers: tuple[str, ...] = ()
    """Trackers: jsonl, tensorboard, wandb, mlflow, an entry point or `module:attribute`."""
    folder: str | None = None
    """Folder for the trackers' files. Null is `metrics` below TRINITY_HOME."""
    project: str = "trinity-events"
    """Project of Weights & Biases, and experiment of MLflow."""


class RewardConfig(Section, frozen=True, kw_only=True):
    """Reward model, whose scores the trainer adds to the rewards of the task."""

    model: str | None = None
    """Hugging Face folder of a model for sequence or token classification with one output. It may
    have another tokenizer than the policy."""
    weight: float = 1.0
    """Factor of its scores."""


class TrainConfig(Section, frozen=True, kw_only=True):
    """Settings of a run that are the same on every host."""

    name: str | None = None
    """The run's id. Null takes the name of the configuration file, without its ending."""
    steps: Positive = 300
    """Training steps."""
    seed: Annotated[int, Meta(ge=0, le=2**32 - 1)] = 0
    """Seed of the model and of all sampling."""
    model: ModelConfig = ModelConfig()
    task: TaskConfig = TaskConfig()
    rewards: RewardsConfig = RewardsConfig()
    trainer: TrainerConfig = TrainerConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    reward: RewardConfig = RewardConfig()
    explorer: ExplorerConfig = ExplorerConfig()
    rollouts: RolloutsConfig = RolloutsConfig()
    sync: SyncConfig = SyncConfig()
    evaluation: EvaluationConfig = msgspec.field(default_factory=EvaluationConfig)
    checkpoints: CheckpointsConfig = CheckpointsConfig()
    tracking: TrackingConfig = TrackingConfig()

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
        narrow = "bfloat16" in (self.model.dtype, self.served_dtype)
        return self.sync.dtype or ("bfloat16" if narrow else "float32")

    @property
    def teacher_folder(self) -> Path | None:
        """Return the Hugging Face folder of the teacher, if the algorithm asks one."""
        path = self.algorithm.teacher.path
        return Path(path) if path is not None and self.algorithm.asks_teacher else None

    @property
    def reward_folder(self) -> Path | None:
        """Return the Hugging Face folder of the reward model, if there is one."""
        return None if self.reward.model is None else Path(self.reward.model)

    @property
    def prompts_in_flight(self) -> int:
        """Prompts that are asked for at a time, of all steps that one version may serve."""
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
    def groups_per_claim(self) -> int:
        """Requests that an explorer, or the trainer's ranks, claim at a time."""
        share = -(-self.rollouts.prompts_per_step // max(self.explorers, 1))
        return self.explorer.groups_per_claim or share

    @property
    def sampling(self) -> Sampling:
        """Settings with which explorers sample for training."""
        return Sampling(
            max_new_tokens=self.rollouts.max_new_tokens,
            temperature=self.rollouts.temperature,
            seed=self.seed,
        )

    def last_step_served(self, step: int) -> int:
        """Return the last training step that rollouts of the version of ``step`` are asked for."""
        return min(self.steps, last_step_served(self.sync, step))

    @property
    def published_form(self) -> PublishedForm:
        """Form in which weights are published; only memory takes another one than full tensors."""
        if self.sync.method != "memory":
            return "full"
        if self.sync.publish == "auto":
            return "shards" if self.trainer.ranks > 1 else "full"
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
        values = {name: getattr(self, name) for name in TrainConfig.__struct_fields__}
        return msgspec.json.encode(values).decode()

    @classmethod
    def from_text(cls, text: str) -> TrainConfig:
        """Decode settings from JSON. Raises BadSettings if the writer's version does not fit."""
        try:
            return msgspec.json.decode(text, type=TrainConfig)
        except (msgspec.DecodeError, RecursionError) as error:
            raise BadSettings(
                f"the run's settings cannot be read ({error}): "
                "do all of its processes have the same version of trinity-events?"
            ) from None

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


def contradictions(
    config: TrainConfig, named: Callable[[str], str]
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield what contradicts itself in a configuration: the fields' paths, and a sentence.

    Args:
        config: The configuration.
        named: Names a field, given by its path, in the sentences.
    """
    sync = config.sync
    yield from trainer_contradictions(config, named)
    yield from colocated_contradictions(config, named)
    yield from lora_contradictions(config, named)
    if config.checkpoints.save_hf_checkpoint != "never" and not config.checkpoints.interval:
        interval, saved = named("checkpoints.interval"), named("checkpoints.save_hf_checkpoint")
        yield (
            ("checkpoints.save_hf_checkpoint", "checkpoints.interval"),
            f"{saved} is {config.checkpoints.save_hf_checkpoint}, and {interval} 0 writes no "
            f"checkpoints: set {interval}, or {saved} never",
        )
    yield from _of_micro_batches(config, named)
    yield from _of_the_algorithm(config, named)
    yield from reward_contradictions(config.rewards, config.task.reward, named)
    yield from sync_contradictions(sync, named)
    if sync.dtype == "float32" and config.model.dtype == "bfloat16":
        yield (
            ("sync.dtype", "model.dtype"),
            f"{named('sync.dtype')} is float32, and the policy computes in bfloat16: leave it out, "
            f"or set {named('model.dtype')} float32",
        )
    if config.window < config.prompts_in_flight:
        yield (
            ("rollouts.window", "rollouts.prompts_per_step", "sync.interval", "sync.max_staleness"),
            f"{named('rollouts.window')} is {config.window}, and {config.prompts_in_flight} "
            "prompts are in flight between two versions: choose at least so many, or leave it out",
        )
    if config.rollouts.max_turns > 1 and config.task.environment is None:
        yield (
            ("rollouts.max_turns", "task.environment"),
            f"{named('rollouts.max_turns')} is {config.rollouts.max_turns}, and without "
            f"{named('task.environment')} an episode has one turn: set it, or leave the turns out",
        )
    yield from method_contradictions(sync, named)
    yield from _of_updates(config, named)
    yield from evaluation_contradictions(
        config.evaluation, named, steps=config.steps, keeps_versions=config.keeps_versions
    )


def _of_micro_batches(
    config: TrainConfig, named: Callable[[str], str]
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield what contradicts the sizes of micro-batches."""
    rows, tokens = named("trainer.micro_batch_rows"), named("trainer.micro_batch_tokens")
    bound, answer = config.trainer.micro_batch_tokens, config.rollouts.max_new_tokens
    if bound is None:
        return
    if config.trainer.micro_batch_rows is not None:
        yield (
            ("trainer.micro_batch_rows", "trainer.micro_batch_tokens"),
            f"{rows} and {tokens} both divide a step's rows: leave one of them out",
        )
    if bound <= answer:
        limit = named("rollouts.max_new_tokens")
        yield (
            ("trainer.micro_batch_tokens", "rollouts.max_new_tokens"),
            f"{tokens} is {bound}, and a row has up to {answer} tokens of an answer ({limit}) "
            "beside its prompt: choose more than both",
        )


def _of_updates(
    config: TrainConfig, named: Callable[[str], str]
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield what contradicts answers that several versions sample."""
    mode, sync = config.rollouts.on_update, config.sync
    if mode == "finish":
        return
    asked = f"{named('rollouts.on_update')} is {mode}, and"
    way_out = f"set {named('rollouts.on_update')} finish, or"
    if config.explorer.deterministic:
        deterministic = named("explorer.deterministic")
        yield (
            ("rollouts.on_update", "explorer.deterministic"),
            f"{asked} answers then depend on the moment at which weights arrive, which "
            f"{deterministic} rules out: {way_out} {deterministic} false",
        )
    if names_exact_version(sync):
        style = named("sync.style")
        yield (
            ("rollouts.on_update", "sync.style"),
            f"{asked} {style} fixed has the steps between which explorers change versions, never "
            f"amid an answer: {way_out} another {style}",
        )
        return
    least = 1 if publishes_on_demand(sync) else sync.interval
    if config.staleness_bound < least:
        bound = named("sync.max_staleness")
        yield (
            ("rollouts.on_update", "sync.max_staleness", "sync.interval"),
            f"{asked} with {bound} {config.staleness_bound} no answer that an earlier version "
            f"began is trained on: {way_out} {bound} {least} or more",
        )


def _of_the_algorithm(
    config: TrainConfig, named: Callable[[str], str]
) -> Iterator[tuple[tuple[str, ...], str]]:
    refused = list(_beyond_the_trainer(config, named))
    yield from refused
    told = {path for paths, _ in refused for path in paths}
    found = algorithm_contradictions(
        config.algorithm,
        lambda path: named(f"algorithm.{path}"),
        config.rollouts.samples_per_prompt,
    )
    for inner, said in found:
        paths = tuple(f"algorithm.{path}" for path in inner)
        if not told.intersection(paths):
            yield paths, said


def _beyond_the_trainer(
    config: TrainConfig, named: Callable[[str], str]
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield what an own loop can compute, and this trainer cannot."""
    algorithm, engine = config.algorithm, named("trainer.engine")
    advantage, loss = named("algorithm.advantage"), named("algorithm.loss")
    megatron = config.trainer.engine == "megatron"
    path = named("algorithm.teacher.path")
    if algorithm.asks_teacher and algorithm.teacher.path is None:
        yield (
            ("algorithm.advantage", "algorithm.loss", "algorithm.teacher.path"),
            f"{advantage} {algorithm.advantage} with {loss} {algorithm.loss} compares the policy "
            f"with a teacher: set {path} to its Hugging Face folder",
        )
    if algorithm.teacher.path is not None and not algorithm.asks_teacher:
        yield (
            ("algorithm.teacher.path",),
            f"{path} names a teacher, and nothing asks it: set {advantage} teacher, or {loss} "
            "divergence, or leave it out",
        )
    if config.reward.model is not None and algorithm.filters.zero_variance == "resample":
        yield (
            ("reward.model", "algorithm.filters.zero_variance"),
            f"{named('algorithm.filters.zero_variance')} resample drops groups by the rewards of "
            f"the task, before the model of {named('reward.model')} has scored them: set it mask",
        )
    critic = algorithm.critic
    if critic.use and critic.warmup_steps >= config.steps:
        yield (
            ("algorithm.critic.warmup_steps", "steps"),
            f"{named('algorithm.critic.warmup_steps')} is {critic.warmup_steps}, and of "
            f"{config.steps} {named('steps')} none would train the policy: choose fewer",
        )
    rows = config.rollouts.prompts_per_step * config.rollouts.samples_per_prompt
    if algorithm.mini_batches > rows:
        yield (
            ("algorithm.mini_batches", "rollouts.prompts_per_step", "rollouts.samples_per_prompt"),
            f"{named('algorithm.mini_batches')} is {algorithm.mini_batches}, and a step has "
            f"{rows} answers: choose at most so many",
        )
    fused = named("trainer.fused_loss")
    if config.trainer.fused_loss and algorithm.loss == "divergence":
        yield (
            ("trainer.fused_loss", "algorithm.loss"),
            f"{loss} divergence compares whole logits, which {fused} never has: set it false",
        )
    if not megatron:
        return
    if algorithm.loss == "divergence":
        yield (
            ("trainer.engine", "algorithm.loss"),
            f"{engine} megatron splits the vocabulary, and {loss} divergence compares all of it: "
            f"set {advantage} teacher with another {loss}, or {engine} fsdp",
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
        """Return the transport of the weights. Raises BadSettings if the launcher chose none."""
        if self.trainer.colocated:
            return "none"
        if self.sync.method != "memory":
            return "collective" if self.sync.method == "nccl" else "files"
        if self.sync.transport == "auto":
            raise BadSettings(f"no transport of the weights was chosen for run {self.run_id}")
        return self.sync.transport

    @property
    def chunk_transport(self) -> RunTransport:
        """Return the transport of a Synchronizer, where it publishes anything."""
        match self.transport:
            case "files" | "none":
                return "redis"
            case path:
                return path
