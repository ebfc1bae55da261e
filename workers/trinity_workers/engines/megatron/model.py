"""Construction of a megatron-core GPTModel from a Hugging Face configuration."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from msgspec import Struct

from trinity_events.errors import TrinityError

from ...learning.value_head import head_tensors
from ..offload import FrozenOffload, Offload
from . import deepseek
from .cpu import adapted
from .deepseek import is_deepseek
from .layout import TIMEOUT, LayoutRefused, ParallelLayout, has_transformer_engine
from .local_layers import use_local_layers

MODEL_TYPES = ("deepseek_v3", "llama", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")

# The only values of Llama 3's frequency scaling that megatron-core supports.
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


class UnsupportedModel(TrinityError):
    """The Hugging Face configuration requires an unsupported feature.

    Attributes:
        model_type: Type of the model.
        supported: Types that are supported; empty if this one is.
        feature: Clause that names the feature; empty for the type itself.
    """

    model_type: str
    supported: tuple[str, ...] = ()
    feature: str = ""

    def __str__(self) -> str:
        if self.feature:
            return f"the model asks for {self.feature}, which the Megatron engine does not support"
        return (
            f"a Megatron model cannot be made of {self.model_type!r}: choose "
            f"{', '.join(self.supported)}"
        )


class ModelOptions(Struct, frozen=True, kw_only=True):
    """Options of a model beside its configuration and layout."""

    dtype: torch.dtype = torch.float32
    recompute: bool = False
    """If True, activations are recomputed in the backward pass instead of stored."""
    fused_loss: bool = False
    """If True, log-probabilities are computed chunk by chunk, without whole logits."""
    transformer_engine: bool | None = None
    """Use of Transformer Engine's fused layers; by default if it is installed with CUDA."""
    offload: Offload | FrozenOffload = Offload()
    """Parts that leave the device while no method of the engine needs them. A block of the engine's
    ``resident()`` keeps them over several calls."""
    timeout: timedelta = TIMEOUT
    """Maximum time that ranks wait for each other in the groups of the layout, which the first
    engine of a process makes."""

    @property
    def fused(self) -> bool:
        """Return True if the layers are Transformer Engine's."""
        if self.transformer_engine is not None:
            return self.transformer_engine
        return has_transformer_engine() and torch.cuda.is_available()


