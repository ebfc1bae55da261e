"""What a simulated run is to do and to suffer: drawn from a seed, or written down."""

from __future__ import annotations

from random import Random
from typing import Any, NamedTuple

STRATEGIES = ("unrestricted", "single_thread", "single_process", "single_node")
FILES = ("state_dict", "checkpoint")


def as_python(plan: Any) -> str:
    """What makes it anew, in as few words as it takes."""
    defaults = plan._field_defaults
    fields = [
        f"{name}={value!r}"
        for name, value in plan._asdict().items()
        if name not in defaults or value != defaults[name]
    ]
    return f"{type(plan).__name__}({', '.join(fields)})"


class Worker(NamedTuple):
    """A process that saves."""

    node: str
    pid: int


class Save(NamedTuple):
    """One save that the trainer hands to a worker, and how it ends."""

    step: int
    kind: str
    worker: int
    seconds: float = 0.1
    ends: str = "finished"
    """Or ``failed``, or ``killed``: its process dies in the middle of it."""
    name: str = "model"

    def __repr__(self) -> str:
        return as_python(self)


class Fault(NamedTuple):
    """What befalls one process at its n-th call to the server; ``of``, at its n-th of that name.

    ``refused``: the connection fails before the server has done anything. ``lost``: it did, and
    the reply is lost. ``killed``, ``killed-after``: the process dies, before or after the server
    has done it. ``stalled``, ``stalled-after``: the process stands still for so many seconds.
    """

    what: str
    who: str
    call: int
    seconds: float = 0.0
    of: str = ""

    def __repr__(self) -> str:
        return as_python(self)


class Outage(NamedTuple):
    """The server is away for a while, and loses nothing."""

    at: float
    seconds: float


class Plan(NamedTuple):
    """A run. ``seed`` decides how long messages take, and nothing else."""

    seed: int
    strategy: str = "unrestricted"
    workers: tuple[Worker, ...] = ()
    saves: tuple[Save, ...] = ()
    pause: float = 0.5
    """Seconds between two steps."""
    faults: tuple[Fault, ...] = ()
    outages: tuple[Outage, ...] = ()
    members: int = 0
    """Of a consumer group."""
    group_idle: float = 86_400.0
    """Seconds after which the group is given up when no member asks for anything."""
    follower: str = ""
    """Where a follower begins: ``beginning`` or ``current``; none without."""
    slow: float = 0.0
    """Seconds that a message takes at most, where it takes long."""
    batch: int = 1000
    """Entries that the reducer reads at once."""
    snapshots: int = 5000
    """Entries between two of its snapshots."""
    registers_all: bool = True
    """Whether the trainer registers each save; or one for all ranks that make one of its name."""

    def __repr__(self) -> str:
        return as_python(self)


def draw(seed: int) -> Plan:
    """The plan of a seed."""
    rng = Random(seed)
    workers = tuple(
        Worker(rng.choice(("north", "south")), number) for number in range(rng.randint(1, 4))
    )
    saves = _saves(rng, len(workers))
    members = rng.choice((0, 1, 2, 3))
    return Plan(
        seed=seed,
        strategy=rng.choice(STRATEGIES),
        workers=workers,
        saves=saves,
        pause=rng.choice((0.0, 0.05, 0.5, 1.5)),
        faults=_faults(rng, len(workers), members),
        outages=_outages(rng),
        members=members,
        group_idle=rng.choice((86_400.0, 86_400.0, 3.0)),
        follower=rng.choice(("beginning", "current")),
        slow=rng.choice((0.0, 0.02, 0.2)),
        batch=rng.choice((1, 3, 1000)),
        snapshots=rng.choice((1, 7, 5000)),
        registers_all=rng.random() < 0.6,
    )


def _saves(rng: Random, workers: int) -> tuple[Save, ...]:
    saves = []
    for step in range(1, rng.randint(1, 4) + 1):
        for kind in rng.sample((*FILES, "weights"), rng.choice((1, 1, 2))):
            for worker in sorted(rng.sample(range(workers), rng.randint(1, workers))):
                ends = rng.choices(("finished", "failed", "killed"), (17, 2, 1))[0]
                seconds = rng.choice((0.0, 0.05, 0.3, 1.0, 5.0))
                name = rng.choice(("model", "model", "optimizer"))
                saves.append(Save(step, kind, worker, seconds, ends, name))
    return tuple(saves)


WHATS = ("refused", "lost", "lost", "killed", "killed-after", "stalled", "stalled-after")
CALLS = {
    "reducer": ("commit", "commit", "append_leading", "renew", "load", "heartbeat_ttls"),
    "trainer": ("open_epoch", "append"),
    "worker": ("append", "append", "beat", "granted"),
    "member": ("read_group", "ack", "claim"),
    "follower": ("read_blocking", "current_announcements"),
}


def _faults(rng: Random, workers: int, members: int) -> tuple[Fault, ...]:
    everyone = [
        *("reducer-0", "reducer-0", "reducer-1", "trainer", "follower"),
        *(f"worker-{number}" for number in range(workers)),
        *(f"member-{number}" for number in range(members)),
    ]
    faults = []
    for _ in range(rng.choice((0, 1, 1, 2, 3, 5))):
        who, what = rng.choice(everyone), rng.choice(WHATS)
        seconds = rng.choice((0.5, 2.0, 4.0, 7.0)) if what.startswith("stalled") else 0.0
        # Half of them at a call that matters, half anywhere.
        of = rng.choice((rng.choice(CALLS[who.partition("-")[0]]), ""))
        faults.append(Fault(what, who, rng.randint(1, 6 if of else 30), seconds, of))
    return tuple(faults)


def _outages(rng: Random) -> tuple[Outage, ...]:
    if rng.random() < 0.7:
        return ()
    return (Outage(round(rng.uniform(0.0, 4.0), 2), rng.choice((0.1, 1.0, 5.0))),)
