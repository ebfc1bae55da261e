"""Adaptations that megatron-core 0.16 needs on a CPU; with CUDA nothing is changed.

megatron-core names CUDA in places that a CPU build of torch cannot follow: literal devices, the
current device, ``tensor.cuda()``, names in ``tensor.type()``, generator states. An adaptation is in
force only in a block of the calling thread: other threads' calls reach what torch has, also of the
functions that are replaced in its modules.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from threading import local
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class _Blocks(local):
    """Number of nested blocks of :func:`adapted` in the calling thread."""

    count = 0


_blocks = _Blocks()


class _CudaMeansCpu(TorchFunctionMode):
    """Torch function mode that replaces CUDA devices by the CPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        # megatron-core compares this name with literal ones, such as "torch.cuda.FloatTensor".
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # Blocks nest: an outer one has answered already.
            return "torch.cuda." + func(*args).removeprefix("torch.").removeprefix("cuda.")
        # Pinning asks for CUDA; the rotary positions of context parallelism are pinned.
        kwargs.pop("pin_memory", None)
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = torch.device("cpu")
        return func(*args, **kwargs)


@contextmanager
def adapted() -> Iterator[None]:
    """Adapt torch so that megatron-core runs in the block."""
    if torch.cuda.is_available():
        yield
        return
    _replace_functions()
    _blocks.count += 1
    try:
        with _CudaMeansCpu():
            yield
    finally:
        _blocks.count -= 1


@cache
def _replace_functions() -> None:
    """Replace functions of modules once, for the calls in blocks of :func:`adapted`.

    Replacing them for each block would let a block of one thread end those of another.
    """
    from megatron.core.tensor_parallel import random as megatron_random

    for module, name, instead in (
        (torch.cuda, "current_device", lambda: torch.device("cpu")),
        (torch.cuda, "synchronize", _nothing),
        (megatron_random, "_get_cuda_rng_state", lambda *_, **__: torch.empty(0)),
        (megatron_random, "_set_cuda_rng_state", _nothing),
    ):
        setattr(module, name, _in_blocks(instead, getattr(module, name)))
    recompute = megatron_random.CheckpointFunction.backward

    def recompute_adapted(*args: Any) -> Any:
        with _CudaMeansCpu():  # torch disables modes in the backward pass
            return recompute(*args)

    megatron_random.CheckpointFunction.backward = staticmethod(
        _in_blocks(recompute_adapted, recompute)
    )


def _in_blocks(instead: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that is another one in the calling thread's blocks."""

    @wraps(original)
    def call(*args: Any, **keywords: Any) -> Any:
        return (instead if _blocks.count else original)(*args, **keywords)

    return call


def seed_generators(seed: int) -> None:
    """Seed the generators of dropout and initialisation. On a CPU all ranks draw alike."""
    from megatron.core import tensor_parallel
    from megatron.core.tensor_parallel.random import initialize_rng_tracker

    if torch.cuda.is_available():
        tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
        return
    # The tracker for inference keeps no CUDA state: its fork is an empty block.
    initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    torch.manual_seed(seed)
    random.seed(seed)


def _nothing(*_: Any, **__: Any) -> None:
    return None
