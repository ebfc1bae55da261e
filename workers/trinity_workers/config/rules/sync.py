"""Rules of weight sync: the schedule of versions, and their way."""

from __future__ import annotations

from ...rules import (
    Computed,
    Contradictions,
    OnlyWhen,
    Requires,
    Rule,
    SettingCondition,
    Values,
    is_any,
    is_at_least,
    is_set,
)
from ..sync_schedule import least_bound, names_exact_version

_FIXED = is_any("sync.style", "fixed")
_MEMORY = is_any("sync.method", "memory")
_PROBES = is_any("explorer.proof", "probes", "all")
_CUDA_IPC = is_any("sync.transport", "cuda-ipc")
_ONE_RANK = SettingCondition(
    ("trainer.ranks",),
    # Null is then one rank (with_rank_count).
    lambda values: values["trainer.ranks"] in (None, 1),
    "{trainer.ranks} is 1",
    "set {trainer.ranks} 1, or leave it out",
)


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
        _CUDA_IPC,
        _ONE_RANK,
        "{=sync.transport} shares the memory of one GPU, and no two ranks share a GPU",
    ),
    Requires(
        _CUDA_IPC,
        ~is_any("explorer.device", "cpu"),
        "{=sync.transport} is a GPU's memory, which explorers on CPUs cannot read",
    ),
    Requires(
        _CUDA_IPC,
        ~is_at_least("sync.full_every", 2),
        "{=sync.transport} has no deltas, which are computed on the host",
    ),
    OnlyWhen(
        "sync.probes",
        ~is_any("sync.method", "checkpoint") & is_any("trainer.colocated", False),
        "probes are sealed with the manifest of a published version, which files lack, as do "
        "ranks that answer themselves",
    ),
    Requires(
        _PROBES,
        is_any("trainer.colocated", False),
        "{explorer.proof} compares probes, which no ranks seal that answer themselves",
    ),
    Requires(
        _PROBES,
        ~is_any("sync.method", "checkpoint"),
        "{explorer.proof} compares probes, which versions that are files lack",
    ),
    Requires(
        _PROBES | is_set("sync.probes"),
        ~is_any("trainer.engine", "verl"),
        "the ranks of {trainer.engine} verl compute no probes",
    ),
    Requires(
        _PROBES,
        SettingCondition(
            ("sync.probes",),
            lambda values: values["sync.probes"] != 0,
            "{sync.probes} is above 0",
            "leave {sync.probes} out",
        ),
        "{explorer.proof} compares probes, and the trainer seals none",
    ),
    OnlyWhen(
        "explorer.proof_layers",
        ~is_any("explorer.proof", "names", "probes"),
        "{=explorer.proof} compares no layers",
    ),
    OnlyWhen(
        "explorer.probe_tolerance",
        _PROBES,
        "without {explorer.proof} probes or all, none are compared",
    ),
    Requires(
        is_any("explorer.proof", "served", "all")
        & ~is_any("explorer.engine", "vllm", "vllm-server"),
        ~is_any("sync.method", "checkpoint"),
        "{=explorer.proof} compares with digests of tensors or chunks, which files lack",
    ),
    Requires(
        is_any("model.dtype", "bfloat16"),
        ~is_any("sync.dtype", "float32"),
        "{sync.dtype} is float32, and the policy computes in bfloat16",
        "leave it out, or set {model.dtype} float32",
    ),
)
