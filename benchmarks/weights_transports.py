"""Weights through Ray and a collective group, and the memory of every transport."""

from __future__ import annotations

from importlib.util import find_spec
from typing import NamedTuple

from trinity_events.server import EmbeddedServer

from . import weights_collective, weights_memory, weights_ray
from .environment import Stage
from .measure import Findings, Noise, Row, say
from .report import PERFORMANCE
from .transport_peers import Turn
from .weights_peer import Model

TITLE = "weights through Ray and a collective group, and what all transports take in memory"
PLACE = PERFORMANCE
LEFT_OUT = "Ray was left out: at this size, or because it is not installed (make setup)."


class Size(NamedTuple):
    """Models, a flag for Ray, and the expected duration."""

    turns: tuple[Turn, ...]
    ray: bool
    takes: str


SMALL = Turn("64 MiB in 200 tensors", Model(200, 167_772), 5)
SIZES = {
    "tiny": Size((Turn("1 MiB in 20 tensors", Model(20, 26_214), 2),), False, "10 s"),
    "small": Size((SMALL,), True, "1 min"),
    "full": Size(
        (SMALL._replace(rounds=10), Turn("512 MiB in 200 tensors", Model(200, 1_342_177), 10)),
        True,
        "4 min",
    ),
}


def run(on: Stage, size: Size, noise: Noise) -> Findings:
    """Measure each model through each transport."""
    rows: list[Row] = []
    ray = size.ray and find_spec("ray") is not None
    for turn in size.turns:
        say(f"  {turn.name}: collective group")
        rows += weights_collective.measured(on, turn, noise)
        if ray:
            say(f"  {turn.name}: Ray")
            rows += weights_ray.measured(turn, noise)
    with EmbeddedServer(on.folder, "weights", durable=False).attached() as url:
        for turn in size.turns:
            rows += weights_memory.memory_rows(turn, url, ray=ray)
    notes = [
        "Tensors are bf16. Ratios are of speeds: above 1, ours is faster. Rounds: "
        + ", ".join(f"{turn.rounds} of {turn.name}" for turn in size.turns)
        + ".",
        *weights_collective.NOTES,
        *(weights_ray.NOTES if ray else [LEFT_OUT]),
        *weights_memory.NOTES,
    ]
    return Findings(rows, notes)
