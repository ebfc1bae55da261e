"""Rules of weight sync: the schedule of versions, and their way."""

from __future__ import annotations

from ..sections.sync import SyncConfig
from ..sync_schedule import asks_once_ready, least_bound, names_exact_version
from ..train_config import TrainConfig
from .base import Contradictions, FormatField


def check_schedule(sync: SyncConfig, named: FormatField) -> Contradictions:
    """Yield what cannot work: the fields' paths, and a sentence with the reason.

    Args:
        sync: The section.
        named: Names a field, given by its path, in the sentences.
    """
    style, offset, bound = (named(f"sync.{name}") for name in ("style", "offset", "max_staleness"))
    if sync.offset and not names_exact_version(sync):
        yield (
            ("sync.offset", "sync.style"),
            f"{offset} is {sync.offset}, and only {style} fixed has steps at which explorers "
            f"synchronise: leave it out, or choose {style} fixed",
        )
    least = least_bound(sync)
    if sync.max_staleness is not None and sync.max_staleness < least:
        lags = names_exact_version(sync) and sync.offset
        behind = f" with {offset} {sync.offset}" if lags else ""
        yield (
            ("sync.max_staleness", "sync.interval", "sync.offset", "sync.style"),
            f"{bound} is {sync.max_staleness}, and {named('sync.interval')} {sync.interval}"
            f"{behind} makes rollouts {least} optimizer steps old: choose at least {least}, or "
            "publish more often",
        )
    if asks_once_ready(sync) and sync.method == "nccl":
        yield (
            ("sync.style", "sync.method"),
            f"a collective group makes the trainer wait for each explorer, and {style} "
            f"fully_async lets neither wait: choose another {named('sync.method')}, or {style} "
            "trainer_driven",
        )


def check_method(sync: SyncConfig, named: FormatField) -> Contradictions:
    """Yield settings of versions in memory, where the method is another one.

    Args:
        sync: The section.
        named: Names a field, given by its path, in the sentences.
    """
    if sync.method == "memory":
        return
    method = named("sync.method")
    how = {
        "nccl": "sends full tensors from rank 0 to a collective group",
        "checkpoint": "writes full tensors to files from rank 0",
    }[sync.method]
    given = {
        "transport": sync.transport != "auto" and f"{sync.transport} chooses a way through memory",
        "publish": sync.publish in {"shards", "snapshot"} and f"{sync.publish} was asked for",
        "full_every": sync.full_every > 1 and "asks for deltas",
    }
    if sync.method == "checkpoint":
        given["tensor_digests"] = sync.tensor_digests and "is for versions in memory"
    for field, reason in given.items():
        if reason:
            yield (
                ("sync.method", f"sync.{field}"),
                f"{method} {sync.method} {how}, and {named(f'sync.{field}')} {reason}: leave that "
                f"out, or choose {method} memory",
            )


def check_published_dtype(config: TrainConfig, named: FormatField) -> Contradictions:
    """Yield a data type of published weights that is wider than the policy's."""
    if config.sync.dtype == "float32" and config.model.dtype == "bfloat16":
        yield (
            ("sync.dtype", "model.dtype"),
            f"{named('sync.dtype')} is float32, and the policy computes in bfloat16: leave it out, "
            f"or set {named('model.dtype')} float32",
        )
