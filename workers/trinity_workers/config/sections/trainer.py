"""Section `trainer`: the engine, its ranks and the optimizer."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from ...engines.offload import FrozenOffload, Offload
from ...section import Section
from ..types import Cpus, NotNegative, Positive

EngineName = Literal["fsdp", "megatron", "verl", "verl-megatron"]
DEFAULT_RANKS = 2
"""Ranks where no GPU decides: the fewest that divide the work, as all share the host's CPUs."""
AdamBeta = Annotated[float, Meta(ge=0, lt=1)]


class TrainerConfig(Section, frozen=True, kw_only=True):
    """Training: the engine, its ranks and the optimizer."""

    engine: EngineName = "fsdp"
    """Engine that holds and trains the model: this project's FSDP or Megatron engine, veRL's FSDP
    engine, or veRL's Megatron engine, which needs a GPU for each rank."""
    ranks: Positive | None = None
    """Trainer processes (ranks). Null is one for each GPU of this host, at most 2 on Megatron
    without `tensor_parallel`; and 2 where there is no GPU, or the run joins a cluster."""
    cpus: Cpus | None = None
    """CPUs that Ray reserves for each rank, and its threads. Null reserves one; without
    RAY_ADDRESS the ranks then share the threads of the host."""
    gpus: Annotated[float, Meta(ge=0, le=1)] | None = None
    """GPUs that Ray reserves for each rank, or the part of one that explorers leave it. Null is a
    GPU, or 0.6 of one that explorers share, where there is one for each rank; else none, and ranks
    compute on CPUs."""
    tensor_parallel: Positive | None = None
    """On FSDP and Megatron, ranks that share every layer. Null is 1 on FSDP; on Megatron all ranks
    of a pipeline stage that do not share sequences or experts."""
    pipeline_parallel: Positive = 1
    """On Megatron, number of pipeline stages."""
    virtual_pipeline: Annotated[int, Meta(ge=2)] | None = None
    """On Megatron, chunks of the model on each pipeline stage. Null is one."""
    expert_parallel: Positive = 1
    """On Megatron, ranks that share the experts of a layer."""
    context_parallel: Positive = 1
    """On FSDP and Megatron, ranks that share each sequence: long rows then take less memory on
    each."""
    sequence_parallel: bool = False
    """On Megatron, let tensor-parallel ranks also share the activations between layers. Experts
    that are spread together with tensors need it."""
    distributed_optimizer: bool = False
    """On Megatron, keep a part of the optimizer's state on each data-parallel rank."""
    colocated: bool = False
    """Let the ranks answer the rollouts themselves, between two steps, with the weights that they
    hold. The run then starts no explorers, and publishes no weights."""
    rollout_tensor_parallel: Positive | None = None
    """On Megatron, ranks that share every layer while they generate: the weights change to that
    layout for the answers of a claim. Null is `tensor_parallel`, and 1 for experts."""
    recompute: bool = False
    """Compute each layer's activations again in the backward pass instead of storing them: less
    memory, and about a third more time."""
    cpu_offload: bool = False
    """On FSDP, keep parameters, gradients and optimizer state in the host's memory; a layer's
    parameters are on the GPU while it computes."""
    packing: bool = False
    """On FSDP, compute the rows of a micro-batch as one row without padding."""
    learning_rate: Annotated[float, Meta(ge=0)] = 5e-4
    """Learning rate of AdamW after the warm-up."""
    warmup_steps: NotNegative = 20
    """Steps in which the learning rate rises from 0 to its value."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after the warm-up: constant, or down to 0 at the end of `steps`,
    on a line or on half a cosine."""
    micro_batch_rows: Positive | None = None
    """Maximum rows of a forward and backward pass on a rank; gradients add up over the passes, and
    are those of all rows at once. Null takes all."""
    micro_batch_tokens: Positive | None = None
    """Maximum tokens of a forward and backward pass on a rank, padding included: rows of similar
    length are passed together. A longer row is passed alone. Null takes all."""
    fused_loss: bool = False
    """Compute log-probabilities and entropies from the last hidden states, a chunk of tokens at a
    time. The logits of a pass are then never in memory at once, and are computed twice."""
    profile_steps: tuple[Positive, ...] = ()
    """Training steps that torch.profiler traces, such as `[3, 4]`. Each rank writes a file for
    Perfetto below `profiles` in the run's folder, and an event names it."""
    profile_ranks: tuple[NotNegative, ...] | None = None
    """Ranks that trace these steps. Null is all."""
    # These are the numbers that the engines had before they were settings; TRL and veRL have 0.999
    # for adam_beta2 (decision 39).
    weight_decay: Annotated[float, Meta(ge=0)] = 0.01
    """Weight decay of AdamW."""
    adam_beta1: AdamBeta = 0.9
    """Decay of AdamW's mean of the gradients."""
    adam_beta2: AdamBeta = 0.99
    """Decay of AdamW's mean of their squares."""
    adam_epsilon: Annotated[float, Meta(gt=0)] = 1e-8
    """Number that AdamW adds to the divisor of its update."""
    max_grad_norm: Annotated[float, Meta(gt=0)] = 1.0
    """Norm to which gradients are clipped."""
    max_skipped_steps: Positive = 3
    """Steps in a row without an update, because a loss or a gradient is not finite, after which the
    run fails. A step that skips one is reported as `train/skipped_updates`."""
    policy_offload: Offload = Offload()
    critic_offload: Offload = Offload()
    reference_offload: FrozenOffload = FrozenOffload()

    @property
    def rank_count(self) -> int:
        """Return the number of ranks."""
        return DEFAULT_RANKS if self.ranks is None else self.ranks

    @property
    def tensor_ranks(self) -> int:
        """Return the number of ranks that share every layer."""
        if self.tensor_parallel is not None:
            return self.tensor_parallel
        # Ranks that share experts are replicas for all other layers.
        if self.expert_parallel > 1 or not self.on_megatron:
            return 1
        return max(1, self.rank_count // (self.pipeline_parallel * self.context_parallel))

    @property
    def on_megatron(self) -> bool:
        """Return True if the ranks are in a layout of Megatron."""
        return self.engine in {"megatron", "verl-megatron"}

    @property
    def needs_gpus(self) -> bool:
        """Return True if no rank can compute on a CPU."""
        return self.engine == "verl-megatron"
