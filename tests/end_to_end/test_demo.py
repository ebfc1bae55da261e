"""The main job, short but whole: every part a real process."""

import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from subprocess import DEVNULL, PIPE

import pytest
import torch
import torch.distributed.tensor  # to load sharded tensors

from tests.support.run_processes import count_outcomes, small_run
from tests.support.waits import PATIENCE, child, wait_until
from trinity_events.server import connect_sync
from trinity_events.system.shared_memory import users_folder
from trinity_workers.config.files import read_config
from trinity_workers.config.sections.sync import SyncConfig
from trinity_workers.config.train_config import TrainConfig
from trinity_workers.launch.ray_reaper import processes_of
from trinity_workers.launch.transport import chosen_transport

pytestmark = [pytest.mark.processes, pytest.mark.heavy]

STEPS = 12


def demo(*args: str, **options):
    """A demo in the block; killed, should it still run, when that is left."""
    command = [sys.executable, "-m", "trinity_events", "demo", "--json", *args]
    return child(command, stdout=PIPE, stderr=PIPE, text=True, **options)


def children(text: str) -> list[int]:
    """Processes whose command line holds the text."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes()
        except OSError:
            continue
        if text.encode() in command:
            pids.append(int(path.parent.name))
    return pids


@pytest.fixture(scope="module")
def finished(home, redis_url, weights_url):
    """A demo in whose middle the reducer was killed, and its summary."""
    run_id = f"short-demo-{os.getpid()}"
    running = demo(
        *("--run", run_id, "--steps", str(STEPS), "--save-interval", "6", "--explorers", "2"),
        *("--save-strategy", "single_thread"),
        # So small that most updates are lost in rounding, as those of bf16 are in practice.
        *("--learning-rate", "1e-10", "--weights-full-every", "4"),
        *("--proof", "served"),
    )
    with connect_sync(redis_url) as client, running as process:
        wait_until(lambda: count_outcomes(client, run_id) > 3 or process.poll() is not None)
        # A demo is short: hold the reducer up first, so that it is killed with work to do.
        [reducer] = children(f"reducer\0--lifeline\0--verbose\0--run\0{run_id}\0")
        os.kill(reducer, signal.SIGKILL)
        out, error = process.communicate(timeout=3 * PATIENCE)
    assert process.returncode == 0, error
    return run_id, json.loads(out)


def test_every_version_was_applied_or_superseded_before_it_was_pulled(finished):
    _, summary = finished
    log = summary["log"]
    assert log["steps"] == STEPS
    assert log["versions_published"] == STEPS + 1
    assert log["versions_unaccounted"] == 0
    assert log["versions_applied"] + log["versions_superseded_unpulled"] == STEPS + 1
    assert log["failures"] == 0


def test_the_seconds_of_every_process_are_counted_or_it_is_named(finished, cli):
    run_id, _ = finished
    goodput = json.loads(cli("goodput", run_id, "--json").stdout)
    seconds = {worker["process"]: worker["seconds"] for worker in goodput["workers"]}
    ranks = {f"{role}-{rank}" for role in ("actor", "writer", "explorer") for rank in (0, 1)}
    servers = {"log-server-0", "chunk-server-0"}
    # The reducer that was killed had a successor, which waited for its lease.
    assert {"trainer-0", "reducer-0", *ranks, *servers} == seconds.keys() - {"standby-0"}
    for server in servers:
        assert set(seconds[server]) <= {"starting", "serving"}
        # They serve before the run is opened, and until its end, but for the way of a report.
        assert (
            0.95 * goodput["elapsed"]
            < sum(seconds[server].values())
            < goodput["elapsed"] + PATIENCE
        )
    assert goodput["unmeasured"] == ["the launcher", "the processes of Ray"]


def test_weights_went_by_the_best_transport_and_the_summary_and_the_log_say_so(finished, cli):
    run_id, summary = finished
    best, why = chosen_transport(SyncConfig(), explorers_here=True)
    lines = map(json.loads, cli("tail", run_id, "-n", "100000", "--json").stdout.splitlines())
    events = [line["event"] for line in lines]
    weight_events = [event for event in events if event["type"] == "version-opened"]
    weight_events += [
        event for event in events if event["type"] == "step-ready" and event["kind"] == "weights"
    ]
    assert {event["transport"] for event in weight_events} == {summary["transport"]} == {best}
    [opened] = [event for event in events if event["type"] == "run-opened"]
    assert opened["transport"] == {"name": best, "reason": why}
    shown = " ".join(cli("status", run_id, env={"COLUMNS": "200"}).stdout.split())
    assert f"weights travel by {best}: {why}" in shown
    assert not list(users_folder().glob(f"*/{run_id}~*")), "nothing is left in shared memory"


def test_between_full_versions_only_what_changed_travelled_and_the_log_says_so(finished, cli):
    run_id, summary = finished
    log = summary["log"]
    lines = map(json.loads, cli("tail", run_id, "-n", "100000", "--json").stdout.splitlines())
    events = [line["event"] for line in lines]
    parts = [event for event in events if event["type"] == "version-part-published"]
    deltas = [part for part in parts if "delta" in part]
    assert 0 < log["versions_delta"] == len({delta["step"] for delta in deltas})
    assert {delta["rank"] for delta in deltas} == {0, 1}, (
        "each rank sends of its shards what changed"
    )
    assert all(delta["delta"]["delta"] + delta["delta"]["skip"] for delta in deltas)
    assert log["bytes_published"] == sum(part["bytes"] for part in parts)
    assert (
        log["bytes_saved"] == sum(delta["delta"]["whole"] - delta["bytes"] for delta in deltas) > 0
    )
    full = sum(part["bytes"] for part in parts if part["step"] == 0)
    applied = [event["bytes"] for event in events if event["type"] == "weights-applied"]
    assert min(applied) < full, "a delta was laid over what an explorer had"


def test_the_reducer_was_killed_and_no_step_was_lost_or_announced_twice(finished, cli):
    run_id, summary = finished
    assert summary["reducer_restarts"] == 1
    lines = cli("tail", run_id, "-n", "100000", "--json").stdout.splitlines()
    ready = [
        (line["event"]["kind"], line["event"]["step"])
        for line in map(json.loads, lines)
        if line["event"]["type"] == "step-ready"
    ]
    expected = [("weights", step) for step in range(STEPS + 1)]
    expected += [(kind, step) for step in (6, 12) for kind in ("state_dict", "checkpoint")]
    assert sorted(ready) == sorted(expected)


def test_every_save_was_made_in_its_turn_one_at_a_time(finished, cli):
    run_id, _ = finished
    lines = cli("tail", run_id, "-n", "100000", "--json").stdout.splitlines()
    events = [json.loads(line)["event"] for line in lines]
    kinds = ("save-requested", "save-granted", "save-started", "save-finished")
    save_ids = {
        kind: [event["save_id"] for event in events if event["type"] == kind] for kind in kinds
    }
    # At two steps, two ranks make two saves each, and the trainer saves its own state.
    assert len(save_ids["save-granted"]) == 10
    assert save_ids["save-requested"] == save_ids["save-granted"] == save_ids["save-finished"]
    state = json.loads(cli("status", run_id, "--json").stdout)
    assert "out-of-turn" not in state.get("anomaly_counts", {})


def test_a_replay_of_the_finished_run_gives_the_state_that_status_shows(finished, cli):
    run_id, _ = finished
    replayed = cli("replay", run_id, "--json")
    assert json.loads(replayed.stdout) == json.loads(cli("status", run_id, "--json").stdout)
    state = json.loads(replayed.stdout)
    assert state["closed"] == "finished"
    assert state["explorers"]["explorer-0"]["version"]["step"] == STEPS
    assert state["explorers"]["explorer-1"]["digest"] == state["ready"]["weights"]["digest"]


def test_the_checkpoints_are_whole_and_pointed_to(finished):
    folder = Path(finished[1]["checkpoint_folder"])
    for name in ("latest_checkpointed_iteration.txt", "latest_state_dict_iteration.txt"):
        assert (folder / name).read_text() == str(STEPS)
    for step in (6, 12):
        actor = folder / f"global_step_{step}" / "actor"
        names = {path.name for path in actor.iterdir()}
        assert names == {
            *(
                f"{what}_world_size_2_rank_{rank}.pt"
                for what in ("model", "optim")
                for rank in (0, 1)
            ),
            *("huggingface", "fsdp_config.json"),
        }
    state = torch.load(actor / "model_world_size_2_rank_0.pt", weights_only=True)
    assert "model.embed_tokens.weight" in state


def test_its_configuration_is_in_log_and_folder(finished, cli):
    run_id, summary = finished
    lines = map(json.loads, cli("tail", run_id, "-n", "100000", "--json").stdout.splitlines())
    [opened] = [line["event"] for line in lines if line["event"]["type"] == "run-opened"]
    saved = read_config(Path(summary["checkpoint_folder"]) / "config.yaml").checked()
    assert TrainConfig.from_text(opened["config"]) == saved
    assert (saved.steps, saved.trainer.engine, saved.explorer.count) == (STEPS, "fsdp", 2)


def test_nothing_is_left_running(finished):
    assert children(finished[0]) == []


def test_refused_weights_are_in_the_table_and_in_the_exit_status_and_training_goes_on(
    cli, run_id, redis_url, weights_url, policy_folder, tmp_path
):
    offset = {"transport": "redis", "max_staleness": 4}
    file = small_run(tmp_path, policy_folder, steps=12, sync=offset)
    command = [sys.executable, "-m", "trinity_events", "train", str(file), "--run", run_id]
    wide = {**os.environ, "COLUMNS": "400"}
    running = child(command, stdout=PIPE, stderr=PIPE, text=True, env=wide)
    with connect_sync(weights_url) as client, running as process:
        damage_every_other_version(client, run_id, until=lambda: process.poll() is not None)
        out, error = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1, error
    assert re.search(rf"error: explorers of run {run_id} refused weights \d+ times", error)
    row = " ".join(out.split("REFUSED", 1)[1].split())
    assert re.match(
        r"[1-9]\d* times, an explorer found that what it read was not what was published", row
    )
    state = json.loads(cli("status", run_id, "--json").stdout)
    assert state["closed"] == "finished"
    assert {refusal["version"]["step"] % 4 for refusal in state["refusals"]} == {2}
    assert state["explorers"]["explorer-0"]["version"]["step"] == 12


def damage_every_other_version(client, run_id: str, until) -> None:
    """Change a byte of versions 2, 6 and 10 as soon as they are on the server of the chunks."""
    pattern = f"trinity-weights:{{{run_id}.*"
    damaged = set()
    while not until():
        for key in client.keys(pattern):
            if not key.endswith(b":0"):  # a manifest, or a payload of answers
                continue
            step = int(key.decode().split("}")[0].split(".")[-2])
            if step % 4 == 2 and key not in damaged:
                damaged.add(key)
                client.setrange(key, 5, b"\x55")
        time.sleep(0.002)  # the server and a core are the demo's too


LOCAL_RAY = """
import anyio
from trinity_workers.launch.processes import local_ray

async def main():
    async with local_ray(1):
        print("up", flush=True)
        await anyio.sleep_forever()

anyio.run(main)
"""


@pytest.mark.ray
def test_nothing_of_ray_outlives_a_driver_that_is_killed(tmp_path):
    room = tempfile.mkdtemp(prefix="t-", dir="/tmp")  # short, for Ray's sockets
    env = {**os.environ, "RAY_TMPDIR": room}
    try:
        with child([sys.executable, "-c", LOCAL_RAY], stdout=PIPE, text=True, env=env) as process:
            assert process.stdout.readline() == "up\n"
            [session] = Path(room, "ray").glob(f"session_*_{process.pid}")
            assert processes_of([session])
            with child(["tail", "-f", *session.glob("logs/raylet.out")], stdout=DEVNULL) as reader:
                process.kill()
                wait_until(lambda: not children(f"ray_reaper.py\0{room}"))
                assert not processes_of([session])
                assert reader.poll() is None, "what reads Ray's logs is not Ray's"
                assert [*Path(room, "ray").iterdir()] == [], "nor does its folder stay"
    finally:
        shutil.rmtree(room)
