"""Steps of TransferQueue on the work of :mod:`.rollouts`: the same samples, writers and readers.

Usage: python -m benchmarks.transfer_queue_peer PROMPTS SAMPLES TOKENS STEPS; it prints the seconds
of each step as JSON. It needs ``pip install TransferQueue==0.1.11``. Two actors of Ray put the ids
and log-probabilities of prompts, four at a time; two other actors get those of their share and pad
them to a batch, and the keys are cleared. Its controller and storage are those of its default
configuration.
"""

from __future__ import annotations

import importlib
import json
import logging
import sys
import time
from typing import Any

_AT_ONCE = 4
"""Prompts in one put, as explorers claim them."""
_ACTORS = 2
_WARM_UP = 3
_PARTITION = "train"
_FIRST = 100_000


class Writer:
    """Explorer whose samples are ready."""

    def __init__(self, samples: int, tokens: int) -> None:
        import torch

        self._queue = open_queue()
        self._samples = samples
        self._ids = torch.arange(_FIRST, _FIRST + tokens, dtype=torch.int32)  # (tokens,)
        self._logprobs = torch.full((tokens,), -0.125)  # (tokens,)

    def put(self, step: int, prompts: list[int]) -> int:
        """Put the samples of prompts; return their number."""
        import torch
        from tensordict import TensorDict

        for begin in range(0, len(prompts), _AT_ONCE):
            keys = keys_of(step, prompts[begin : begin + _AT_ONCE], self._samples)
            columns = {"ids": self._ids, "logprobs": self._logprobs}
            fields = TensorDict(
                {
                    name: torch.nested.as_nested_tensor([column] * len(keys), layout=torch.jagged)
                    for name, column in columns.items()
                },
                batch_size=len(keys),
            )
            tags = [{"reward": 1.0, "step": step} for _ in keys]
            self._queue.kv_batch_put(keys, _PARTITION, fields, tags)
        return len(prompts) * self._samples


class Reader:
    """Rank that makes a batch of its share."""

    def __init__(self) -> None:
        self._queue = open_queue()

    def get(self, keys: list[str]) -> int:
        """Get samples as a padded batch; return its tokens."""
        import torch

        fields: Any = self._queue.kv_batch_get(keys, _PARTITION, ["ids", "logprobs"])
        ids = torch.nested.to_padded_tensor(fields["ids"], 0).long()  # (samples, tokens)
        logprobs = torch.nested.to_padded_tensor(fields["logprobs"], 0.0)  # (samples, tokens)
        mask = torch.ones_like(ids)
        positions = mask.cumsum(dim=-1) - 1
        assert logprobs.shape == positions.shape
        return int(mask.sum())


def open_queue() -> Any:
    """Connect this process to the queue, which the first one starts; return its module."""
    # By name: it is no dependency of this project, so that types of it are unknown.
    queue: Any = importlib.import_module("transfer_queue")
    queue.init()
    return queue


def keys_of(step: int, prompts: list[int], samples: int) -> list[str]:
    """Return the keys of the samples of prompts."""
    return [f"{step}_{prompt}_{sample}" for prompt in prompts for sample in range(samples)]


def measure(prompts: int, samples: int, tokens: int, count: int) -> list[float]:
    """Return the seconds of steps."""
    import ray

    # Its controller and each of its stores reserve a processor, which small machines lack.
    ray.init(num_cpus=16, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    queue = open_queue()
    remote: Any = ray.remote(num_cpus=0)
    writer, reader = remote(Writer), remote(Reader)
    writers = [writer.remote(samples, tokens) for _ in range(_ACTORS)]
    readers = [reader.remote() for _ in range(_ACTORS)]
    seconds = []
    shares = [list(range(prompts))[share::_ACTORS] for share in range(_ACTORS)]
    for step in range(_WARM_UP + count):
        began = time.perf_counter()
        ray.get([each.put.remote(step, share) for each, share in zip(writers, shares, strict=True)])
        keys = [keys_of(step, share, samples) for share in shares]
        read = ray.get([each.get.remote(share) for each, share in zip(readers, keys, strict=True)])
        queue.kv_clear([key for share in keys for key in share], _PARTITION)
        ended = time.perf_counter()
        assert sum(read) == prompts * samples * tokens
        if step >= _WARM_UP:
            seconds.append(ended - began)
    queue.close()
    ray.shutdown()
    return seconds


if __name__ == "__main__":
    print(json.dumps(measure(*map(int, sys.argv[1:5]))))
