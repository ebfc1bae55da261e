"""State of one rank alone in a Megatron checkpoint: its random generators.

They belong to a rank's place in the layout, so a checkpoint gives them back at its own layout only.
At another one, every rank keeps the states that it was seeded with. There may be fewer files than
ranks then, so a rank without a file asks the first rank's file for the layout.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from msgspec import structs

from ..random_states import random_states, set_random_states
from .checkpoint_errors import MissingCheckpointFile, UndecodableFile
from .checkpoint_reader import read_plain
from .layout import ParallelLayout


def rank_file(folder: Path, rank: int) -> Path:
    """Return the file of one rank's state."""
    return folder / f"rank_{rank}.pt"


def rank_state(device: torch.device, layout: ParallelLayout) -> dict[str, Any]:
    """Return the states of the rank's generators, and of megatron-core's tracker of CUDA's."""
    return {
        "layout": _encode_layout(layout),
        "random": random_states(device),
        "tracker": {name: _plain(state) for name, state in _tracker().get_states().items()},
    }


def restore_rank_state(folder: Path, device: torch.device, layout: ParallelLayout) -> None:
    """Set the generators as the checkpoint has them, if it is of this layout.

    Raises:
        MissingCheckpointFile: if a file of this layout is missing.
        UndecodableFile: if a file is no rank's state.
    """
    path = rank_file(folder, dist.get_rank())
    source = path if path.is_file() else rank_file(folder, 0)
    state = read_plain(source)
    if "layout" not in state:
        raise UndecodableFile(source, "it has no random states")
    if state["layout"] != _encode_layout(layout):
        return
    if not path.is_file():
        raise MissingCheckpointFile(path)
    set_random_states(state["random"], device)
    tracker = _tracker()
    states = tracker.get_states()
    for name, saved in state["tracker"].items():
        if isinstance(states.get(name), torch.Generator):
            states[name].set_state(saved)
        else:
            states[name] = saved
    # On a CPU the tracker keeps no states, see .cpu.seed_generators().
    if states:
        tracker.set_states(states)


def _encode_layout(layout: ParallelLayout) -> dict[str, Any]:
    return structs.asdict(layout) | {"ranks": dist.get_world_size()}


def _plain(state: Any) -> torch.Tensor:
    """Return a state as a tensor: for CUDA graphs the tracker holds generators."""
    tensor: torch.Tensor = state.get_state() if isinstance(state, torch.Generator) else state
    return tensor.detach().to("cpu", copy=True)


def _tracker() -> Any:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    return get_cuda_rng_tracker()
