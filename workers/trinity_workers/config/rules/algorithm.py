"""Rules between the algorithm and the trainer that runs it."""

from __future__ import annotations

from ...algorithms.rules import contradictions as algorithm_contradictions
from ..train_config import TrainConfig
from .base import Contradictions, FormatField


def check_algorithm(config: TrainConfig, named: FormatField) -> Contradictions:
    """Yield contradictions of the algorithm, each field in one of them alone."""
    refused = list(_check_trainer_support(config, named))
    yield from refused
    reported = {path for paths, _ in refused for path in paths}
    contradictions = algorithm_contradictions(
        config.algorithm,
        lambda path: named(f"algorithm.{path}"),
        config.rollouts.samples_per_prompt,
    )
    for inner, text in contradictions:
        paths = tuple(f"algorithm.{path}" for path in inner)
        if not reported.intersection(paths):
            yield paths, text


def _check_trainer_support(config: TrainConfig, named: FormatField) -> Contradictions:
    """Yield what an own loop can compute, and this trainer cannot."""
    algorithm, engine = config.algorithm, named("trainer.engine")
    advantage, loss = named("algorithm.advantage"), named("algorithm.loss")
    megatron = config.trainer.engine == "megatron"
    path = named("algorithm.teacher.path")
    if algorithm.needs_teacher and algorithm.teacher.path is None:
        yield (
            ("algorithm.advantage", "algorithm.loss", "algorithm.teacher.path"),
            f"{advantage} {algorithm.advantage} with {loss} {algorithm.loss} compares the policy "
            f"with a teacher: set {path} to its Hugging Face folder",
        )
    if algorithm.teacher.path is not None and not algorithm.needs_teacher:
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
    if critic.use and critic.critic_warmup_steps >= config.steps:
        warmup = "algorithm.critic.critic_warmup_steps"
        yield (
            (warmup, "steps"),
            f"{named(warmup)} is {critic.critic_warmup_steps}, and of {config.steps} "
            f"{named('steps')} none would train the policy: choose fewer",
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