def padded_vocabulary(vocabulary: int, tensor_parallel: int) -> int:
    """Return the rows of the embedding, padded so that the shards of all ranks are equal."""
    return -(-vocabulary // tensor_parallel) * tensor_parallel


def transformer_config(hf: Any, layout: ParallelLayout, options: ModelOptions) -> Any:
    """Return megatron-core's TransformerConfig.

    Raises:
        UnsupportedModel: if megatron-core would build another model from the configuration.
        LayoutRefused: if heads, layers or experts cannot be divided by the layout.
    """
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    check_model(hf, layout)
    if is_deepseek(hf) and options.fused and hf.rms_norm_eps != deepseek.LATENT_EPSILON:
        # Transformer Engine's layers join a norm to the projection after it, with its epsilon.
        asks = f"an epsilon of {hf.rms_norm_eps} beside latents with Transformer Engine's layers"
        raise UnsupportedModel(hf.model_type, feature=asks)
    values: dict[str, Any] = {
        "num_layers": hf.num_hidden_layers,
        "hidden_size": hf.hidden_size,
        "ffn_hidden_size": hf.intermediate_size,
        "num_attention_heads": hf.num_attention_heads,
        "num_query_groups": hf.num_key_value_heads,
        "kv_channels": getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf.rms_norm_eps,
        "activation_func": torch.nn.functional.silu,
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "add_qkv_bias": hf.model_type == "qwen2" or bool(getattr(hf, "qkv_bias", False)),
        "qk_layernorm": hf.model_type.startswith("qwen3") or is_deepseek(hf),
        "attention_dropout": hf.attention_dropout,
        # The supported models have no dropout but that of attention.
        "hidden_dropout": 0.0,
        "params_dtype": options.dtype,
        "pipeline_dtype": options.dtype,
        "bf16": options.dtype is torch.bfloat16,
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "virtual_pipeline_model_parallel_size": layout.virtual,
        # A reward model without experts is whole on each rank that spreads the policy's.
        "expert_model_parallel_size": layout.expert if has_experts(hf) else 1,
        "context_parallel_size": layout.context,
        "sequence_parallel": layout.sequence_parallel,
        "batch_p2p_comm": False,
        # The initial weights are overwritten, so their values do not matter.
        "init_method": _unchanged,
        "output_layer_init_method": _unchanged,
        "embedding_init_method": _unchanged,
        # Its kernel is Apex's, which is no dependency.
        "gradient_accumulation_fusion": False,
    }
    if not torch.cuda.is_available():
        values |= {
            # Fusions are kernels of CUDA, and the others name its devices.
            "use_cpu_initialization": True,
            "persist_layer_norm": False,
            "masked_softmax_fusion": False,
            "bias_activation_fusion": False,
            "bias_dropout_fusion": False,
            "apply_rope_fusion": False,
        }
    if options.recompute:
        values |= {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            # Of each layer the input alone is stored.
            "recompute_num_layers": 1,
        }
    if has_experts(hf):
        values |= _expert_values(hf, options)
    kind = TransformerConfig
    if is_deepseek(hf):
        kind = MLATransformerConfig
        values |= deepseek.attention_values(hf) | deepseek.expert_values(hf)
    with adapted():
        return kind(**values)


def check_model(hf: Any, layout: ParallelLayout) -> None:
    """Check that a model can be built, and divided by the layout.

    Raises:
        UnsupportedModel: if megatron-core would build another model from the configuration.
        LayoutRefused: if heads, layers or experts cannot be divided by the layout.
    """
    _check_features(hf)
    _check_fit(hf, layout)


def build_chunks(hf: Any, config: Any, options: ModelOptions) -> list[Any]:
    """Build this rank's part of the model: one GPTModel per virtual pipeline stage, or only one."""
    from megatron.core import parallel_state as state

    virtual = config.virtual_pipeline_model_parallel_size
    stages: list[int | None] = [None] if virtual is None else list(range(virtual))
    with adapted():
        return [
            _build(
                hf,
                config,
                options,
                state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
                state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
                stage,
            )
            for stage in stages
        ]


def is_tied(hf: Any) -> bool:
    """Return True if the output layer is the embedding; a head of values never is."""
    return bool(hf.tie_word_embeddings) and not head_tensors(hf)


def build_rollout(hf: Any, config: Any, options: ModelOptions, groups: Any) -> Any:
    """Build a whole model that generates in a layout of its own, for evaluation.

    Args:
        hf: Hugging Face configuration.
        config: TransformerConfig of that layout, without a pipeline.
        options: Options of the model.
        groups: From :func:`.layout.rollout_groups`.
    """
    with adapted():
        model = _build(hf, config, options, first=True, last=True, stage=None, groups=groups)
    return model.requires_grad_(requires_grad=False).eval()


def has_experts(hf: Any) -> bool:
    """Return True if the configuration is of a mixture of experts."""
    return str(hf.model_type).endswith("_moe") or is_deepseek(hf)


def expert_count(hf: Any) -> int:
    """Return the number of experts per layer."""
    return int(getattr(hf, "num_local_experts", None) or hf.num_experts)


class _ValueHead(torch.nn.Linear):
    """Head of one output in the place of the output layer, whole on every rank; it begins at 0."""

    def __init__(self, width: int, *, bias: bool, sequence_parallel: bool) -> None:
        super().__init__(width, 1, bias=bias)
        self._sequence_parallel = sequence_parallel
        for parameter in self.parameters():
            torch.nn.init.zeros_(parameter)

    def forward(self, hidden: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

        if self._sequence_parallel:
            # Every rank computes the same of the whole, so that each takes its own gradient back.
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        return super().forward(hidden), None


def _build(
    hf: Any,
    config: Any,
    options: ModelOptions,
    first: bool,
    last: bool,
    stage: int | None,
    groups: Any = None,
) -> Any:
    from megatron.core import tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    if not options.fused:
        _mend_router()
    block = get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=options.fused,
        normalization="RMSNorm",
        vp_stage=stage,
        # Without it, megatron-core takes the stage of the training layout from its global groups.
        pp_rank=None if groups is None else groups.pp.rank(),
    )
    if not options.fused:
        use_local_layers(block)
    rope = hf.rope_parameters
    model = GPTModel(
        config=config,
        transformer_layer_spec=block,
        vocab_size=padded_vocabulary(hf.vocab_size, config.tensor_model_parallel_size),
        max_sequence_length=hf.max_position_embeddings,
        pre_process=first,
        post_process=last,
        share_embeddings_and_output_weights=is_tied(hf),
        position_embedding_type="rope",
        rotary_base=rope["rope_theta"],
        rope_scaling=rope["rope_type"] == "llama3",
        rope_scaling_factor=rope.get("factor", 8.0),
        seq_len_interpolation_factor=rope["factor"] if rope["rope_type"] == "linear" else None,
        vp_stage=stage,
        pg_collection=groups,
    )
    if last and (names := head_tensors(hf)):
        # Whole on every rank: one column cannot be divided over tensor-parallel ranks.
        model.output_layer = _ValueHead(
            hf.hidden_size,
            bias="score.bias" in names,
            sequence_parallel=config.sequence_parallel,
        )
    for parameter in model.parameters():
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        # torch's own layer norms are float32, whatever dtype megatron-core requests.
        parameter.data = parameter.data.to(options.dtype)
    if torch.cuda.is_available():
        model.cuda(torch.cuda.current_device())
    return model


def _expert_values(hf: Any, options: ModelOptions) -> dict[str, Any]:
    # Without Transformer Engine there is no grouped product, and its dispatcher requires streams.
    cuda = torch.cuda.is_available()
    return {
        "num_moe_experts": expert_count(hf),
        "moe_ffn_hidden_size": hf.moe_intermediate_size,
        "moe_shared_expert_intermediate_size": getattr(hf, "shared_expert_intermediate_size", None),
        "moe_shared_expert_gate": hf.model_type == "qwen2_moe",
        "moe_router_topk": hf.num_experts_per_tok,
        "moe_router_score_function": "softmax",
        # Hugging Face applies softmax to all experts, and then may normalise the chosen ones.
        "moe_router_pre_softmax": not hf.norm_topk_prob,
        # No balancing: in reinforcement learning the loss depends on the reward alone.
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_token_dispatcher_type": "alltoall" if cuda else "allgather",
        "moe_grouped_gemm": options.fused,
    }


def _check_features(hf: Any) -> None:
    if hf.model_type not in MODEL_TYPES:
        raise UnsupportedModel(hf.model_type, tuple(MODEL_TYPES))
    rope = getattr(hf, "rope_parameters", None) or {}
    kind = rope.get("rope_type")
    asks = None
    if hf.hidden_act != "silu":
        asks = f"the activation {hf.hidden_act!r}"
    elif getattr(hf, "attention_bias", False) or getattr(hf, "mlp_bias", False):
        asks = "biases in its linear layers"
    elif getattr(hf, "use_sliding_window", False):
        asks = "a sliding window"
    elif kind not in ({"default", "yarn"} if is_deepseek(hf) else {"default", "linear", "llama3"}):
        asks = f"the rotary embedding {kind!r}"
    elif kind == "llama3" and any(rope.get(name) != value for name, value in _LLAMA3.items()):
        asks = "other frequencies than Llama 3's"
    elif is_deepseek(hf):
        asks = deepseek.find_unsupported(hf)
    elif has_experts(hf) and (getattr(hf, "mlp_only_layers", None) or hf.decoder_sparse_step != 1):
        asks = "layers with and without experts"
    if asks:
        raise UnsupportedModel(hf.model_type, feature=asks)


def _check_fit(hf: Any, layout: ParallelLayout) -> None:
    stages = layout.pipeline * (layout.virtual or 1)
    latents = deepseek.latent_sizes(hf) if is_deepseek(hf) else ()
    for what, count, parts in (
        ("key-value heads", hf.num_key_value_heads, layout.tensor),
        *(("dimensions of latents", size, layout.tensor) for size in latents),
        ("columns of the feed-forward layers", hf.intermediate_size, layout.tensor),
        ("layers", hf.num_hidden_layers, stages),
        ("experts", expert_count(hf) if has_experts(hf) else layout.expert, layout.expert),
    ):
        if count % parts:
            raise LayoutRefused("parts", what=what, count=count, parts=parts)
    # Also without expert parallelism, of which ParallelLayout.check() knows.
    if has_experts(hf) and layout.tensor > 1 and not layout.sequence_parallel:
        raise LayoutRefused("mixture", tensor=layout.tensor)


def _unchanged(weight: torch.Tensor) -> torch.Tensor:
    return weight


def _count_nothing(*_: Any, **__: Any) -> None:
    return None


def _mend_router() -> None:
    # Without Transformer Engine, 0.16 does not define a name that it uses later.
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.moe.router import TopKRouter

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    # It counts tokens for updates of the bias, whose rate is 0 here, and torch.compile makes it,
    # which needs a compiler of C++ on a CPU.
    TopKRouter._apply_expert_bias = _count_nothing
