"""Custom training loop: two ranks train, publish weights and save, and explorers follow.

torchrun --nproc-per-node 2 own_loop.py     trains
python own_loop.py RANK                     follows, as explorer RANK
"""

import os
import sys
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from trinity_events import (
    CheckpointCoordinator,
    StepReady,
    Synchronizer,
    WeightsApplied,
    publishing,
    subscribe,
    training_run,
)
from trinity_events.coordinator import staged_path
from trinity_events.errors import VersionUnavailable
from trinity_schemas import ExplorerStatusChanged, StepRef

RUN, STEPS, SAVE_EVERY, EXPLORERS = "own-loop", 30, 10, 2
FOLDER = Path(os.environ["CHECKPOINT_ROOT"]) / RUN


def make_model() -> torch.nn.Module:
    """Return the model to train; any module works."""
    return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 8))


def from_rank_0(value: Any) -> Any:
    """Return rank 0's value on every rank."""
    told = [value]
    dist.broadcast_object_list(told)
    return told[0]


def train() -> None:
    """Run one rank of the trainer."""
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    with ExitStack() as exits:
        run = exits.enter_context(training_run(RUN)) if rank == 0 else None
        epoch = from_rank_0(run and run.epoch)
        actor = exits.enter_context(publishing(RUN, epoch, "actor", rank))
        saves = CheckpointCoordinator(actor, FOLDER)
        weights = Synchronizer(RUN, epoch, transport="shm")
        exits.enter_context(closing(weights))

        model = make_model()
        parallel = DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(1, STEPS + 1):
            loss = parallel(torch.randn(16, 64)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if rank == 0:
                weights.open_version(step)
                weights.publish(model.state_dict(), step)
                weights.commit(step, {"loss": loss.item()})
            if step % SAVE_EVERY == 0:
                path = Path(from_rank_0(staged_path(FOLDER, epoch, step))) / f"rank_{rank}.pt"
                path.parent.mkdir(parents=True, exist_ok=True)
                kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
                saves.save_async("model", partial(torch.save, kept, path), step, path=path)
                if rank == 0:
                    anyio.run(
                        partial(saves.register_and_monitor, step, checkpoint_thread_count=ranks)
                    )
        saves.wait_all()
        if rank == 0:
            weights.flush()
            anyio.run(until_served, StepRef(epoch, STEPS))
        dist.barrier()  # rank 0 closes the run after the other ranks' saves


async def until_served(version: StepRef) -> None:
    """Wait for every explorer: weights in shared memory are removed with their publisher."""
    missing = set(range(EXPLORERS))
    applied = subscribe(RUN, WeightsApplied, start="beginning", deadline=60)
    async with applied as events:
        async for event in events:
            if event.version == version:
                missing.discard(event.envelope.producer.rank)
            if not missing:
                break


async def follow(rank: int) -> None:
    """Run one explorer, which serves every version that it can get, for generation."""
    model = make_model()
    synchronizer = Synchronizer(RUN, 0, role="explorer", rank=rank)
    with closing(synchronizer):
        async with subscribe(RUN, StepReady, deadline=60, wait_for_run=True) as events:
            async for event in events:
                if event.kind != "weights":
                    continue
                try:
                    took = synchronizer.apply(model, event.event)
                except VersionUnavailable:
                    continue  # it was retired meanwhile; a newer one is announced
                print(f"explorer {rank} serves step {event.step}: {took}", flush=True)
                if event.step == STEPS:
                    break
        synchronizer.tell(ExplorerStatusChanged(status="stopped"))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        anyio.run(follow, int(sys.argv[1]))
    else:
        train()
