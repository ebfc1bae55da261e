"""Rules of the trainer: options that an engine has, parallel sizes, micro-batches and profiles."""

from __future__ import annotations

from ...rules import (
    Computed,
    Contradictions,
    OnlyWhen,
    Requires,
    Rule,
    Values,
    is_any,
    is_at_least,
    is_positive,
    is_set,
)

_FSDP = is_any("trainer.engine", "fsdp")
_MEGATRON = is_any("trainer.engine", "megatron")
_VERL_MEGATRON = is_any("trainer.engine", "verl-megatron")
_LAYOUT = is_any("trainer.engine", "megatron", "verl-megatron")
_OWN_ENGINE = is_any("trainer.engine", "fsdp", "megatron")
_COLOCATED = is_any("trainer.colocated", True)
_POLICY = " ".join(
    f"trainer.policy_offload.{part}_offload" for part in ("param", "grad", "optimizer")
)
_CRITIC = _POLICY.replace("policy", "critic")
_REFERENCE = "trainer.reference_offload.param_offload"
_NO_OPTION = "{=trainer.engine} has no such option"


def _find_indivisible_ranks(values: Values) -> Contradictions:
    trainer = values["trainer"]
    if not trainer.on_megatron:
        # One of them is 1, by another rule.
        for setting in ("trainer.context_parallel", "trainer.tensor_parallel"):
            parts = values[setting] or 1
            if trainer.rank_count % parts:
                yield (
                    (setting, "trainer.ranks"),
                    f"{trainer.rank_count} trainers cannot be divided into groups of {parts} "
                    f"({{{setting}}}): choose {{trainer.ranks}} as a multiple",
                )
        return
    tensor = trainer.tensor_parallel or 1
    # megatron-core raises in the first training step otherwise (transformer/moe/moe_layer.py).
    if trainer.expert_parallel > 1 and tensor > 1 and not trainer.sequence_parallel:
        yield (
            ("trainer.expert_parallel", "trainer.tensor_parallel", "trainer.sequence_parallel"),
            "{trainer.expert_parallel} and {trainer.tensor_parallel} are both above 1, which needs "
            "sequence parallelism: set {trainer.sequence_parallel} true, or one of them 1",
        )
        return
    # Without the ranks that share experts: for all other layers these are replicas.
    parts = tensor * trainer.pipeline_parallel * trainer.context_parallel
    sizes: tuple[str, ...]
    sizes = ("trainer.engine", "trainer.tensor_parallel", "trainer.pipeline_parallel")
    product = "{trainer.tensor_parallel} times {trainer.pipeline_parallel}"
    if trainer.context_parallel > 1:
        sizes = (*sizes, "trainer.context_parallel")
        product += " times {trainer.context_parallel}"
    stage = trainer.rank_count // trainer.pipeline_parallel
    if trainer.rank_count % parts:
        yield (
            (*sizes, "trainer.ranks"),
            f"{trainer.rank_count} trainers cannot be divided into groups of {parts} "
            f"({product}): choose {{trainer.ranks}} as a multiple",
        )
    # As megatron-core refuses it (model_parallel_config.py), before any rank has started.
    elif trainer.sequence_parallel and trainer.tensor_ranks == 1:
        yield (
            (*sizes, "trainer.ranks", "trainer.sequence_parallel"),
            "{trainer.sequence_parallel} is true, and no tensor-parallel ranks share a sequence: "
            "set {trainer.tensor_parallel} 2 or more, or leave it out",
        )
    # Experts are divided by as many tensor-parallel ranks as other layers (parallel_state.py).
    elif stage % (tensor * trainer.expert_parallel):
        yield (
            (*sizes, "trainer.ranks", "trainer.expert_parallel"),
            f"the {stage} ranks of a pipeline stage cannot be divided into groups of "
            f"{tensor * trainer.expert_parallel} ({_experts(tensor)}): choose {{trainer.ranks}} as "
            "a multiple",
        )


def _experts(tensor: int) -> str:
    experts = "{trainer.expert_parallel}"
    return experts if tensor == 1 else f"{{trainer.tensor_parallel}} times {experts}"


def _find_unshared_layers(values: Values) -> Contradictions:
    trainer, tensor = values["trainer"], "trainer.tensor_parallel"
    if trainer.engine != "fsdp" or trainer.tensor_ranks == 1:
        return
    for path, off, action in (
        ("trainer.context_parallel", 1, "share no sequences"),
        ("trainer.cpu_offload", False, "keep no parameters in the host's memory"),
        ("model.lora.rank", 0, "train no adapters"),
    ):
        if values[path] != off:
            yield (
                (path, tensor, "trainer.engine"),
                f"ranks of {{=trainer.engine}} that share layers ({{{tensor}}}) {action} "
                f"({{{path}}}): set {{{path}}} {str(off).lower()}, or {{{tensor}}} 1",
            )


def _find_indivisible_rollouts(values: Values) -> Contradictions:
    path, ranks = "trainer.rollout_tensor_parallel", values["trainer"].rank_count
    size = values[path]
    if size is not None and values["trainer.engine"] == "megatron" and ranks % size:
        yield (
            (path, "trainer.ranks"),
            f"{{{path}}} is {size}, and {ranks} trainers cannot be divided into groups of {size}: "
            "choose a divisor",
        )


