"""Learning with FSDP, and with Megatron where ranks share tensors and sequences.

The same runs of `trinity-events train` on the same warmed policies, one at a time: a pair for each
seed. They sample nearly the same answers: the arithmetic of the trainers differs in the last bits.
"""

from __future__ import annotations

from functools import partial

from .learning.pairs import SIZES as USUAL
from .learning.pairs import Size, compare_ways
from .learning.plan import SEEDS, Settings
from .report import MEGATRON

TITLE = "Megatron at TP 2 x CP 2 with SP, and FSDP, in whole runs that learn"
PLACE = MEGATRON
WAYS: dict[str, Settings] = {
    "FSDP": {"trainer": {"ranks": 2}},
    "Megatron": {
        "trainer": {
            "engine": "megatron",
            "ranks": 4,
            "tensor_parallel": 2,
            "context_parallel": 2,
            "sequence_parallel": True,
        }
    },
}
# Four ranks on two cores are slow, and both ways sample nearly the same answers from the start.
SIZES = {**USUAL, "small": Size(SEEDS[:2], 20, 5, "6 min")}

run = partial(compare_ways, ways=WAYS)
