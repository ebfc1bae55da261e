"""GPUs of a run on this host, which Ray counts and which are none: places, restarts, refusals."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("ray", reason="Ray is not installed")

from tests.support.waits import PATIENCE

pytestmark = [pytest.mark.ray, pytest.mark.heavy, pytest.mark.processes]

ONE = {"RAY_OVERRIDE_RESOURCES": '{"GPU": 1}'}
TWO = {"RAY_OVERRIDE_RESOURCES": '{"GPU": 2}'}
"""Variable by which Ray takes the resources of a host from its user."""
PLACES = """
import json, os, anyio, ray
from trinity_workers.launch.cluster import reserve_places
from trinity_workers.worker_group.placement import Needs, placement_options

class Process:
    def gpus(self):
        return os.environ.get("CUDA_VISIBLE_DEVICES")

    def die(self):
        os._exit(1)

def start(options):
    return ray.remote(Process).options(**options).remote()

async def main():
    needs = Needs(ranks=2, rank_cpus=1, explorers=2, explorer_cpus=1)
    async with reserve_places(needs, None, deadline=60, notify=print) as room:
        ranks = [
            start(placement_options(room._group, rank, num_cpus=1, num_gpus=room.needs.rank_gpus))
            for rank in range(2)
        ]
        explorers = [start(room.explorer(rank)) for rank in range(2)]
        seen = [await process.gpus.remote() for process in (*ranks, *explorers)]
        explorers[1].die.remote()
        again = start(room.explorer(1))  # waits until the place is free
        print(json.dumps([*seen, await again.gpus.remote()]))

anyio.run(main)
"""


def test_ranks_have_a_gpu_each_which_explorers_share_and_get_back_after_a_restart():
    done = subprocess.run(
        [sys.executable, "-c", PLACES],
        env={**os.environ, **TWO},
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    last_line = done.stdout.splitlines()[-1]  # Ray may print, too
    first, second, *explorers, again = json.loads(last_line)
    assert {first, second} == {"0", "1"}, "no two ranks share a GPU"
    assert {*explorers} == {"0", "1"}
    assert again == explorers[1]


def test_check_refuses_gpus_that_are_missing_and_takes_those_that_there_are(cli, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("{trainer: {ranks: 2}, explorer: {count: 2, gpus: 0.5}}")
    refused = cli("train", str(file), "--check", env=TWO)
    assert refused.returncode == 1
    [line] = refused.stderr.splitlines()
    assert line.startswith("error: the run needs a GPU, or a part of one, for each of 2 ranks and ")
    assert "0.5 GPUs for each of 2 explorers, and there are 2 GPUs: ask for less" in line
    fitting = cli("train", str(file), "--check", "--set", "explorer.gpus=0.4", env=TWO)
    assert fitting.returncode == 0, fitting.stderr


def test_a_host_with_one_gpu_has_one_rank_and_one_without_a_gpu_has_two(cli, tmp_path):
    (tmp_path / "run.yaml").write_text("{steps: 2}")
    check = ("train", str(tmp_path / "run.yaml"), "--check", "--json")
    chosen, default = cli(*check, env=ONE), cli(*check, env={"RAY_OVERRIDE_RESOURCES": "{}"})
    assert json.loads(chosen.stdout)["trainer"]["ranks"] == 1
    assert "trainer.ranks is 1, as it is not set and this host has 1 GPU" in chosen.stderr
    given = cli(*check, "--set", "trainer.ranks=2", env=ONE)
    for result in (default, given):
        assert json.loads(result.stdout)["trainer"]["ranks"] == 2
        assert result.stderr == ""
