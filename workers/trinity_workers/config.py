"""Configuration of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from trinity_events.errors import TrinityError
from trinity_schemas import SaveStrategy

EngineName = Literal["fsdp", "megatron"]
# Transports of the Synchronizer that a run can choose; an import from there would load torch.
TransportName = Literal["shm", "ray", "redis", "collective"]
TransportChoice = Literal["auto", TransportName]
PublishedForm = Literal["shards", "snapshot", "full"]
PublishName = Literal["auto", PublishedForm]

Positive = Annotated[int, Meta(ge=1)]
NotNegative = Annotated[int, Meta(ge=0)]


class BadSettings(TrinityError):
    """Raised if a run's settings, from the user or from the log, are invalid."""


class RunSettings(Struct, frozen=True, kw_only=True):
    """Settings of a run that are the same on every host. Times are in seconds."""

    engine: EngineName = "fsdp"
    trainers: Positive = 2
    tensor_parallel: Positive | None = None
    """Number of trainers that share every layer, on Megatron; None takes all of a pipeline stage.
    """
    pipeline_parallel: Positive = 1
    """Number of pipeline stages, on Megatron."""
    explorers: Positive = 1
    task: str = "spell-backward"
    seed: int = 0
    transport: TransportName = "redis"
    """Transport by which the trainer publishes weights."""
    publish: PublishName = "auto"
    """Form in which weights are published.

    "shards" come from the rank that holds them, while training waits. A "snapshot" is a copy of the
    shards, published while training continues. "full" tensors come from rank 0. "auto" is shards if
    there are several ranks.
    """

    steps: Positive = 300
    sync_interval: Positive = 1
    """Steps between two published weight versions."""
    sync_offset: NotNegative = 1
    """Versions that explorers may be behind; 0 is strictly on-policy and alternates with training.
    """
    weights_full_every: Positive = 1
    """Versions from one published in full to the next; the others are published as deltas."""
    weights_tensor_digests: bool = False
    """If True, manifests have a digest of each tensor, and explorers digest their models' tensors.
    """
    save_interval: NotNegative = 100
    """Steps between two checkpoints; 0 writes none. The last step is always saved."""
    save_strategy: SaveStrategy = "unrestricted"
    """Strategy that limits concurrent saves."""
    sync_timeout: float = 300.0
    """Maximum seconds to wait for weights, experiences or a save."""

    prompts_per_step: Positive = 16
    samples_per_prompt: Positive = 16
    max_new_tokens: Positive = 7
    temperature: float = 1.0
    learning_rate: float = 5e-4
    ramp_steps: NotNegative = 20
    gradient_norm: float = 1.0
    clip: float = 0.2
    held_out_questions: NotNegative = 256

    def version_wanted(self, step: int) -> int:
        """Return the oldest weight version whose rollouts may be used in training step ``step``.

        Versions are published after step 0 and after every ``sync_interval``-th step.
        """
        newest_possible = (step - 1) // self.sync_interval
        return max(0, newest_possible - self.sync_offset) * self.sync_interval

    @property
    def published_form(self) -> PublishedForm:
        """Form in which weights are published; a collective group gets full tensors."""
        if self.transport == "collective":
            return "full"
        if self.publish == "auto":
            return "shards" if self.trainers > 1 else "full"
        return self.publish

    @property
    def publishes_shards(self) -> bool:
        """Return True if every rank publishes its shards, or a snapshot of them."""
        return self.published_form != "full"

    def is_sync_step(self, step: int) -> bool:
        """Return True if weights are published after the step; after the last they always are."""
        return step % self.sync_interval == 0 or step == self.steps

    def is_save_step(self, step: int) -> bool:
        """Return True if a checkpoint is written after the step; it always is after the last."""
        return self.save_interval > 0 and (step % self.save_interval == 0 or step == self.steps)

    def to_text(self) -> str:
        """Return the settings as JSON, for the event that opens the run."""
        values = {name: getattr(self, name) for name in RunSettings.__struct_fields__}
        return msgspec.json.encode(values).decode()

    def checked(self) -> RunSettings:
        """Return the settings if they are consistent. Raises BadSettings if they are not."""
        parts = (self.tensor_parallel or 1) * self.pipeline_parallel
        if self.engine != "megatron" and parts > 1:
            raise BadSettings(
                "--tensor-parallel and --pipeline-parallel are for Megatron only: leave them out, "
                "or add --engine megatron"
            )
        if self.trainers % parts:
            raise BadSettings(
                f"{self.trainers} trainers cannot be divided into groups of {parts} "
                "(--tensor-parallel times --pipeline-parallel): choose --trainers as a multiple"
            )
        return self

    @classmethod
    def from_text(cls, text: str) -> RunSettings:
        """Decode settings from JSON. Raises BadSettings if the writer's version does not fit."""
        try:
            return msgspec.json.decode(text, type=RunSettings)
        except msgspec.DecodeError as error:
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
    ) -> RunConfig:
        """Return the run's configuration for the processes of one host."""
        return RunConfig(
            run_id=run_id,
            epoch=epoch,
            redis_url=redis_url,
            weights_url=weights_url,
            checkpoint_folder=checkpoint_folder,
            model_folder=checkpoint_folder / "model",
            resumed_step=resumed_step,
            **{name: getattr(self, name) for name in RunSettings.__struct_fields__},
        )


class RunConfig(RunSettings, frozen=True, kw_only=True):
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
