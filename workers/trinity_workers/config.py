"""What a run is configured by."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from trinity_events.errors import TrinityError
from trinity_schemas import SaveStrategy

EngineName = Literal["fsdp", "megatron"]
# Of the Synchronizer's those that a run can be told to use. Not taken from there: that is torch.
TransportName = Literal["shm", "ray", "redis", "collective"]
TransportChoice = Literal["auto", TransportName]
PublishName = Literal["auto", "shards", "snapshot", "full"]

Positive = Annotated[int, Meta(ge=1)]
NotNegative = Annotated[int, Meta(ge=0)]


class BadSettings(TrinityError):
    """What a run is to be, or what the log says that it is, cannot be."""


class RunSettings(Struct, frozen=True, kw_only=True):
    """What a run is, wherever its processes are. Times are seconds."""

    engine: EngineName = "fsdp"
    trainers: Positive = 2
    tensor_parallel: Positive | None = None
    """On Megatron, trainers that share every layer; when left out, all of a pipeline's stage."""
    pipeline_parallel: Positive = 1
    """On Megatron, stages that the layers are dealt out to."""
    explorers: Positive = 1
    task: str = "spell-backward"
    seed: int = 0
    transport: TransportName = "redis"
    """How the trainer publishes weights."""
    publish: PublishName = "auto"
    """What travels: shards, each from the rank that holds it, while training waits, or from a copy
    (snapshot) while it goes on; or full tensors from rank 0. Auto is shards where there are several
    ranks."""

    steps: Positive = 300
    sync_interval: Positive = 1
    """Steps between two published weight versions."""
    sync_offset: NotNegative = 1
    """Versions that explorers may be behind; 0 is strictly on-policy and takes turns."""
    weights_full_every: Positive = 1
    """Versions from one published in full to the next; between them only what changed travels."""
    weights_tensor_digests: bool = False
    """Whether each tensor is digested by itself too, and again in the models of the explorers."""
    save_interval: NotNegative = 100
    """Steps between two checkpoints; 0 writes none. The last step is saved in any case."""
    save_strategy: SaveStrategy = "unrestricted"
    """Which saves may run at once."""
    sync_timeout: float = 300.0
    """Longest wait for weights, experiences or a save."""

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
        """The oldest weight version whose answers may serve training step ``step``.

        Versions are published after step 0 and after every ``sync_interval``-th step.
        """
        newest_possible = (step - 1) // self.sync_interval
        return max(0, newest_possible - self.sync_offset) * self.sync_interval

    @property
    def publishes_shards(self) -> bool:
        """Whether every rank publishes what it holds; a collective group gets full tensors."""
        if self.transport == "collective":
            return False
        return self.publish in {"shards", "snapshot"} or (
            self.publish == "auto" and self.trainers > 1
        )

    def is_sync_step(self, step: int) -> bool:
        """Whether weights are published after the step; they always are after the last."""
        return step % self.sync_interval == 0 or step == self.steps

    def is_save_step(self, step: int) -> bool:
        """Return True if a checkpoint is written after the step; it always is after the last."""
        return self.save_interval > 0 and (step % self.save_interval == 0 or step == self.steps)

    def to_text(self) -> str:
        """As JSON, to travel in the log with the event that opens the run."""
        values = {name: getattr(self, name) for name in RunSettings.__struct_fields__}
        return msgspec.json.encode(values).decode()

    def checked(self) -> RunSettings:
        """These, if they can be. Raises BadSettings when some contradict each other."""
        parts = (self.tensor_parallel or 1) * self.pipeline_parallel
        if self.engine != "megatron" and parts > 1:
            raise BadSettings(
                "--tensor-parallel and --pipeline-parallel are of Megatron alone: leave them out, "
                "or add --engine megatron"
            )
        if self.trainers % parts:
            raise BadSettings(
                f"{self.trainers} trainers cannot be dealt out to groups of {parts} "
                "(--tensor-parallel times --pipeline-parallel): choose --trainers as a multiple"
            )
        return self

    @classmethod
    def from_text(cls, text: str) -> RunSettings:
        """From JSON. Raises BadSettings when it is of a version that is too different."""
        try:
            return msgspec.json.decode(text, type=RunSettings)
        except msgspec.DecodeError as error:
            raise BadSettings(
                f"the run's settings cannot be read ({error}): "
                "is every process of it of the same version of trinity-events?"
            ) from None

    def placed(
        self,
        *,
        run_id: str,
        epoch: int,
        redis_url: str,
        weights_url: str,
        checkpoint_folder: Path,
    ) -> RunConfig:
        """The run as the processes of one place are told it."""
        return RunConfig(
            run_id=run_id,
            epoch=epoch,
            redis_url=redis_url,
            weights_url=weights_url,
            checkpoint_folder=checkpoint_folder,
            model_folder=checkpoint_folder / "model",
            **{name: getattr(self, name) for name in RunSettings.__struct_fields__},
        )


class RunConfig(RunSettings, frozen=True, kw_only=True):
    """A run, as every process of it is told."""

    run_id: str
    epoch: Positive
    """Taken when the run was opened; processes are given it, they never read it."""
    redis_url: str
    weights_url: str
    """The server of the weight chunks, where they travel by one."""
    checkpoint_folder: Path
    """The run's own directory, below the reducer's checkpoint root."""
    model_folder: Path
    """Hugging Face folder that the policy starts from."""
