"""veRL's `DataProto` is dealt out and collected as veRL does it itself."""

from __future__ import annotations

import warnings
from itertools import product

import pytest
import torch

from tests.support.tensors import identical
from tests.verl.conftest import speak_to_verl
from trinity_workers.worker_group.dispatch import Dispatch, deal
from trinity_workers.worker_group.ranks import DistGlobalInfo, RankTable, rank_table

pytestmark = pytest.mark.filterwarnings("default")  # veRL's and tensordict's
SIZES = [
    DistGlobalInfo(tp_size=tp, dp_size=dp, pp_size=pp, cp_size=1)
    for tp, dp, pp in product((1, 2), (1, 2, 3), (1, 2))
]


@pytest.fixture(autouse=True, scope="module")
def _verl():
    speak_to_verl()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import verl

        assert verl.DataProto


@pytest.fixture
def group_of(monkeypatch):
    """Makes veRL's group of so many workers, to which arguments are handed without Ray."""
    from verl.single_controller.base.worker_group import WorkerGroup

    monkeypatch.setattr("verl.utils.ray_utils.parallel_put", lambda rows, max_workers: rows)

    def make(world: int) -> WorkerGroup:
        group = WorkerGroup.__new__(WorkerGroup)
        group._workers = [None] * world
        return group

    return make


def data_of(rows: int):
    from verl import DataProto

    return DataProto.from_dict(
        tensors={"numbers": torch.arange(rows), "pairs": torch.arange(2.0 * rows).view(rows, 2)},
        non_tensors={"uid": [f"row {row}" for row in range(rows)]},
        meta_info={"temperature": 0.5},
    )


def same(first, other) -> bool:
    tensors = all(identical(first.batch[name], other.batch[name]) for name in ("numbers", "pairs"))
    names = list(first.non_tensor_batch["uid"]) == list(other.non_tensor_batch["uid"])
    return tensors and names and first.meta_info == other.meta_info


def work(part):
    """Return what a rank returns: new rows, with the name of each."""
    from verl import DataProto

    return DataProto.from_dict(
        tensors={"numbers": part.batch["numbers"] + 1, "pairs": part.batch["pairs"] * 2},
        non_tensors={"uid": part.non_tensor_batch["uid"]},
        meta_info=part.meta_info,
    )


def ours(mode: Dispatch, table: RankTable, data):
    """Return the part of each rank, and the result of the call."""
    dealt = deal(mode, table, [data])
    parts = [dealt.arguments[share][0] for share in dealt.ranks]
    return parts, dealt.collect([work(part) for part in parts])


@pytest.mark.parametrize("rows", [6, 12])
def test_replicas_get_the_parts_that_verl_deals_out_and_the_result_is_verls(group_of, rows):
    from verl.single_controller.base.decorator import (
        collect_nd_compute_dataproto,
        dispatch_nd_compute_dataproto,
    )

    data = data_of(rows)
    for sizes in SIZES:
        table = rank_table(sizes)
        group = group_of(len(table))
        places = [place.dp_rank for place in table]
        [theirs], _ = dispatch_nd_compute_dataproto(places, sizes.dp_size, group, data)
        parts, joined = ours(Dispatch.MEGATRON_COMPUTE_PROTO, table, data)
        assert all(map(same, parts, theirs)), sizes
        answering = [place.tp_rank == 0 and place.pp_rank == sizes.pp_size - 1 for place in table]
        answers = [work(part) for part in theirs]
        assert same(joined, collect_nd_compute_dataproto(answering, group, answers)), sizes


@pytest.mark.parametrize("rows", [1, 5, 6])
def test_data_parallel_ranks_get_the_parts_that_verl_pads_and_deals_out(group_of, rows):
    from verl.protocol import DataProtoConfig, _padding_size_key
    from verl.single_controller.base.decorator import (
        collect_dp_compute_data_proto,
        dispatch_dp_compute_data_proto,
    )

    for world in (1, 2, 3):
        group, data = group_of(world), data_of(rows)
        data.meta_info[DataProtoConfig.auto_padding_key] = True
        parts, joined = ours(Dispatch.DP_COMPUTE_PROTO, [*places_of(world)], data)
        assert same(joined, work(data)), "no padding row is in the result"
        [theirs], more = dispatch_dp_compute_data_proto(group, data)
        padding = more.get(_padding_size_key, 0)
        assert [len(part) for part in parts] == [len(part) for part in theirs]
        result = collect_dp_compute_data_proto(group, [work(part) for part in theirs])
        assert same(joined, result[: len(result) - padding])


def places_of(world: int) -> RankTable:
    return rank_table(DistGlobalInfo(tp_size=1, dp_size=world, pp_size=1, cp_size=1))