def _find_short_micro_batch(values: Values) -> Contradictions:
    bound, answer = values["trainer.micro_batch_tokens"], values["rollouts.max_new_tokens"]
    if bound is not None and bound <= answer:
        yield (
            ("trainer.micro_batch_tokens", "rollouts.max_new_tokens"),
            f"{{trainer.micro_batch_tokens}} is {bound}, and a row has up to {answer} tokens of an "
            "answer ({rollouts.max_new_tokens}) in addition to its prompt: choose more than both",
        )


def _find_shared_gpu(values: Values) -> Contradictions:
    gpus, ranks = values["trainer.gpus"], values["trainer"].rank_count
    if gpus is not None and 0 < gpus <= 0.5 and ranks > 1:
        yield (
            ("trainer.gpus", "trainer.ranks"),
            f"{{trainer.gpus}} is {gpus:g}, with which Ray places two ranks on a GPU, and NCCL "
            "takes one: choose more than 0.5, or 0",
        )


def _find_absent_gpu(values: Values) -> Contradictions:
    if values["trainer"].needs_gpus and values["trainer.gpus"] == 0:
        yield (
            ("trainer.gpus", "trainer.engine"),
            "{trainer.gpus} is 0, and {=trainer.engine} computes on CUDA devices alone: leave it "
            "out, or set {trainer.engine} megatron",
        )


def _find_absent_profiles(values: Values) -> Contradictions:
    trainer, steps = values["trainer"], values["steps"]
    last = max(trainer.profile_steps, default=0)
    if last > steps:
        yield (
            ("trainer.profile_steps", "steps"),
            f"{{trainer.profile_steps}} names step {last}, and the run has {steps}: choose earlier "
            "steps",
        )
    rank = max(trainer.profile_ranks or (), default=0)
    if rank >= trainer.rank_count:
        yield (
            ("trainer.profile_ranks", "trainer.ranks"),
            f"{{trainer.profile_ranks}} names rank {rank}, and the last of {trainer.rank_count} "
            f"trainers is rank {trainer.rank_count - 1}: choose lower ones",
        )


RULES: tuple[Rule, ...] = (
    OnlyWhen("trainer.pipeline_parallel", _LAYOUT, _NO_OPTION),
    OnlyWhen(
        "trainer.tensor_parallel",
        is_any("trainer.engine", "fsdp", "megatron", "verl-megatron"),
        _NO_OPTION,
    ),
    OnlyWhen(
        "trainer.virtual_pipeline trainer.expert_parallel trainer.sequence_parallel "
        "trainer.distributed_optimizer trainer.rollout_tensor_parallel",
        _MEGATRON,
        _NO_OPTION,
    ),
    OnlyWhen("trainer.context_parallel", _OWN_ENGINE, _NO_OPTION),
    Requires(
        _VERL_MEGATRON,
        is_any("model.dtype", "bfloat16"),
        "{=model.dtype} is no data type of veRL's Megatron engine",
        "set {model.dtype} bfloat16, or {trainer.engine} megatron",
    ),
    OnlyWhen(
        "trainer.virtual_pipeline",
        is_at_least("trainer.pipeline_parallel", 2),
        "there is no pipeline",
    ),
    OnlyWhen(
        "trainer.rollout_tensor_parallel",
        _COLOCATED,
        "it is for ranks that generate",
    ),
    OnlyWhen("trainer.cpu_offload trainer.packing", _FSDP, _NO_OPTION),
    Requires(
        is_at_least("trainer.context_parallel", 2),
        is_any("trainer.packing", False),
        "{trainer.packing} makes one row of all, and {trainer.context_parallel} ranks share each "
        "row as it is",
        "set {trainer.packing} false, or {trainer.context_parallel} 1",
    ),
    Computed(_find_unshared_layers),
    OnlyWhen(f"trainer.fused_loss trainer.colocated {_POLICY}", _OWN_ENGINE, _NO_OPTION),
    OnlyWhen(
        f"{_POLICY} {_CRITIC} {_REFERENCE}",
        is_any("trainer.cpu_offload", False),
        "{trainer.cpu_offload} keeps the models in the host's memory already",
    ),
    OnlyWhen(_CRITIC, is_any("algorithm.critic.use", True), "the run has no critic"),
    OnlyWhen(
        _REFERENCE,
        is_positive("algorithm.kl.coefficient")
        | is_set("algorithm.teacher.path")
        | is_set("rewards.reward_model"),
        "the run has no reference, teacher or reward model",
    ),
    Requires(
        is_any("trainer.engine", "verl"),
        ~is_any("trainer.schedule", "linear"),
        "{trainer.schedule} is linear, which veRL's engine does not have",
        "set it constant or cosine, or {trainer.engine} fsdp",
    ),
    Computed(_find_indivisible_ranks),
    Computed(_find_indivisible_rollouts),
    Requires(
        is_set("trainer.micro_batch_rows"),
        ~is_set("trainer.micro_batch_tokens"),
        "{trainer.micro_batch_rows} and {trainer.micro_batch_tokens} both divide a step's rows",
    ),
    Computed(_find_short_micro_batch),
    Computed(_find_shared_gpu),
    Computed(_find_absent_gpu),
    OnlyWhen("trainer.profile_ranks", is_set("trainer.profile_steps"), "no step is profiled"),
    Computed(_find_absent_profiles),
)
