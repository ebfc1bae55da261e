"""Section `sync`: weights on their way from the trainer to the explorers."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from trinity_schemas import MemoryTransport, TransportName
from trinity_schemas.proof import MAX_PROBES

from ...section import Section
from ..types import DtypeName, NotNegative, Positive, Seconds

SyncMethod = Literal["memory", "nccl", "checkpoint"]
TransportChoice = Literal["auto", MemoryTransport, "cuda-ipc"]
WeightsPath = Literal[TransportName, "files", "none"]
PublishedForm = Literal["shards", "snapshot", "full"]
PublishName = Literal["auto", PublishedForm]
SyncStyle = Literal["fixed", "trainer_driven", "explorer_driven", "fully_async"]
WhenStale = Literal["drop", "wait", "pace"]
DEFAULT_PROBES = 4
"""Probes of a version where explorers compare them: more see little more (docs/proof.md)."""


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
    all processes can use. The memory of one GPU (cuda-ipc), which a single rank and all explorers
    share, is taken only where it is named."""
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
    # Off by default: where an engine is looked into, they see nothing more (decision 49).
    probes: Annotated[int, Meta(ge=0, le=MAX_PROBES)] | None = None
    """Token sequences whose log-probabilities the trainer's ranks compute of each version, and seal
    with it. Null is 4 where `explorer.proof` compares them, and else 0: each version takes a
    forward pass more, and where an engine can be looked into, explorer.proof served sees more."""
    timeout: Seconds = 300.0
    """Maximum seconds of each wait for weights, experiences or a save, and for a server that is
    away."""
