"""Options of the engine `vllm`, and the arguments that vLLM's engine gets."""

from __future__ import annotations

import ast
import logging
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import msgspec
from msgspec import Struct

from trinity_schemas import Sampling

from ...learning.policy import end_tokens
from ..base import EngineOptions, EngineOptionsRefused, RolloutEngineError
from .plugin import BACKEND, OWNER

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_EXTENSION = "trinity_workers.rollout_engines.vllm.transfer.WorkerExtension"
_OURS = frozenset(
    {
        *("model", "dtype", "seed", "skip_tokenizer_init", "logprobs_mode"),
        *("generation_config", "weight_transfer_config"),
    }
)
"""Arguments that follow from the run."""
_ARGUMENTS = {"EngineArgs", "AsyncEngineArgs"}
"""Classes of vLLM whose fields are the arguments of its engine."""
_ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    # The policy's folder is local, and vLLM would ask the hub for each part that a model lacks.
    "HF_HUB_OFFLINE": "1",
    # Else each binds its threads to all cores of its NUMA node but one, next to other explorers and
    # ranks, whatever OMP_NUM_THREADS says; and ranks have one node each (ompmultiprocessing.py).
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
"""Environment of vLLM's processes, where it says nothing else."""
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_MEMORY_SHARE = 0.9
"""Part of its GPU's memory that vLLM takes by default: gpu_memory_utilization."""


class VLLMUnusable(RolloutEngineError):
    """vLLM cannot run as the run asks, or refuses a version.

    Attributes:
        fault: ``deterministic`` if that is asked for, ``start`` if it does not, ``install`` and
            ``fetch`` for a version, ``arguments`` for those that follow from the run, ``device`` if
            the build of vLLM is for another one, ``ranks`` for more ranks than GPUs, ``unknown``
            for arguments that vLLM does not have.
        reason: First line of vLLM's error.
        step: Step of the version.
        arguments: Arguments of the engine that may not be set.
        nearest: Argument of the most similar name, if one is similar.
        device: Device on which the policy is to be served.
        ranks: Ranks of tensor and pipeline parallelism.
        gpus: GPUs that the explorer has.
    """

    fault: Literal[
        "deterministic", "start", "install", "fetch", "arguments", "unknown", "device", "ranks"
    ]
    reason: str = ""
    step: int = 0
    arguments: tuple[str, ...] = ()
    nearest: str = ""
    device: str = ""
    ranks: int = 0
    gpus: float = 0.0
    texts: ClassVar = {
        "deterministic": "vLLM computes with whatever requests arrive together, and cannot "
        "generate each prompt by itself: set explorer.deterministic false, or explorer.engine "
        "huggingface",
        "start": "vLLM does not start: {reason}",
        "install": "vLLM refuses step {step}: {reason}",
        "fetch": "a worker of vLLM cannot fetch step {step}: {reason}",
        "arguments": "explorer.engine_options.engine_args sets {_arguments}, which follows from "
        "the run: leave it out",
        "unknown": "explorer.engine_options.engine_args sets {_arguments}, which the vLLM that is "
        "installed here does not have: {_way_out}",
        "device": "vLLM is to serve the policy on {device}, and this build of it computes on "
        "{reason}: choose that as explorer.device, or install the other build",
        "ranks": "explorer.engine_options.engine_args asks for {ranks} ranks, and the explorer has "
        "{_gpus}: set explorer.gpus {ranks}",
    }

    @property
    def _gpus(self) -> str:
        return f"{self.gpus:g} GPUs" if self.gpus > 1 else "one GPU, or a part of it"

    @property
    def _way_out(self) -> str:
        if self.nearest:
            return f"is {self.nearest} meant?"
        return "leave it out, or see vLLM's AsyncEngineArgs"

    @property
    def _arguments(self) -> str:
        return ", ".join(self.arguments)


class VLLMOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the engine `vllm`."""

    engine_args: dict[str, Any] = msgspec.field(default_factory=dict)
    """Arguments of vLLM's engine, such as max_num_seqs or kv_cache_memory_bytes."""


def read_options(options: Mapping[str, Any]) -> VLLMOptions:
    """Return the engine's own options.

    Raises RolloutEngineError for others, for arguments that follow from the run, and for those that
    vLLM does not have.
    """
    try:
        own = msgspec.convert(options, VLLMOptions)
    except msgspec.ValidationError as error:
        raise EngineOptionsRefused("vllm", str(error), VLLMOptions.__struct_fields__) from None
    determined = sorted(_OURS & own.engine_args.keys())
    if determined:
        raise VLLMUnusable("arguments", arguments=tuple(determined))
    if own.engine_args:
        _check_arguments(own.engine_args)
    return own


