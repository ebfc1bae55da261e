"""Rules of rollouts: prompts in flight, turns, and versions amid an answer."""

from __future__ import annotations

from ..sync_schedule import names_exact_version, publishes_on_demand
from ..train_config import TrainConfig
from .base import Contradictions, FormatField


def check_window_and_turns(config: TrainConfig, named: FormatField) -> Contradictions:
    """Yield a window or turns that the other settings cannot use."""
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


def check_updates(config: TrainConfig, named: FormatField) -> Contradictions:
    """Yield what contradicts answers that several versions sample."""
    mode, sync = config.rollouts.on_update, config.sync
    if mode == "finish":
        return
    subject = f"{named('rollouts.on_update')} is {mode}, and"
    way_out = f"set {named('rollouts.on_update')} finish, or"
    if config.explorer.deterministic:
        deterministic = named("explorer.deterministic")
        yield (
            ("rollouts.on_update", "explorer.deterministic"),
            f"{subject} answers then depend on the moment at which weights arrive, which "
            f"{deterministic} rules out: {way_out} {deterministic} false",
        )
    if names_exact_version(sync):
        style = named("sync.style")
        yield (
            ("rollouts.on_update", "sync.style"),
            f"{subject} {style} fixed has the steps between which explorers change versions, never "
            f"amid an answer: {way_out} another {style}",
        )
        return
    least = 1 if publishes_on_demand(sync) else sync.interval
    if config.staleness_bound < least:
        bound = named("sync.max_staleness")
        yield (
            ("rollouts.on_update", "sync.max_staleness", "sync.interval"),
            f"{subject} with {bound} {config.staleness_bound} no answer that an earlier version "
            f"began is trained on: {way_out} {bound} {least} or more",
        )
