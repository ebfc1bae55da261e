"""Custom training loop: two ranks train, publish weights and save, and explorers follow.

torchrun --nproc-per-node 2 own_loop.py     trains
python own_loop.py RANK                     follows, as explorer RANK
"""

import os
import sys
from contextlib import closing
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from trinity_events import StepReady, Synchronizer, TrainingLoop, blocking
from trinity_events.errors import VersionUnavailable
from trinity_schemas import ExplorerStatusChanged

RUN, STEPS, SAVE_EVERY, EXPLORERS = "own-loop", 30, 10, 2
ROOT = Path(os.environ["CHECKPOINT_ROOT"])


def make_model() -> torch.nn.Module:
    """Return the model to train; any module works."""
    return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 8))


def train() -> None:
    """Run one rank of the trainer."""
    dist.init_process_group("gloo")
    model = make_model()
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    with TrainingLoop(RUN, ROOT, transport="shm") as loop:
        for step in range(1, STEPS + 1):
            loss = parallel(torch.randn(16, 64)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loop.publish(step, model.state_dict(), {"loss": loss.item()})
            if step % SAVE_EVERY == 0:
                path = loop.staged_folder(step) / f"rank_{loop.rank}.pt"
                kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
                loop.saves.save_async("model", partial(torch.save, kept, path), step, path=path)
                loop.commit_checkpoint(step)
        loop.wait_served(STEPS, EXPLORERS)


def follow(rank: int) -> None:
    """Run one explorer, which serves every version that it can get, for generation."""
    model = make_model()
    synchronizer = Synchronizer(RUN, 0, role="explorer", rank=rank)
    announced = blocking.subscribe(RUN, StepReady, deadline=60, wait_for_run=True)
    with closing(synchronizer), announced as events:
        for event in events:
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
        follow(int(sys.argv[1]))
    else:
        train()
