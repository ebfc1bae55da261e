"""vLLM in the processes of a trainer's ranks, which takes the policy's weights as it gathers them.

1. The ranks are vLLM's workers (its executor `external_launcher`). Consecutive ranks make one
   replica, and make the same calls in the same order.
2. The policy gathers a tensor at a time, and vLLM's loader takes its slice of it: no copy of the
   model lies between, in memory or on the way. A rank that fails takes all tensors to the end.
3. Nothing is generated before every parameter was loaded. A replica of one rank also compares what
   its kernels compute with to what it was given, as the engine `vllm` does.
4. Random states and threads of training are those that they were.

Between two generations vLLM sleeps where its platform can: its weights and its cache leave the GPU.
"""

from __future__ import annotations

import os
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from trinity_events.errors import NotAsPublished
from trinity_events.weights.applying.verify_model import make_proof
from trinity_events.weights.tensors import as_bytes, digest
from trinity_schemas import StepRef

from ...engines.random_states import random_states, set_random_states
from ...runtime.collectives import raise_together, rank_and_world
from ..base import EngineOptions, Generation, GenerationRequest, NotServing
from ..proof import ProofRecord
from ..replicas import Replica, generate_shared
from ..sampling import turn_key
from ..turns import OpenTurn, StopFinder
from .options import (
    VLLMUnusable,
    build_engine_args,
    build_sampling_params,
    prepare_environment,
    read_end_tokens,
    read_options,
)
from .reports import ExpertsNotUpdated
from .served import served_tensors

NAME = "vLLM"
_SEED_BITS = 2**62 - 1

NamedTensors = Callable[[], Iterable[tuple[str, Tensor]]]


