"""`train` in a Ray cluster that was there before it, and its refusals of one that does not fit."""

import json
import re
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="Ray is not installed")

from tests.support.errors import raises
from tests.support.ray_clusters import ELSEWHERE, two_nodes
from tests.support.waits import PATIENCE
from trinity_events.errors import SharedMemoryUnusable
from trinity_schemas import decode_envelope
from trinity_workers.launch import cluster
from trinity_workers.launch.cluster import (
    ClusterUnreachable,
    Node,
    check_one_host,
    reserve_places,
)
from trinity_workers.launch.shared_storage import NodeFault, Probe, answer
from trinity_workers.worker_group.placement import Needs

pytestmark = [pytest.mark.ray, pytest.mark.heavy]

EXAMPLE = Path(__file__).parents[3] / "examples" / "train" / "ray-cluster.yaml"
HOSTS = {socket.gethostname(), ELSEWHERE}
FEW = (
    "trainer.ranks=2",
    "trainer.cpus=1",
    "explorer.count=1",
    "explorer.cpus=1",
    "steps=2",
    "rollouts.prompts_per_step=2",
    "rollouts.samples_per_prompt=2",
    "evaluation.sets={}",
)
NEEDS = Needs(ranks=1, rank_cpus=1, explorers=0, explorer_cpus=1)
JOINED = """
import json, ray
ray.init(log_to_driver=False, logging_level=40)
print(json.dumps([len(ray.nodes()), ray.available_resources()["CPU"]]))
"""


@pytest.fixture(scope="module")
def nodes():
    """Two nodes of two CPUs each, and of a GPU that Ray counts, and that is none."""
    with (
        tempfile.TemporaryDirectory(prefix="r-", dir="/tmp") as room,
        two_nodes(Path(room), gpus=1) as made,
    ):
        yield made


@pytest.fixture
def train(cli, redis_url, tmp_path, run_id, nodes):
    """Trains two steps of the example in the cluster, with these settings."""

    def run(*settings, root=tmp_path):
        words = [word for setting in (*FEW, *settings) for word in ("--set", setting)]
        place = (
            "--run",
            run_id,
            "--redis-url",
            redis_url,
            "--checkpoint-root",
            str(root),
            "--json",
        )
        command = ("train", str(EXAMPLE), *words, *place)
        return cli(*command, timeout=4 * PATIENCE, env=nodes.environment)

    return run


def sentence_of(result):
    """The error that a command ended with."""
    assert result.returncode == 1, result.stderr
    [line] = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert "Traceback" not in result.stderr
    return line


@pytest.mark.timeout(600)
async def test_ranks_and_explorers_run_on_a_cluster_that_is_still_there_afterwards(
    train, log, nodes, cli
):
    # A node has no room for two ranks.
    result = train("trainer.cpus=1.5", "explorer.cpus=0.5", "sync.transport=ray")
    assert result.returncode == 0, result.stderr
    assert f"joining the Ray cluster at {nodes.address}" in result.stderr
    assert f"run {log.run_id}: weights travel by " in result.stderr
    shares = (
        "1.5 CPUs and 0.6 GPUs for each of 2 ranks, 0.5 CPUs and 0.4 GPUs for each of 1 explorer"
    )
    assert f"run {log.run_id}: 2 GPUs: {shares}" in result.stderr
    summary = json.loads(result.stdout)
    assert summary["transport"] == "ray"
    log_summary = summary["log"]
    assert (
        log_summary["steps"],
        log_summary["versions_published"],
        log_summary["versions_unaccounted"],
    ) == (2, 3, 0)
    state = json.loads(cli("status", log.run_id, "--json").stdout)
    assert state["explorers"]["explorer-0"]["digest"] == state["ready"]["weights"]["digest"]

    senders = [decode_envelope(entry.payload).producer for entry in await log.read()]
    hosts = {
        role: {sender.node for sender in senders if sender.role == role}
        for role in ("actor", "explorer")
    }
    assert hosts["actor"] == {socket.gethostname(), ELSEWHERE}
    assert hosts["explorer"] <= hosts["actor"]
    assert hosts["explorer"]

    joined = subprocess.run(
        [sys.executable, "-c", JOINED],
        env=nodes.joining(),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    assert json.loads(joined.stdout) == [2, 4], "it goes on, and all of it is free again"


@pytest.mark.timeout(600)
def test_a_cluster_without_room_is_refused_with_what_is_missing_and_what_there_is(train):
    sentence = sentence_of(train("trainer.ranks=3", "explorer.count=3", "sync.timeout=3"))
    assert (
        "has no room for the run within 3 s: it needs 1 CPU for each of 3 ranks, 1 CPU and "
        "0.5 GPUs for each of 3 explorers; of the nodes (2 with 2 CPUs and 1 GPUs), 4 CPUs and "
        "2 GPUs are free: wait for other jobs"
    ) in sentence


def test_gpus_that_the_cluster_lacks_are_refused_before_the_run_is_opened(train, cli, log):
    sentence = sentence_of(train("explorer.gpus=0.5"))
    assert "0.5 GPUs for each of 1 explorer, and the 2 nodes of the Ray cluster have 1, 1 GPUs" in (
        sentence
    )
    assert cli("status", log.run_id).returncode == 1, "there is no such run"


@pytest.mark.timeout(600)
def test_a_node_that_does_not_see_the_checkpoint_folder_is_named(train, nodes):
    sentence = sentence_of(train(root=nodes.hidden))
    assert f"node {ELSEWHERE} (" in sentence
    assert f"does not see what is written to the checkpoint folder {nodes.hidden}/" in sentence
    assert not list(nodes.hidden.rglob(".probe*")), "the probe leaves no files"


@pytest.mark.timeout(600)
def test_a_cluster_of_another_version_is_refused_with_rays_reason(train, nodes):
    with nodes.pretending("ray_version", "1.2.3"):
        sentence = sentence_of(train())
    assert (
        f"no Ray cluster can be joined at RAY_ADDRESS={nodes.address} (Version mismatch: "
        in sentence
    )
    assert "Ray: 1.2.3" in sentence


# --- without a cluster ------------------------------------------------------------------------


async def refused(address):
    with raises(ClusterUnreachable, address=address) as caught:
        async with reserve_places(NEEDS, address, deadline=1, notify=print):
            pass
    return caught.value.reason


@contextmanager
def listening(says=None):
    """A server that says this to each peer, or nothing; on all interfaces, as Ray's is."""
    with socket.create_server(("", 0)) as server:

        def serve():
            with suppress(OSError):
                while True:
                    peer, _ = server.accept()
                    peers.append(peer)
                    if says is not None:
                        peer.sendall(says)

        peers = []
        serving = threading.Thread(target=serve, daemon=True)
        serving.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)  # It ends the thread's wait.
        serving.join()
        for peer in peers:
            peer.close()