def _check_arguments(engine_args: Mapping[str, Any]) -> None:
    arguments = find_engine_arguments()
    if not arguments:
        logger.warning(
            "vLLM is not found here, so that the names of explorer.engine_options.engine_args are "
            "not checked before an explorer starts"
        )
        return
    unknown = tuple(sorted(engine_args.keys() - arguments))
    if unknown:
        nearest = get_close_matches(unknown[0], sorted(arguments), 1)
        raise VLLMUnusable("unknown", arguments=unknown, nearest="".join(nearest))


def find_engine_arguments() -> frozenset[str]:
    """Return the names of the arguments of vLLM's engine, by its source; none without it.

    It is read and not imported, which takes ten seconds and loads plug-ins.
    """
    spec = find_spec("vllm")
    places = [] if spec is None else spec.submodule_search_locations or []
    for place in places:
        file = Path(place) / "engine" / "arg_utils.py"
        if file.is_file():
            return frozenset(
                statement.target.id
                for definition in ast.parse(file.read_text(encoding="utf-8")).body
                if isinstance(definition, ast.ClassDef) and definition.name in _ARGUMENTS
                for statement in definition.body
                if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
            )
    return frozenset()


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
    on_cpu = current_platform.is_cpu()
    if on_cpu != (options.device == "cpu"):
        raise VLLMUnusable("device", "the CPU" if on_cpu else "GPUs", device=options.device)
    if on_cpu:
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


def build_gpu_args(options: EngineOptions, own: VLLMOptions) -> dict[str, Any]:
    """Return arguments by which vLLM uses the explorer's GPUs, or its part of one.

    Those that the options have are left out. Raises VLLMUnusable for more ranks than GPUs.
    """
    if options.device == "cpu":
        return {}
    gpus, engine_args = options.gpus, own.engine_args
    parallel = ("tensor_parallel_size", "pipeline_parallel_size")
    # What the user sets comes before what the run would choose.
    given = [engine_args[name] for name in parallel if name in engine_args]
    if math.prod(given) > max(gpus, 1):
        raise VLLMUnusable("ranks", ranks=math.prod(given), gpus=gpus)
    if gpus >= 1:
        return {} if given else {"tensor_parallel_size": int(gpus)}
    if "gpu_memory_utilization" in engine_args:
        return {}
    return {"gpu_memory_utilization": round(_MEMORY_SHARE * gpus, 4)}


@contextmanager
def gpus_of(options: EngineOptions) -> Iterator[None]:
    """Let processes that are started in the block see the explorer's GPUs alone.

    vLLM takes the first GPUs that its processes see.
    """
    index = options.device.partition(":")[2]
    if not index:
        yield
        return
    import torch

    before = os.environ.get(_VISIBLE)
    visible = before.split(",") if before else [*map(str, range(torch.cuda.device_count()))]
    os.environ[_VISIBLE] = ",".join(visible[int(index) :][: math.ceil(options.gpus)])
    try:
        yield
    finally:
        del os.environ[_VISIBLE]
        if before is not None:
            os.environ[_VISIBLE] = before


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
    # Stop strings are looked for in each token that comes.
    kind = RequestOutputKind.CUMULATIVE if sampling.stop else RequestOutputKind.FINAL_ONLY
    return SamplingParams(**arguments, output_kind=kind)


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
        # That of the sampled token alone (sampling_params.py).
        "logprobs": 0,
        # The end of sequence is one of them, and the answer keeps it.
        "stop_token_ids": list(end_tokens),
        "ignore_eos": True,
        "detokenize": False,
    }


# vLLM samples at least one token; the log-probabilities of the prompt are what counts.
PROBE_ARGUMENTS = {
    "max_tokens": 1,
    "temperature": 0.0,
    "logprobs": 0,
    "prompt_logprobs": 0,
    "detokenize": False,
}
"""Arguments of vLLM's parameters of a probe, as JSON has them."""


def build_probe_params() -> Any:
    """Return vLLM's parameters of a probe: log-probabilities of the prompt, and one token."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(**PROBE_ARGUMENTS, output_kind=RequestOutputKind.FINAL_ONLY)


def read_end_tokens(folder: Path, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the tokens that end an answer, without the model."""
    from transformers import AutoConfig, GenerationConfig

    factory: Any = GenerationConfig  # its methods have no annotations
    try:
        defaults = factory.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except OSError:  # without a file of them, those that a model makes of its configuration
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        defaults = factory.from_model_config(config)
    return tuple(sorted(end_tokens(defaults, tokenizer)))