class ColocatedVLLM:
    """vLLM on the ranks of a trainer. All ranks make the same calls.

    Args:
        options: Options of the engine; `proof` and the model's folder, dtype and device among them.
        tensors: Gathers the policy's full tensors, by Hugging Face name. Collective.
        tensor_parallel: Ranks that share every layer.
        group: All ranks.

    Raises:
        RolloutEngineError: vLLM does not start with these options.
    """

    def __init__(
        self,
        options: EngineOptions,
        tensors: NamedTensors,
        *,
        tensor_parallel: int = 1,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        from ...learning.policy import load_tokenizer

        self.serves: StepRef | None = None
        self._tensors = tensors
        self._device = torch.device(options.device)
        rank, world = rank_and_world(group)
        self._replica = Replica(
            group,
            rank // tensor_parallel,
            world // tensor_parallel,
            is_first=rank % tensor_parallel == 0,
        )
        self._looks_inside = options.proof.compares_tensors and tensor_parallel == 1
        self._proofs = ProofRecord()
        self._tokenizer = load_tokenizer(options.model_folder)
        self._end_tokens = read_end_tokens(options.model_folder, self._tokenizer)
        self._loads = 0
        with self._own_random_states(), _own_threads():
            self._engine, self._sleeps = _start(options, tensor_parallel)
        self._worker = self._engine.llm_engine.model_executor.driver_worker.worker
        self.context_length = int(self._engine.model_config.max_model_len)
        self._sleep()

    @contextmanager
    def serving(self, version: StepRef) -> Iterator[None]:
        """Serve the policy's weights of now as a version, for the block. Collective.

        Raises:
            NotAsPublished: vLLM does not compute with them.
            PeerFailed: on the ranks that did not fail themselves.
        """
        self._wake("weights")
        self._load(version)
        self._wake("kv_cache")
        self.serves = version
        try:
            yield
        finally:
            self.serves = None
            self._sleep()

    def generate_here(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """Generate one turn for each request, in order, in a block of :meth:`serving`. Collective.

        Raises as :func:`~..replicas.generate_shared`.
        """
        return generate_shared(requests, self._replica, self.context_length, self._generate)

    # --- weights ---------------------------------------------------------------------------

    def _wake(self, tag: str) -> None:
        if self._sleeps:
            self._engine.wake_up(tags=[tag])

    def _sleep(self) -> None:
        if self._sleeps:
            self._engine.sleep(level=2)  # weights are loaded again, from the policy

    def _load(self, version: StepRef) -> None:
        """Load what the policy gathers, and look into the model."""
        from vllm.config import set_current_vllm_config

        error: Exception | None = None
        given: Counter[str] = Counter()
        digests: dict[str, str] = {}
        tensors = self._noted(self._tensors(), given, digests)
        with set_current_vllm_config(self._worker.vllm_config):
            try:
                if self._device.type == "cpu" and self._worker.model_config.is_moe:
                    # As in the plug-in's workers (transfer.py): the load would answer well.
                    raise ExpertsNotUpdated()
                loaded = self._worker.weight_transfer_engine.reload(tensors)
                self._check(version, given, digests, loaded)
            except Exception as caught:
                error = caught
                for _ in tensors:  # other ranks gather on
                    pass
        # Ranks agree before one of them generates: a replica with half of a version answers
        # nothing.
        raise_together(error, self._replica.group)
        self._loads += 1

    def _noted(
        self,
        tensors: Iterable[tuple[str, Tensor]],
        given: Counter[str],
        digests: dict[str, str],
    ) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            given[name] += 1
            if self._looks_inside:
                digests[name] = _digest_values(tensor.to(self._worker.model_config.dtype))
            yield name, tensor

    def _check(
        self,
        version: StepRef,
        given: Counter[str],
        digests: dict[str, str],
        loaded: set[str] | None,
    ) -> None:
        from .transfer import find_unloaded  # it needs vLLM, which a rank has alone

        model = self._worker.get_model()
        twice = [name for name, count in given.items() if count > 1]
        unloaded = find_unloaded(model, loaded)
        differing, compared, unproven = [], set(), set()
        for served in served_tensors(model, digests) if self._looks_inside else ():
            if served.tensor is None or served.name not in digests:
                unproven.add(served.name)
            elif _digest_values(served.tensor) != digests[served.name]:
                differing.append(served.name)
            else:
                compared.add(served.name)
        faults: dict[Literal["not given", "not loaded", "not served"], list[str]] = {
            "not given": twice,
            "not loaded": unloaded,
            "not served": differing,
        }
        for fault, names in faults.items():
            if names:
                raise NotAsPublished(
                    step=version.step, engine=NAME, fault=fault, tensors=tuple(sorted(names))
                )
        # What was given and not compared leaves the version partly proven at most.
        unproven |= given.keys() - compared
        self._proofs.add(version, make_proof(len(compared - unproven), sorted(unproven), 0).status)

    # --- generation ------------------------------------------------------------------------

    def _generate(self, turns: Sequence[OpenTurn]) -> list[Generation]:
        version = self.serves
        if version is None:
            raise NotServing("generate in a block of serving()")
        if not turns:
            return []
        prompts = [
            # The prefixes of other weights are never hit.
            {"prompt_token_ids": turn.request.tokens, "cache_salt": str(self._loads)}
            for turn in turns
        ]
        params = []
        for turn in turns:
            request, sampling = turn.request, turn.request.sampling
            key = turn_key(sampling.seed, request.ordinal, request.sample, request.turn)
            params.append(
                # Not negative: to vLLM -1 is no seed (sampling_params.py).
                build_sampling_params(sampling, turn.limit, key & _SEED_BITS, self._end_tokens)
            )
        with self._own_random_states():
            outputs = self._engine.generate(prompts, params, use_tqdm=False)
        for turn, output in zip(turns, outputs, strict=True):
            (completion,) = output.outputs
            tokens = list(completion.token_ids)
            stopped = None
            if turn.request.sampling.stop:
                finder = StopFinder(self._tokenizer, [turn])
                for token in tokens:
                    if any(finder.add([token])):
                        break
                (stopped,) = finder.ends
            logprobs = [
                of_token[token].logprob
                for of_token, token in zip(completion.logprobs, tokens, strict=True)
            ]
            turn.extend(tokens, logprobs, [version] * len(tokens), self._end_tokens, stopped)
        return [turn.generation(self._proofs) for turn in turns]

    @contextmanager
    def _own_random_states(self) -> Iterator[None]:
        """Keep the random states of training: vLLM seeds the generators of the process."""
        before = random_states(self._device)
        try:
            yield
        finally:
            set_random_states(before, self._device)


def _start(options: EngineOptions, tensor_parallel: int) -> tuple[Any, bool]:
    """Return vLLM's LLM in this process, and True if it can sleep."""
    own = read_options(options.options)
    prepare_environment()
    rank, world = rank_and_world()
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # else the worker were no process of the trainer
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(torch.device(options.device).index or 0),
    }
    from vllm import LLM
    from vllm.platforms import current_platform

    sleeps = bool(current_platform.is_sleep_mode_available())
    args = build_engine_args(options, own)
    args.pop("enable_log_requests")  # of the asynchronous engine alone
    try:
        with _own_shared_memory(options):
            engine = LLM(
                **args,
                tensor_parallel_size=tensor_parallel,
                distributed_executor_backend="external_launcher",
                enable_sleep_mode=sleeps,
            )
    except (RuntimeError, TypeError, ValueError, NotImplementedError, AssertionError) as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise VLLMUnusable("start", reason) from error
    return engine, sleeps


@contextmanager
def _own_shared_memory(options: EngineOptions) -> Iterator[None]:
    """Give the shared memory of the build for CPUs a name of this engine's own. Collective.

    ``CPUWorker.init_device`` of vLLM 0.32 names it by what follows the last colon of the address at
    which workers meet. That of this executor is ``env://`` for all, so that two runs of a host, or
    one after another that was killed, would meet in one memory, or be refused (``errno: 17``).
    """
    if torch.device(options.device).type != "cpu":
        yield
        return
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    name = torch.tensor([secrets.randbits(62)])  # (1,) int64
    dist.broadcast(name, 0)
    get_arguments = ExecutorWithExternalLauncher._distributed_args

    def get_named_arguments(executor: Any) -> tuple[str, int, int]:
        method, rank, local_rank = get_arguments(executor)
        return f"{method}:{name.item():x}", rank, local_rank

    # The ranks have met already: nothing connects to the address.
    with mock.patch.object(ExecutorWithExternalLauncher, "_distributed_args", get_named_arguments):
        yield


@contextmanager
def _own_threads() -> Iterator[None]:
    """Keep torch's threads: the build for CPUs replaces the function that sets their number."""
    set_threads, threads = torch.set_num_threads, torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads = set_threads
        torch.set_num_threads(threads)


def _digest_values(tensor: Tensor) -> str:
    """Return a digest without signs of zeros and subnormal numbers, which products lose."""
    values = tensor.detach()
    if values.is_floating_point():
        tiny = torch.finfo(values.dtype).tiny
        values = torch.where(values.abs() < tiny, torch.zeros_like(values), values)
    return digest(as_bytes(values.contiguous()))
