"""Options of the engine `vllm`, and the arguments that vLLM's engine gets."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar, Literal

import msgspec
from msgspec import Struct

from trinity_schemas import Sampling

from ...learning.policy import end_tokens, load_tokenizer
from ..base import EngineOptions, EngineOptionsRefused, RolloutEngineError
from .plugin import BACKEND, OWNER

_EXTENSION = "trinity_workers.rollout_engines.vllm.transfer.WorkerExtension"
_OURS = frozenset(
    {
        *("model", "dtype", "seed", "skip_tokenizer_init", "logprobs_mode"),
        *("generation_config", "weight_transfer_config"),
    }
)
"""Arguments that follow from the run."""
_ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    # The policy's folder is local, and vLLM would ask the hub for each part that a model lacks.
    "HF_HUB_OFFLINE": "1",
}
"""Environment of vLLM's processes, where it says nothing else."""


class VLLMUnusable(RolloutEngineError):
    """vLLM cannot run as the run asks, or refuses a version.

    Attributes:
        fault: ``deterministic`` if that is asked for, ``start`` if it does not, ``install`` and
            ``fetch`` for a version, ``arguments`` for those that follow from the run.
        reason: First line of vLLM's error.
        step: Step of the version.
        arguments: Arguments of the engine that may not be set.
    """

    fault: Literal["deterministic", "start", "install", "fetch", "arguments"]
    reason: str = ""
    step: int = 0
    arguments: tuple[str, ...] = ()
    texts: ClassVar = {
        "deterministic": "vLLM computes with whatever requests arrive together, and cannot "
        "generate each prompt by itself: set explorer.deterministic false, or explorer.engine "
        "huggingface",
        "start": "vLLM does not start: {reason}",
        "install": "vLLM refuses step {step}: {reason}",
        "fetch": "a worker of vLLM cannot fetch step {step}: {reason}",
        "arguments": "explorer.engine_options.engine_args sets {_arguments}, which follows from "
        "the run: leave it out",
    }

    @property
    def _arguments(self) -> str:
        return ", ".join(self.arguments)


class VLLMOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the engine `vllm`."""

    engine_args: dict[str, Any] = msgspec.field(default_factory=dict)
    """Arguments of vLLM's engine, such as max_num_seqs or kv_cache_memory_bytes."""


def read_options(options: EngineOptions) -> VLLMOptions:
    """Return the engine's own options.

    Raises RolloutEngineError for others, and for arguments that follow from the run.
    """
    try:
        own = msgspec.convert(options.options, VLLMOptions)
    except msgspec.ValidationError as error:
        raise EngineOptionsRefused("vllm", str(error), VLLMOptions.__struct_fields__) from None
    determined = sorted(_OURS & own.engine_args.keys())
    if determined:
        raise VLLMUnusable("arguments", arguments=tuple(determined))
    return own


def build_engine_args(options: EngineOptions, own: VLLMOptions) -> dict[str, Any]:
    """Return the arguments of vLLM's engine."""
    from vllm.config import WeightTransferConfig
    from vllm.platforms import current_platform

    args: dict[str, Any] = {
        "enforce_eager": True,
        "disable_log_stats": True,
        "enable_log_requests": False,
        "worker_extension_cls": _EXTENSION,
    }
    if current_platform.is_cpu():
        # Attention on a CPU takes blocks of 32. A seeded request whose prompt is computed in two
        # parts ends the engine there: "CPU Generator does not use offset".
        args |= {"block_size": 32, "enable_chunked_prefill": False}
    return {
        **args,
        **own.engine_args,
        "model": str(options.model_folder),
        "dtype": options.dtype,
        "seed": options.seed,
        "skip_tokenizer_init": True,
        # Those of the distribution that a token was sampled from.
        "logprobs_mode": "processed_logprobs",
        # The folder's own defaults, such as a repetition penalty, are none of the run's.
        "generation_config": "vllm",
        "weight_transfer_config": WeightTransferConfig(backend=BACKEND),
    }


def prepare_environment() -> None:
    """Set what vLLM's processes read, before any is started."""
    import torch

    os.environ[OWNER] = str(os.getpid())
    # The explorer's share of the cores; OpenMP of a child reads it when it starts.
    for name, value in {**_ENVIRONMENT, "OMP_NUM_THREADS": str(torch.get_num_threads())}.items():
        os.environ.setdefault(name, value)


def build_sampling_params(
    sampling: Sampling, limit: int, seed: int, end_tokens: tuple[int, ...]
) -> Any:
    """Return vLLM's parameters of one turn; arguments as :func:`get_sampling_arguments`."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    arguments = get_sampling_arguments(sampling, limit, seed, end_tokens)
    return SamplingParams(**arguments, output_kind=RequestOutputKind.FINAL_ONLY)


def get_sampling_arguments(
    sampling: Sampling, limit: int, seed: int, end_tokens: tuple[int, ...]
) -> dict[str, Any]:
    """Return the arguments of vLLM's parameters of one turn, as JSON has them.

    Args:
        sampling: The request's settings.
        limit: Tokens that the turn may have.
        seed: Seed of the turn.
        end_tokens: Tokens that end an answer.
    """
    return {
        "max_tokens": limit,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "seed": seed,
        "logprobs": 0,
        # The end of sequence is one of them, and the answer keeps it.
        "stop_token_ids": list(end_tokens),
        "ignore_eos": True,
        "detokenize": False,
    }


def read_end_tokens(folder: Path) -> tuple[int, ...]:
    """Return the tokens that end an answer, without the model."""
    from transformers import AutoConfig, GenerationConfig

    factory: Any = GenerationConfig  # its methods have no annotations
    try:
        defaults = factory.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except OSError:  # without a file of them, those that a model makes of its configuration
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        defaults = factory.from_model_config(config)
    return tuple(sorted(end_tokens(defaults, load_tokenizer(folder))))
