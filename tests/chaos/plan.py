"""What the small training run of the chaos tests consists of; its processes agree on it by this."""

from __future__ import annotations

from pathlib import Path

from trinity_schemas import Kind

RUN = "chaos"
STEPS = 4
WORKERS = 2
STRATEGY = "single_process"
"""So that every save asks for its turn and is granted it."""
LEASE = 1.0
"""Seconds of silence after which a worker is taken for dead."""
TURN_DEADLINE = 2.0
"""After which a worker asks again, or finds out that its epoch is over."""
PATIENCE = 60.0
"""Maximum seconds of a wait. A run takes four on a quiet machine, and forty on a busy one."""
FAILS_ONCE = (2, "checkpoint", 1)
"""Step, kind and rank of a save whose first attempt finds the disk full."""


def kinds_of(step: int) -> tuple[Kind, ...]:
    """What is saved of a step: a whole checkpoint of every second one."""
    whole: tuple[Kind, ...] = ("checkpoint",) if step % 2 == 0 else ()
    return ("weights", "state_dict", *whole)


def content(step: int, kind: str, rank: int) -> bytes:
    """The bytes of a save."""
    return f"{kind} of step {step} by rank {rank}\n".encode() * 8


def file_of(kind: str, rank: int) -> Path:
    """Where a save is, below the step's folder."""
    return Path("actor") / f"{kind}_rank_{rank}.bin"


class Place:
    """The folders of one run of the pipeline."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root = folder / "checkpoints"
        self.run_folder = self.root / RUN
        self.orders = folder / "orders"
        """What the trainer tells its workers to save: EPOCH-STEP, holding the staged folder."""
        self.done = folder / "done"
        """What a worker has done: EPOCH-STEP-RANK."""

    def make(self) -> None:
        """Make the folders."""
        for folder in (self.root, self.orders, self.done):
            folder.mkdir(parents=True)

    def given(self, epoch: int | None = None) -> list[Path]:
        """The orders that were given, of one epoch or of all, oldest first."""
        return sorted(self.orders.glob("[0-9]*" if epoch is None else f"{epoch:03}-*"))

    def heard(self, who: str) -> Path:
        """What a consumer got, a line each."""
        return self.folder / f"{who}.heard"


def write(path: Path, data: bytes) -> None:
    """Write a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{id(data)}")
    temporary.write_bytes(data)
    temporary.replace(path)
