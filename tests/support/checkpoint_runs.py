"""Runs with checkpoints on disk, and their removal."""

from tests.support.event_histories import History, committed, finished, registration
from trinity_events.checkpoints.manifest import mark_in_place
from trinity_events.core import plan_files
from trinity_events.log import MemoryEventLog
from trinity_events.reducer import CheckpointFiles, Policy, ReducerTimeouts
from trinity_events.reducer.checkpoint_retention import CheckpointRetention
from trinity_events.reducer.checkpoint_trash import CheckpointTrash

RUN = "history"


def staged(step, epoch=1, name="aaaa"):
    return f".staging/epoch_{epoch}_step_{step}_{name}"


class Run:
    """A run whose checkpoints are on disk, and who removes them."""

    def __init__(self, root, *, keep=2, staged_grace=0.0, **timeouts):
        self.folder = root / RUN
        self.log = MemoryEventLog(RUN)
        self.history = History()
        self.files = CheckpointFiles(root, RUN)
        timeouts = ReducerTimeouts(staged_grace=staged_grace, **timeouts)
        self.policy = Policy(keep_checkpoints=keep, timeouts=timeouts)

    def save(self, step, *, epoch=1, name="aaaa"):
        """A whole checkpoint, and its folder by its final name."""
        folder = self.folder / staged(step, epoch, name)
        folder.mkdir(parents=True)
        (folder / "model.pt").write_text(f"{epoch}.{step}")
        self.history.epoch = epoch
        self.history.add(committed(step, "checkpoint", registration("checkpoint")))
        path = f"{staged(step, epoch, name)}/model.pt"
        nbytes = len(f"{epoch}.{step}")
        save = finished(step, f"{epoch}-{step}", kind="checkpoint", path=path, nbytes=nbytes)
        self.history.add(save)
        self.files.reconcile(plan_files(self.state))

    def save_in_place(self, step, *, epoch=1, kind="checkpoint", name="model.pt"):
        """A whole save in the step's final folder, as its saver leaves it."""
        path = self.folder / f"global_step_{step}" / "actor" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{epoch}.{step}")
        mark_in_place(self.folder / f"global_step_{step}", epoch, step)
        self.history.epoch = epoch
        self.history.add(committed(step, kind, registration(kind)))
        relative = str(path.relative_to(self.folder))
        nbytes = path.stat().st_size
        save_id = f"{epoch}-{step}-{kind}"
        self.history.add(finished(step, save_id, kind=kind, path=relative, nbytes=nbytes))
        self.files.reconcile(plan_files(self.state))

    @property
    def state(self):
        return self.history.fold()[0].state

    async def removal(self):
        token, _ = await self.log.lead(60)
        trash = CheckpointTrash(self.files, token, self.policy.timeouts)
        return CheckpointRetention(self.log, trash, token, self.policy)

    async def clean_up(self):
        removal = await self.removal()
        await removal.clean_up(self.state)
        await self.log.renew(removal._token, 0)

    @property
    def steps(self):
        return sorted(int(path.name[12:]) for path in self.folder.glob("global_step_*"))

    @property
    def left_in_staging(self):
        return sorted(path.name for path in (self.folder / ".staging").iterdir())
