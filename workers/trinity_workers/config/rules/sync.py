"""Rules of weight sync: the schedule of versions, and their way."""

from __future__ import annotations

from ...rules import Computed, Contradictions, OnlyWhen, Requires, Rule, Values, is_any
from ..sync_schedule import least_bound, names_exact_version

_FIXED = is_any("sync.style", "fixed")
_MEMORY = is_any("sync.method", "memory")


def _find_small_bound(values: Values) -> Contradictions:
    sync, path = values["sync"], "sync.max_staleness"
    least = least_bound(sync)
    if sync.max_staleness is not None and sync.max_staleness < least:
        lags = names_exact_version(sync) and sync.offset
        behind = " with {=sync.offset}" if lags else ""
        yield (
            (path, "sync.interval", "sync.offset", "sync.style"),
            f"{{{path}}} is {sync.max_staleness}, and {{=sync.interval}}{behind} makes rollouts "
            f"{least} optimizer steps old: choose at least {least}, or publish more often",
        )


RULES: tuple[Rule, ...] = (
    OnlyWhen(
        "sync.offset",
        _FIXED,
        "only {sync.style} fixed has steps at which explorers synchronise",
    ),
    OnlyWhen(
        "sync.when_stale",
        ~_FIXED | is_any("rollouts.order", "arrival"),
        "{sync.style} fixed asks for what each version is to serve",
    ),
    Computed(_find_small_bound),
    Requires(
        is_any("sync.style", "fully_async"),
        ~is_any("sync.method", "nccl"),
        "a collective group makes the trainer wait for each explorer, and {sync.style} "
        "fully_async lets neither wait",
        "choose another {sync.method}, or {sync.style} trainer_driven",
    ),
    OnlyWhen(
        "sync.transport sync.publish sync.dtype sync.full_every",
        is_any("trainer.colocated", False),
        "with {trainer.colocated} no weights are published",
    ),
    OnlyWhen(
        "sync.transport sync.publish sync.full_every",
        _MEMORY,
        "with {=sync.method} rank 0 sends full tensors, and none of them through memory",
    ),
    Requires(
        is_any("explorer.proof", "served") & ~is_any("explorer.engine", "vllm", "vllm-server"),
        _MEMORY,
        "{explorer.proof} served compares with digests of single tensors, which versions in memory "
        "have alone",
    ),
    Requires(
        is_any("model.dtype", "bfloat16"),
        ~is_any("sync.dtype", "float32"),
        "{sync.dtype} is float32, and the policy computes in bfloat16",
        "leave it out, or set {model.dtype} float32",
    ),
)
