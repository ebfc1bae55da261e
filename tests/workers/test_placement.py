"""Room of a run in a cluster, and the interface between its hosts."""

import os
import re
import socket

import msgspec
import pytest

from tests.support.errors import raises
from trinity_workers.config.train_config import TrainConfig
from trinity_workers.runtime.network import interface_to, meet_through
from trinity_workers.worker_group.placement import (
    GpusMissing,
    Needs,
    format_devices,
    threads,
    with_rank_count,
    with_reserved_cpus,
)


def needs(explorers, **settings):
    return Needs.for_run(msgspec.convert(settings, TrainConfig), explorers=explorers)


def test_every_rank_and_explorer_takes_a_cpu_where_nothing_else_is_said():
    resources = needs(1, trainer={"ranks": 2})
    assert resources.with_gpus([]).bundles() == [{"CPU": 1.0}] * 3
    assert resources.with_gpus([8]).bundles() == [{"CPU": 1.0, "GPU": 1.0}] * 3
    assert resources.cpus == 3


def test_fractions_are_counted_as_they_are_given():
    resources = needs(
        2, trainer={"ranks": 1, "cpus": 2.5, "gpus": 0.6}, explorer={"cpus": 0.25, "gpus": 0.2}
    ).with_gpus([1])
    assert resources.bundles() == [
        {"CPU": 2.5, "GPU": 0.6},
        *[{"CPU": 0.25, "GPU": 0.2}] * 2,
    ]
    assert resources.cpus == 3
    assert resources.format() == (
        "2.5 CPUs and 0.6 GPUs for each of 1 rank, 0.25 CPUs and 0.2 GPUs for each of 2 explorers"
    )


def test_explorers_elsewhere_take_no_room():
    resources = needs(0, trainer={"ranks": 2}, explorer={"gpus": 8.0, "engine": "x:y"})
    assert resources.with_gpus([0]).format() == "1 CPU for each of 2 ranks"


@pytest.mark.parametrize(
    ("nodes", "ranks", "explorers", "settings", "shares"),
    [
        ([0], 2, 1, {}, (0.0, 0.0)),
        ([1], 1, 1, {}, (0.6, 0.4)),  # one card for all
        ([1], 1, 3, {}, (0.6, 0.1333)),
        ([1], 1, 0, {}, (1.0, 0.0)),
        ([1], 2, 1, {}, (0.0, 1.0)),  # NCCL takes one rank a GPU
        ([1], 2, 2, {}, (0.0, 0.5)),
        ([2], 2, 2, {}, (0.6, 0.4)),
        ([2], 1, 2, {}, (1.0, 0.5)),
        ([8], 2, 1, {}, (1.0, 1.0)),
        ([8], 4, 4, {}, (1.0, 1.0)),
        ([8], 6, 4, {}, (1.0, 0.5)),
        ([8], 8, 4, {}, (0.6, 0.4)),
        ([4, 4], 6, 2, {}, (1.0, 1.0)),
        ([1], 1, 1, {"explorer": {"gpus": 0.5}}, (0.5, 0.5)),
        ([1], 1, 1, {"explorer": {"gpus": 0.0}}, (1.0, 0.0)),
        ([1], 1, 1, {"explorer": {"device": "cpu"}}, (1.0, 0.0)),
        ([1], 1, 1, {"explorer": {"device": "cuda"}}, (0.6, 0.4)),
        ([2], 2, 2, {"explorer": {"gpus": 0.3}}, (0.6, 0.3)),
        ([2], 2, 1, {"explorer": {"gpus": 0.25}}, (0.6, 0.25)),
        ([1], 1, 1, {"trainer": {"gpus": 1.0}}, (1.0, 0.0)),
        ([1], 1, 2, {"trainer": {"gpus": 0.5}}, (0.5, 0.25)),
        ([1], 2, 1, {"trainer": {"gpus": 0.0}}, (0.0, 1.0)),
        ([4, 4], 4, 2, {"explorer": {"gpus": 2.0, "engine": "x:y"}}, (1.0, 2.0)),
    ],
)
def test_gpus_are_shared_as_there_are_enough(nodes, ranks, explorers, settings, shares):
    settings = {**settings, "trainer": {"ranks": ranks, **settings.get("trainer", {})}}
    resources = needs(explorers, **settings).with_gpus(nodes)
    assert (resources.rank_gpus, resources.explorer_gpus) == pytest.approx(shares)