async def test_an_address_at_which_nothing_listens_is_refused_at_once():
    with socket.create_server(("", 0)) as gone:
        port = gone.getsockname()[1]
    assert re.fullmatch(
        rf"\S+:{port} does not answer: .*[Rr]efused", await refused(f"127.0.0.1:{port}")
    )


async def test_a_server_that_says_nothing_is_refused_within_seconds():
    with listening() as address, raises(ClusterUnreachable, address=address) as caught:
        async with cluster._joined(address, answer_deadline=0.2):
            pass
    assert caught.value.reason.endswith(" does not answer within 0.2 s")


async def test_another_kind_of_server_is_refused():
    with listening(b"-ERR unknown command\r\n") as address:
        assert (await refused(address)).endswith(" is no server of Ray")


@pytest.mark.parametrize("address", ["ray://127.0.0.1:10001", "nonsense"])
async def test_an_address_of_another_form_is_refused(address):
    await refused(address)


@pytest.mark.processes
@pytest.mark.parametrize("transport", ["shm", "cuda-ipc"])
def test_memory_of_one_host_is_refused_where_the_run_is_on_two(transport):
    class Places:
        def nodes(self):
            return {Node("1", "a", "192.0.2.1"): [0], Node("2", "b", "192.0.2.2"): [1]}

    refused = raises(SharedMemoryUnusable, fault="hosts", hosts=("a", "b"), transport=transport)
    with refused:
        check_one_host(Places(), transport)


# --- one node's answer ------------------------------------------------------------------------


@pytest.fixture
def probe(tmp_path, redis_url, weights_url):
    folder = tmp_path / "run" / ".probe-0"
    folder.mkdir(parents=True)
    (folder / "launcher").write_text(folder.name)
    return {
        "folder": folder,
        "writes": "node-0",
        "model": None,
        "redis_url": redis_url,
        "weights_url": weights_url,
    }


def test_a_node_that_has_all_of_it_writes_its_file(probe):
    assert answer(Probe(**probe)) is None
    assert (probe["folder"] / "node-0").read_text() == ".probe-0"


def test_a_folder_that_has_another_runs_file_is_not_the_launchers(probe):
    (probe["folder"] / "launcher").write_text("another")
    assert answer(Probe(**probe)) == NodeFault("unseen", probe["folder"].parent)


def test_a_folder_that_cannot_be_written_is_refused_for_ranks_alone(probe):
    (probe["folder"] / "node-0").mkdir()  # no user can write a file there
    assert answer(Probe(**probe)).fault == "unwritable"
    assert answer(Probe(**probe | {"writes": None})) is None


def test_a_model_that_is_not_there_is_named(probe, tmp_path):
    reply = answer(Probe(**probe | {"model": tmp_path}))
    assert reply == NodeFault("model", tmp_path)


def test_a_server_that_is_not_reached_is_named(probe, tmp_path):
    reply = answer(Probe(**probe | {"weights_url": f"unix://{tmp_path}/none"}))
    assert reply.fault == "server"
    assert f"unix://{tmp_path}/none" in reply.reason
