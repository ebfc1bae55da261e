"""Checks of the trainer's parallel sizes, of options that one engine has, and of profiles."""

from __future__ import annotations

from msgspec.structs import astuple

from ..sections.trainer import TrainerConfig
from ..train_config import TrainConfig
from .base import Contradictions, FormatField

_UNCHECKED = "its attention runs on no CPU, so that no test could check it"
_OF_MEGATRON = (
    "tensor_parallel",
    "pipeline_parallel",
    "virtual_pipeline",
    "expert_parallel",
    "distributed_optimizer",
)
"""Fields that Megatron alone has."""
_OF_OWN_FSDP = ("cpu_offload", "packing", "fused_loss", "colocated")
"""Fields that this project's FSDP engine has, and veRL's has not."""


def check_trainer(config: TrainConfig, named: FormatField) -> Contradictions:
    """Yield contradictions of the trainer's settings: the fields' paths, and a sentence.

    Args:
        config: The run.
        named: Names a field, given by its path, in the sentences.
    """
    trainer = config.trainer

    def name(field: str) -> str:
        return named(f"trainer.{field}")

    yield from _check_supported(trainer, name)
    if trainer.engine == "megatron":
        yield from _check_megatron(trainer, name)
        if trainer.distributed_optimizer and config.checkpoints.interval:
            yield (
                ("trainer.distributed_optimizer", "checkpoints.interval"),
                f"{name('distributed_optimizer')} is true, and megatron-core cannot load its "
                "state, so that no checkpoint of it resumes: set "
                f"{named('checkpoints.interval')} 0, or leave it out",
            )
    else:
        yield from _check_fsdp(trainer, name)
        yield from _check_offload(trainer, name)
    if trainer.engine == "verl":
        yield from _check_verl(config, named)
    yield from _check_profiles(config, name)


def _check_supported(trainer: TrainerConfig, name: FormatField) -> Contradictions:
    if trainer.context_parallel > 1:
        yield (
            ("trainer.context_parallel",),
            f"{name('context_parallel')} is {trainer.context_parallel}, and context parallelism is "
            f"not supported: {_UNCHECKED}: leave it out",
        )
    if trainer.sequence_parallel:
        yield (
            ("trainer.sequence_parallel",),
            f"{name('sequence_parallel')} is true, and sequence parallelism is not supported: its "
            "layer norms run on no CPU, so that no test could check it: leave it out",
        )


def _check_fsdp(trainer: TrainerConfig, name: FormatField) -> Contradictions:
    given = [field for field in _OF_MEGATRON if _is_set(getattr(trainer, field))]
    if given:
        verb = "are" if len(given) > 1 else "is"
        yield (
            ("trainer.engine", *(f"trainer.{field}" for field in given)),
            f"{' and '.join(map(name, given))} {verb} for Megatron only: leave "
            f"{'them' if len(given) > 1 else 'it'} out, or add {name('engine')} megatron",
        )


def _check_offload(trainer: TrainerConfig, name: FormatField) -> Contradictions:
    models = ("policy_offload", "critic_offload", "reference_offload")
    moved = [model for model in models if any(astuple(getattr(trainer, model)))]
    if trainer.cpu_offload and moved:
        yield (
            ("trainer.cpu_offload", *(f"trainer.{model}" for model in moved)),
            f"{name('cpu_offload')} keeps the models in the host's memory already: leave "
            f"{' and '.join(map(name, moved))} out, or {name('cpu_offload')}",
        )


def _check_verl(config: TrainConfig, named: FormatField) -> Contradictions:
    """Yield settings that veRL's engine has no use for."""
    trainer, engine = config.trainer, named("trainer.engine")
    given = [field for field in _OF_OWN_FSDP if getattr(trainer, field)]
    if any(astuple(trainer.policy_offload)):
        given.append("policy_offload")
    for field in given:
        yield (
            ("trainer.engine", f"trainer.{field}"),
            f"{named(f'trainer.{field}')} is not for veRL's engine: leave it out, or set {engine} "
            "fsdp",
        )
    if trainer.schedule == "linear":
        yield (
            ("trainer.engine", "trainer.schedule"),
            f"{named('trainer.schedule')} is linear, which veRL's engine does not have: set it "
            f"constant or cosine, or {engine} fsdp",
        )
    if config.algorithm.loss == "divergence":
        yield (
            ("trainer.engine", "algorithm.loss"),
            f"{named('algorithm.loss')} divergence needs logits, which veRL's engine does not "
            f"give: set {engine} fsdp",
        )


def _is_set(value: int | bool | None) -> bool:
    return value is True or (value or 1) > 1


def _check_profiles(config: TrainConfig, name: FormatField) -> Contradictions:
    trainer = config.trainer
    steps, ranks = trainer.profile_steps, trainer.profile_ranks
    if max(steps, default=0) > config.steps:
        yield (
            ("trainer.profile_steps", "steps"),
            f"{name('profile_steps')} names step {max(steps)}, and the run has {config.steps}: "
            "choose earlier ones",
        )
    if max(ranks or (), default=0) >= trainer.ranks:
        yield (
            ("trainer.profile_ranks", "trainer.ranks"),
            f"{name('profile_ranks')} names rank {max(ranks or ())}, and the last of "
            f"{trainer.ranks} trainers is rank {trainer.ranks - 1}: choose lower ones",
        )
    if ranks is not None and not steps:
        yield (
            ("trainer.profile_ranks", "trainer.profile_steps"),
            f"{name('profile_ranks')} is set, and no step is profiled: set "
            f"{name('profile_steps')}, or leave it out",
        )


def _check_megatron(trainer: TrainerConfig, name: FormatField) -> Contradictions:
    engine, ranks = name("engine"), name("ranks")
    tensor, pipeline, expert = (
        name(field) for field in ("tensor_parallel", "pipeline_parallel", "expert_parallel")
    )
    for field in ("cpu_offload", "packing"):
        if getattr(trainer, field):
            yield (
                ("trainer.engine", f"trainer.{field}"),
                f"{name(field)} is for FSDP only: leave it out, or set {engine} fsdp",
            )
    if trainer.virtual_pipeline and trainer.pipeline_parallel == 1:
        yield (
            ("trainer.virtual_pipeline", "trainer.pipeline_parallel"),
            f"{name('virtual_pipeline')} is {trainer.virtual_pipeline}, and there is no pipeline: "
            f"set {pipeline} 2 or more, or leave it out",
        )
    if trainer.expert_parallel > 1 and (trainer.tensor_parallel or 1) > 1:
        yield (
            ("trainer.expert_parallel", "trainer.tensor_parallel"),
            f"{expert} and {tensor} are both above 1, which needs sequence parallelism, which is "
            "not supported: set one of them 1",
        )
        return
    parts = (trainer.tensor_parallel or 1) * trainer.pipeline_parallel
    sizes = ("trainer.engine", "trainer.tensor_parallel", "trainer.pipeline_parallel")
    if trainer.ranks % parts:
        yield (
            (*sizes, "trainer.ranks"),
            f"{trainer.ranks} trainers cannot be divided into groups of {parts} "
            f"({tensor} times {pipeline}): choose {ranks} as a multiple",
        )
    elif trainer.ranks // trainer.pipeline_parallel % trainer.expert_parallel:
        yield (
            (*sizes, "trainer.ranks", "trainer.expert_parallel"),
            f"the {trainer.ranks // trainer.pipeline_parallel} ranks of a pipeline stage cannot be "
            f"divided into groups of {trainer.expert_parallel} ({expert}): choose {ranks} as a "
            "multiple",
        )
