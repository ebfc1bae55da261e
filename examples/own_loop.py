"""Custom training loop: two ranks train, publish weights and save, and explorers follow.

torchrun --nproc-per-node 2 own_loop.py     trains
python own_loop.py RANK                     follows, as explorer RANK
"""

import os
import sys
from contextlib import closing
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from trinity_events import Synchronizer, TrainingLoop
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
                loop.save(step, model.state_dict())
        loop.wait_served(STEPS, EXPLORERS)


def follow(rank: int) -> None:
    """Run one explorer, which serves every version that it can get, for generation."""
    model = make_model()
    with closing(Synchronizer(RUN, 0, role="explorer", rank=rank)) as synchronizer:
        for version, took in synchronizer.follow(model, deadline=60):
            print(f"explorer {rank} serves step {version.step}: {took}", flush=True)
            if version.step == STEPS:
                break
        synchronizer.report(ExplorerStatusChanged(status="stopped"))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        follow(int(sys.argv[1]))
    else:
        train()
