"""veRL in processes of their own: its imports warn of many things."""

from __future__ import annotations

import os
import warnings
from functools import partial

import pytest

from tests.support.optional_packages import skip_without
from tests.support.rank_processes import results
from tests.verl.ranks import Where, import_verl

IMPORTS = 300
"""Seconds that the first import of veRL may take, with two ranks on a slow machine."""


def pytest_collection_modifyitems(items):
    reason = "veRL is not installed: run make verl"
    skip_without("verl", items, folder="tests/verl", reason=reason)


def speak_to_verl():
    """Let processes that start from now on, and import veRL, compute on the CPU."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["VERL_USE_EXTERNAL_MODULES"] = "trinity_workers.verl.cpu_platform"
    os.environ["VERL_PLATFORM"] = "cpu"


@pytest.fixture(scope="session")
def imported_verl():
    """Import veRL in this process, without the warnings of its import."""
    speak_to_verl()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import verl

        assert verl.DataProto


@pytest.fixture(scope="session")
def verl_processes(rank_processes):
    """Two processes that have imported veRL, which takes a while."""
    speak_to_verl()
    rank_processes.start(2)
    pending = [rank_processes.ask(rank, import_verl) for rank in range(2)]
    results([partial(answer, IMPORTS) for answer in pending])
    return rank_processes


@pytest.fixture
def ranks(verl_processes, rank_group):
    """Two ranks over Gloo."""
    return rank_group(2)


@pytest.fixture
def where(publisher, redis_url, weights_url, run_id, policy_folder, tmp_path):
    return Where(run_id, publisher.epoch, redis_url, weights_url, policy_folder, tmp_path / run_id)
