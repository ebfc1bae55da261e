"""Histories that once went wrong, and must never again.

The first went wrong in the real code, the others with a planted bug in it. A plan that the
simulation prints when a seed fails belongs here.
"""

from __future__ import annotations

from tests.simulation.plan import Fault, Outage, Plan, Save, Worker

TWO_NODES = (Worker(node="north", pid=0), Worker(node="south", pid=1))
THREE = (*TWO_NODES, Worker(node="south", pid=2))

HISTORIES = (
    # A worker stands still for longer than its lease while it waits for its turn: it was taken
    # out of the queue, and waited for a turn that could not come.
    Plan(
        seed=613,
        strategy="single_thread",
        workers=THREE,
        saves=(
            Save(step=1, kind="state_dict", worker=2),
            Save(step=3, kind="state_dict", worker=0, seconds=1.0),
            Save(step=3, kind="state_dict", worker=1, seconds=5.0, ends="failed"),
        ),
        pause=0.0,
        faults=(Fault(what="stalled-after", who="worker-2", call=2, seconds=7.0),),
        slow=0.2,
    ),
    # A follower that begins with what stands is told that first, though it may be newer.
    Plan(
        seed=28,
        strategy="single_node",
        workers=(Worker(node="north", pid=0),),
        saves=(
            Save(step=1, kind="state_dict", worker=0, seconds=0.05),
            Save(step=2, kind="state_dict", worker=0, seconds=0.05),
        ),
        faults=(Fault(what="stalled", who="follower", call=2, seconds=4.0),),
        follower="current",
        slow=0.2,
    ),
    # The leader stands still with a death on its lips; its successor leads, the dead one lives.
    # Under some seeds the beats come again before the leader looks for them.
    *(
        Plan(
            seed=seed,
            workers=(Worker(node="north", pid=0),),
            saves=(Save(step=1, kind="checkpoint", worker=0, seconds=20.0),),
            faults=(
                Fault(what="stalled", who="worker-0", call=2, seconds=4.0, of="beat"),
                Fault(what="stalled", who="reducer-0", call=1, seconds=7.0, of="append_leading"),
            ),
        )
        for seed in (2, 3, 7)
    ),
    # The server is away for longer than a lease, and the first to lead afterwards is another.
    Plan(
        seed=1,
        strategy="single_process",
        workers=TWO_NODES,
        saves=(
            Save(step=1, kind="checkpoint", worker=0),
            Save(step=1, kind="checkpoint", worker=1),
        ),
        faults=(Fault(what="killed", who="reducer-0", call=14),),
        outages=(Outage(at=2.9, seconds=5.0),),
        slow=0.02,
    ),
    # A leader stands still with a commit on its way, and another leads.
    Plan(
        seed=16,
        strategy="single_thread",
        workers=(Worker(node="south", pid=0),),
        saves=(Save(step=2, kind="state_dict", worker=0, seconds=5.0),),
        faults=(Fault(what="stalled", who="reducer-0", call=1, seconds=7.0, of="commit"),),
    ),
    # The reply to a commit is lost.
    Plan(
        seed=151,
        strategy="single_thread",
        workers=(Worker(node="north", pid=0),),
        saves=(Save(step=1, kind="checkpoint", worker=0),),
        faults=(Fault(what="lost", who="reducer-0", call=3, of="commit"),),
    ),
    # The trainer dies and resumes, while workers of its first epoch still save.
    Plan(
        seed=35,
        workers=THREE,
        saves=(
            Save(step=1, kind="checkpoint", worker=0, seconds=1.0),
            Save(step=2, kind="checkpoint", worker=2),
        ),
        pause=1.5,
        faults=(Fault(what="killed", who="trainer", call=3, of="append"),),
        outages=(Outage(at=0.99, seconds=5.0),),
    ),
    # A worker dies in its turn, and another waits for it.
    Plan(
        seed=3,
        strategy="single_process",
        workers=TWO_NODES,
        saves=(
            Save(step=1, kind="state_dict", worker=1, seconds=5.0, ends="killed"),
            Save(step=2, kind="state_dict", worker=0),
        ),
    ),
    # A save fails in its turn, and another waits for it.
    Plan(
        seed=3,
        strategy="single_process",
        workers=TWO_NODES,
        saves=(
            Save(step=1, kind="state_dict", worker=1, ends="failed"),
            Save(step=1, kind="state_dict", worker=0),
        ),
    ),
    # The only member of a group dies before it has said that it is done.
    Plan(
        seed=57,
        workers=(Worker(node="south", pid=0),),
        saves=(Save(step=1, kind="weights", worker=0),),
        faults=(Fault(what="killed", who="member-0", call=1, of="ack"),),
        members=1,
    ),
)
