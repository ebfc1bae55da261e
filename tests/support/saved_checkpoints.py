"""Checkpoints of whole runs, as the log announces them and as their files hold them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from trinity_events.server import connect_sync
from trinity_schemas import RunKeys, StepReady, decode_envelope
from trinity_workers.engines.state_files import read_state

RAYS_OWN = (".random.python", ".random.numpy")
"""Random states of which Ray draws numbers of its own."""


def ready_checkpoints(redis_url: str, run_id: str) -> list[StepReady]:
    """Return the checkpoints that the run's log says are ready."""
    with connect_sync(redis_url) as client:
        entries = client.xrange(RunKeys.of(run_id).announcements)
    events = [decode_envelope(fields[b"e"]).event for _, fields in entries]
    return [
        event for event in events if isinstance(event, StepReady) and event.kind == "checkpoint"
    ]


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a shard file by their place, but for :data:`RAYS_OWN`."""
    tensors: dict[str, torch.Tensor] = {}

    def walk(place: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                walk(f"{place}.{key}", item)
        elif isinstance(value, tuple | list):
            walk(place, dict(enumerate(value)))
        elif isinstance(value, torch.Tensor):
            tensors[place] = value.to_local() if hasattr(value, "to_local") else value

    walk("", read_state(path))
    return {place: tensor for place, tensor in tensors.items() if not place.startswith(RAYS_OWN)}
