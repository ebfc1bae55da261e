"""Messages between vLLM's workers and the engine's process, as JSON. Nothing is unpickled."""

from __future__ import annotations

from dataclasses import field

import msgspec
from msgspec import Struct

from trinity_events.errors import (
    CorruptVersion,
    IncompatibleWeights,
    TrinityError,
    VersionUnavailable,
)
from trinity_schemas import Probes, StepRef


class WorkerLacksVersion(VersionUnavailable):
    """A worker of vLLM could not fetch a version; ``reason`` is its error's text."""

    reason: str = field(kw_only=True)
    text = "{reason}"


class WorkerFoundCorruption(CorruptVersion):
    """A worker of vLLM found a version corrupt; ``reason`` is its error's text."""

    reason: str = field(kw_only=True)
    text = "{reason}"


class WorkerCannotLoad(IncompatibleWeights):
    """A version does not fit the model of a worker of vLLM; ``reason`` is its error's text."""

    reason: str = field(kw_only=True)
    text = "{reason}"


class ExpertsNotUpdated(IncompatibleWeights):
    """vLLM does not serve the experts of a version on this device; ``tensor`` is None."""

    text = (
        "vLLM on a CPU computes with other experts than those that an update gives it: serve a "
        "mixture of experts on GPUs, or set explorer.engine huggingface"
    )


_BASES = (VersionUnavailable, CorruptVersion, IncompatibleWeights)


class WorkerFailure(Struct, frozen=True):
    """Error of a worker, as the engine's process raises it again."""

    kind: str
    """Name of its class, or of the one of three bases that it has."""
    reason: str
    rank: int | None = None
    chunk: int | None = None
    tensor: str | None = None

    @classmethod
    def of(cls, error: Exception) -> WorkerFailure:
        """Return the failure of an error."""
        is_ours = isinstance(error, TrinityError)
        kind = next((base for base in _BASES if isinstance(error, base)), type(error))
        return cls(
            kind.__name__,
            str(error) if is_ours else f"{type(error).__name__}: {error}",
            *(getattr(error, name, None) for name in ("rank", "chunk", "tensor")),
        )


class FetchOutcome(Struct, frozen=True):
    """Outcome of a fetch in one worker."""

    worker: int
    version: StepRef
    verified_at: float = 0.0
    """Unix seconds at which the last byte was verified."""
    failure: WorkerFailure | None = None


class LoadReport(Struct, kw_only=True):
    """Report of one worker about the load of a version; names are those of the version."""

    version: StepRef | None = None
    """Version that was loaded; None if nothing was."""
    digest: str = ""
    bytes: int = 0
    missing: list[str] = msgspec.field(default_factory=list)
    """Tensors that the model was not given exactly once."""
    unloaded: list[str] = msgspec.field(default_factory=list)
    """Parameters of the model that nothing was loaded into, as vLLM names them."""
    differing: list[str] = msgspec.field(default_factory=list)
    """Tensors that the model does not compute with as they were published."""
    unproven: list[str] = msgspec.field(default_factory=list)
    """Tensors that were not compared."""
    compared: list[str] = msgspec.field(default_factory=list)
    proof_seconds: float = 0.0
    probes: Probes | None = None
    """Probes of the version."""
    failure: WorkerFailure | None = None


class ServerDescription(Struct, frozen=True, kw_only=True):
    """Description of one worker of a vLLM server, for the explorer that drives it."""

    instance: str
    """Random name of the worker's start."""
    context_length: int
    max_num_seqs: int
    world_size: int
    data_parallel_size: int
    dtype: str
    logprobs_mode: str
    vocabulary_size: int
    chunks_seeded_prefill: bool
    """True if a seeded request with a long prompt ends the engine: a CPU, with chunked prefill."""
    driver: str | None = None
    """Socket of the explorer that drives the server; None if that has ended, or there is none."""
    reaches: bool = False
    """True if the worker reaches the socket of the explorer that asks: it is on its host."""
