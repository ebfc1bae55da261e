"""Room of a run in a cluster, and the interface between its hosts."""

import os
import socket

import msgspec
import pytest

from trinity_workers.config.train_config import TrainConfig
from trinity_workers.runtime.network import interface_to, meet_through
from trinity_workers.worker_group.placement import Needs, threads, with_reserved_cpus


def needs(explorers, **settings):
    return Needs.for_run(msgspec.convert(settings, TrainConfig), explorers=explorers)


def test_every_rank_and_explorer_takes_a_cpu_where_nothing_else_is_said():
    resources = needs(1, trainer={"ranks": 2})
    assert resources.bundles(gpus=False) == [{"CPU": 1.0}] * 3
    assert resources.bundles(gpus=True) == [{"CPU": 1.0, "GPU": 1.0}] * 2 + [{"CPU": 1.0}]
    assert resources.cpus == 3


def test_fractions_of_cpus_are_counted_as_they_are_given():
    resources = needs(2, trainer={"ranks": 1, "cpus": 2.5}, explorer={"cpus": 0.25})
    assert resources.bundles(gpus=False) == [{"CPU": 2.5}, {"CPU": 0.25}, {"CPU": 0.25}]
    assert resources.cpus == 3
    assert resources.format(gpus=True) == (
        "2.5 CPUs and a GPU for each of 1 rank, 0.25 CPUs for each of 2 explorers"
    )


def test_explorers_elsewhere_take_no_room():
    assert needs(0, trainer={"ranks": 2}).format(gpus=False) == "1 CPU for each of 2 ranks"


def test_a_shared_cluster_gets_no_more_threads_than_cpus():
    config = with_reserved_cpus(msgspec.convert({"explorer": {"cpus": 2.5}}, TrainConfig))
    assert threads(config.trainer.cpus, 1) == 1
    assert threads(config.explorer.cpus, 1) == 2
    assert threads(0.5, 1) == 1
    assert threads(None, 10_000) == 1, "a host that is the run's own is shared"


def test_collectives_use_the_interface_that_leads_to_the_other_host(monkeypatch):
    [loopback] = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    assert interface_to("127.0.0.1") == loopback
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    meet_through("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == loopback
    assert os.environ["NCCL_SOCKET_IFNAME"] == "ib0", "the user's choice stays"


@pytest.mark.parametrize("host", ["no.such.host.invalid", "::1"])
def test_a_host_that_is_not_known_leaves_the_choice_to_the_library(host, monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    meet_through(host)
    assert "GLOO_SOCKET_IFNAME" not in os.environ
