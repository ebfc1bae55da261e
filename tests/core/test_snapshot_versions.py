"""Snapshots of other versions are folded anew, and the names of the state stay on the wire."""

import msgspec
import pytest

from tests.support.errors import raises
from trinity_events.core import MonitorState, decode_state, encode_state
from trinity_events.core.state import SNAPSHOT_VERSION, DeltaBases, SnapshotVersion
from trinity_events.log import ORIGIN, Commit, MemoryEventLog, opening_envelope
from trinity_events.replay import load_monitor
from trinity_schemas import RunOpened, StepRef

# A field of the first layout, under a name that the state no longer has.
UNVERSIONED = msgspec.msgpack.encode({"run_id": "run", "position": "5-0", "whole_steps": [1]})


@pytest.mark.parametrize(
    "snapshot",
    [
        UNVERSIONED,
        msgspec.msgpack.encode((SNAPSHOT_VERSION + 1, {"run_id": "run"})),
        msgspec.msgpack.encode((SNAPSHOT_VERSION + 1, ["another layout"])),
    ],
)
def test_a_snapshot_of_another_version_is_refused(snapshot):
    with raises(SnapshotVersion, expected=SNAPSHOT_VERSION):
        decode_state(snapshot)


@pytest.mark.parametrize("snapshot", [b"", b"\x01", b"forged", msgspec.msgpack.encode({"a": 1})])
def test_what_is_no_snapshot_is_refused_as_such(snapshot):
    with pytest.raises(msgspec.DecodeError) as refused:
        decode_state(snapshot)
    assert not isinstance(refused.value, SnapshotVersion)


async def test_a_snapshot_of_another_version_is_folded_anew_from_the_log():
    log = MemoryEventLog("run")
    await log.open_epoch(opening_envelope("run", RunOpened()))
    token, _ = await log.lead(60)
    end = await log.last_id()
    stale = msgspec.msgpack.encode((SNAPSHOT_VERSION - 1, MonitorState(run_id="run", position=end)))
    assert await log.commit(Commit(token=token, after=ORIGIN, position=end, snapshot=stale))

    loaded = await load_monitor(log)

    assert loaded.monitor.state.epoch == 1  # the snapshot has none
    assert loaded.monitor.state.position == end


def test_renamed_fields_of_the_state_keep_their_names_on_the_wire():
    state = MonitorState(
        run_id="run",
        complete_checkpoints=[1, 2],
        pending_promotions={"epoch-1/step-2": 2},
        delta_bases=[DeltaBases(version=StepRef(1, 2), bases=(StepRef(1, 1),))],
    )
    shown = msgspec.to_builtins(state, str_keys=True)
    assert (shown["whole"], shown["carried"]) == ([1, 2], {"epoch-1/step-2": 2})
    assert len(shown["resting"]) == 1
    assert decode_state(encode_state(state)) == state
