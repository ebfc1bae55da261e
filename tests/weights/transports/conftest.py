"""Fixtures that several files of tests/weights/transports share."""

import logging

import pytest

from tests.support.published_parts import put
from tests.support.ray_clusters import Elsewhere
from trinity_events.weights import PartRef, RayStore
from trinity_events.weights.reading import pull


@pytest.fixture
def digested(monkeypatch):
    """How many chunks a pull digested itself."""
    sizes = []

    def counting(*pieces):
        sizes.append(sum(map(len, pieces)))
        return digest(*pieces)

    digest = pull.digest
    monkeypatch.setattr(pull, "digest", counting)
    return sizes


@pytest.fixture(scope="module")
def ray_cluster():
    """A Ray cluster of two nodes, on the first of which this process is."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    room = 200 << 20
    nodes = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 1, "object_store_memory": room, "include_dashboard": False},
    )
    nodes.add_node(num_cpus=1, resources={"elsewhere": 1}, object_store_memory=room)
    ray.init(address=nodes.address, log_to_driver=False, logging_level=logging.ERROR)
    keeper = RayStore()  # so that the stores of all tests have one actor, which takes a second
    put(keeper, PartRef("keeper", 1, 1, 0))
    yield nodes.address
    keeper.close()
    ray.shutdown()
    nodes.shutdown()


@pytest.fixture
def far(ray_cluster):
    """A process on the cluster's other node, which publishes and reads."""
    import ray

    actor = ray.remote(Elsewhere).options(num_cpus=0, resources={"elsewhere": 1}, max_restarts=0)
    made = actor.remote()
    yield made
    ray.kill(made)
