"""Section `explorer`: the number of explorers, and how they generate."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from trinity_schemas import ProofStatus

from ...rollout_engines.proof import ProofName
from ...section import Section
from ..types import Cpus, DtypeName, Gpus, Positive

DeviceName = Literal["cpu", "cuda"]
LONGEST_WAIT_FOR_RUN = 7 * 24 * 3600
"""Seconds; an explorer reads its wait from the log, whose writer must not keep it for ever."""


class ExplorerConfig(Section, frozen=True, kw_only=True):
    """Explorers: how many there are, and how they generate."""

    count: Positive = 1
    """Explorer processes that the run starts with; others may come and go."""
    engine: str = "huggingface"
    """Rollout engine: `huggingface`, `vllm`, `vllm-server`, an entry point, `module:attribute`,
    `./file.py:attribute`."""
    engine_options: dict[str, Any] = msgspec.field(default_factory=dict)
    """Options that are given to the rollout engine by name."""
    proof: ProofName | None = None
    """Checks that a version must pass before an explorer serves it (docs/proof.md). names: each
    tensor came once and was loaded. served: what the engine computes with is compared with what was
    published, too. probes: log-probabilities of fixed sequences are compared with the trainer's,
    too. all: all three. Null is served; with sync.method checkpoint it is names for other engines
    than vllm and vllm-server."""
    # A layer that cannot be compared is a property of the engine: the run ends with its first
    # version, and not after days with less proof than was asked for (decision 49).
    min_proof: ProofStatus | None = None
    """Weakest proof of a version that is served: proven, partly or unproven. Null is the strongest
    that the chosen checks can give: proven with served and all, partly with probes and where
    proof_layers compares some layers alone, unproven with names."""
    proof_layers: Positive | None = None
    """Number of layers that are compared with each version, in turn, where comparing all of them
    takes too long. Null compares all."""
    probe_tolerance: Annotated[float, Meta(gt=0)] | None = None
    """Nats by which the log-probability of a probe may differ from the trainer's; in the mean,
    0.15 times that. Null is by the coarser data type of both: 5e-4 in float32, 1 in bfloat16."""
    dtype: DtypeName | None = None
    """Data type in which explorers serve the policy. Null is `model.dtype`."""
    deterministic: bool = False
    """Generate each prompt's samples by themselves, so that they depend on no other prompt and on
    no number of explorers. It is slower."""
    groups_per_claim: Positive | None = None
    """Prompts that an explorer claims at a time. Null is a step's prompts over `explorer.count`."""
    cpus: Cpus | None = None
    """CPUs that Ray reserves for each explorer, and its threads. Null reserves one; without
    RAY_ADDRESS the explorers then share the threads of the host."""
    gpus: Gpus | None = None
    """GPUs that Ray reserves for each explorer: a part of one, which others share, or a whole
    number. Null is a GPU, else a part of one that explorers or ranks share, else none: what there
    is decides (docs/gpu.md)."""
    device: DeviceName | None = None
    """Device on which explorers serve the policy. Null is the GPU that is reserved for the
    explorer or, for one that is started by itself, the first GPU that it sees; else the CPU."""
    wait_for_run: Annotated[float, Meta(ge=0, le=LONGEST_WAIT_FOR_RUN)] = 300.0
    """Seconds that an explorer, which is started by itself, waits for the run to be opened again
    after its trainer failed, was interrupted or died. 0 ends the explorer with its trainer."""