@pytest.mark.parametrize(
    ("nodes", "explorers", "settings", "needed"),
    [
        ([0], 1, {"explorer": {"gpus": 0.5}}, "0.5 GPUs for each of 1 explorer"),
        ([1], 1, {"trainer": {"gpus": 0.6}}, "0.6 GPUs for each of 2 ranks"),
        (
            [2],
            1,
            {"trainer": {"gpus": 1.0}, "explorer": {"gpus": 0.5}},
            "1 GPU for each of 2 ranks",
        ),
        # Two halves would let Ray place both ranks on one GPU.
        ([2], 2, {"explorer": {"gpus": 0.5}}, "a GPU, or a part of one, for each of 2 ranks"),
        ([1, 1], 1, {"explorer": {"gpus": 2.0, "engine": "x:y"}}, "2 GPUs for each of 1 explorer"),
        # 1.8 GPUs are less than 2, and each share lies on one GPU.
        ([2], 1, {"trainer": {"gpus": 0.6}, "explorer": {"gpus": 0.6}}, "0.6 GPUs for each of 2"),
        ([2], 1, {"trainer": {"gpus": 1.0}, "explorer": {"device": "cuda"}}, "a GPU, or a part of"),
    ],
)
def test_gpus_that_are_missing_are_named_with_those_that_there_are(
    nodes, explorers, settings, needed
):
    resources = needs(
        explorers, **{**settings, "trainer": {"ranks": 2, **settings.get("trainer", {})}}
    )
    assert resources.asks_for_gpus
    with raises(GpusMissing, nodes=tuple(nodes), needed=re.compile(needed)):
        resources.with_gpus(nodes)


def test_ranks_of_verls_megatron_engine_are_never_on_cpus():
    trainer = {"engine": "verl-megatron", "ranks": 2}
    resources = needs(1, trainer=trainer)
    assert resources.asks_for_gpus
    assert [bundle.get("GPU") for bundle in resources.with_gpus([3]).bundles()] == [1.0] * 3
    for gpus in (0, 1):
        with raises(GpusMissing, nodes=(gpus,), engine="verl-megatron"):
            resources.with_gpus([gpus])


@pytest.mark.parametrize(("nodes", "explorers"), [([1], 1), ([2], 1), ([8], 3), ([0, 1], 2)])
def test_weights_in_a_gpus_memory_keep_all_processes_on_one_gpu(nodes, explorers):
    resources = needs(explorers, trainer={"ranks": 1}, sync={"transport": "cuda-ipc"})
    assert resources.asks_for_gpus
    shares = [bundle["GPU"] for bundle in resources.with_gpus(nodes).bundles()]
    assert len(shares) == 1 + explorers and sum(shares) <= 1


@pytest.mark.parametrize(
    ("nodes", "ranks", "settings"),
    [
        ([0], 1, {}),
        ([2], 2, {}),
        ([2], 1, {"trainer": {"gpus": 1.0}}),
        ([2], 1, {"trainer": {"gpus": 0.6}, "explorer": {"gpus": 0.6}}),
        ([2], 1, {"trainer": {"gpus": 0.0}}),
        ([2], 1, {"explorer": {"gpus": 0.0}}),
    ],
)
def test_weights_in_a_gpus_memory_are_refused_where_processes_share_no_gpu(nodes, ranks, settings):
    trainer = {"ranks": ranks, **settings.get("trainer", {})}
    resources = needs(1, **{**settings, "trainer": trainer}, sync={"transport": "cuda-ipc"})
    with raises(GpusMissing, nodes=tuple(nodes), one_gpu=True):
        resources.with_gpus(nodes)


def test_lines_name_the_shares_and_ranks_that_have_no_gpu():
    assert format_devices(needs(1).with_gpus([0]), [0]) == []
    [shares, warning] = format_devices(needs(1, trainer={"ranks": 2}).with_gpus([1]), [1])
    assert shares == "1 GPU: 1 CPU for each of 2 ranks, 1 CPU and a GPU for each of 1 explorer"
    assert warning.startswith("warning: the ranks compute on CPUs") and "trainer.ranks 1" in warning
    assert len(format_devices(needs(1, trainer={"ranks": 2}).with_gpus([2]), [2])) == 1


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


@pytest.mark.parametrize(
    ("trainer", "gpus", "ranks"),
    [
        ({}, 0, 2),
        ({}, 1, 1),
        ({}, 8, 8),
        ({"ranks": 2}, 1, 2),
        ({"gpus": 0.0}, 8, 2),
        ({"gpus": 0.4}, 8, 1),
        ({"engine": "megatron"}, 8, 2),
        ({"engine": "megatron", "tensor_parallel": 2}, 7, 6),
        ({"engine": "megatron", "tensor_parallel": 2}, 1, 2),
    ],
)
def test_ranks_that_are_not_set_are_as_many_as_gpus_that_the_other_settings_allow(
    trainer, gpus, ranks
):
    config = msgspec.convert({"trainer": trainer}, TrainConfig)
    assert with_rank_count(config, gpus).trainer.ranks == ranks
