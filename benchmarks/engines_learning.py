"""Learning and step time with explorers of vLLM and of Hugging Face's generate.

The same runs of `trinity-events train` on the same warmed policies, one at a time: a pair for each
seed. The policy is one that vLLM's attention takes on a CPU.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from .engines import missing as missing  # noqa: PLC0414 - read by the command
from .learning.pairs import SIZES as SIZES  # noqa: PLC0414 - read by the command
from .learning.pairs import compare_ways
from .report import ENGINES

TITLE = "vLLM and Hugging Face's generate, in whole runs that learn"
PLACE = ENGINES
POLICY = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
"""Shape of the policy: heads of 64, since vLLM's attention on a CPU takes no smaller ones."""
ENGINE_ARGS = {"max_num_seqs": 256, "kv_cache_memory_bytes": 1 << 28}
EXPLORERS: dict[str, dict[str, Any]] = {
    "huggingface": {"explorer": {"engine": "huggingface"}},
    "vllm": {"explorer": {"engine": "vllm", "engine_options": {"engine_args": ENGINE_ARGS}}},
}

run = partial(compare_ways, ways=EXPLORERS, shape=POLICY)
