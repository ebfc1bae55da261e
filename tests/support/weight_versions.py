"""Publish weight versions and wait for them; tensors of every dtype and layout."""

import anyio
import torch

from tests.support.pipeline import announced
from tests.support.waits import PATIENCE
from trinity_events.weights.reading.model_folder import FILE_DTYPES
from trinity_events.weights.tensors import DTYPES
from trinity_schemas import StepReady


def publish(trainer, tensors, step, **options):
    trainer.open_version(step)
    trainer.publish(tensors.items(), step, **options)
    trainer.commit(step)


async def ready(log, step) -> StepReady:
    with anyio.fail_after(PATIENCE):
        while True:
            events = [event for event in await announced(log, 1) if isinstance(event, StepReady)]
            for event in events:
                if event.step == step:
                    return event
            await anyio.sleep(0.01)


def awkward() -> dict[str, torch.Tensor]:
    """Everything that tends to go wrong on the way."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"dtype.{name}": torch.randint(0, 256, (7, 16), generator=generator, dtype=torch.uint8)
        .view(dtype)
        .clone()
        for name, dtype in DTYPES.items()
        if dtype is not torch.bool and name in FILE_DTYPES.values()
    }
    tensors["dtype.bool"] = torch.tensor([True, False, True])
    tensors["scalar"] = torch.tensor(1.5, dtype=torch.bfloat16)
    tensors["empty"] = torch.empty(0, 3)
    tensors["transposed"] = torch.arange(12.0).reshape(3, 4).t()
    tensors["strided"] = torch.arange(100.0)[::7]
    tensors["odd"] = torch.arange(5, dtype=torch.uint8)
    tensors["after odd"] = torch.arange(3.0)
    return tensors
