"""What is dealt out to the ranks of any layout comes back whole, once and in order."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from tests.support.batches import make_batch  # noqa: E402
from tests.support.errors import raises  # noqa: E402
from tests.support.tensors import assert_equal, identical  # noqa: E402
from trinity_workers.algorithms.batch import Batch  # noqa: E402
from trinity_workers.worker_group.dispatch import (  # noqa: E402
    Dispatch,
    DispatchRefused,
    deal,
    find_shares,
)
from trinity_workers.worker_group.ranks import (  # noqa: E402
    DistGlobalInfo,
    DistRankInfo,
    find_sizes,
    rank_table,
)
from trinity_workers.worker_group.rows import UnknownRows  # noqa: E402

MODES = [mode for mode in Dispatch if mode.deals_out]
RANKS = 64
LAYOUTS = [
    DistGlobalInfo(tp_size=tp, dp_size=dp, pp_size=pp, cp_size=cp)
    for tp in range(1, RANKS + 1)
    for pp in range(1, RANKS // tp + 1)
    for cp in (1, 2)
    for dp in range(1, RANKS // (tp * pp * cp) + 1)
]


def answer(dealt, work):
    """The result of a call, if every rank does this with its arguments."""
    return dealt.collect([work(*dealt.arguments[share]) for share in dealt.ranks])


@pytest.mark.parametrize("mode", MODES)
def test_rows_come_back_once_and_in_order_at_every_layout_up_to_64_ranks(mode):
    for sizes in LAYOUTS:
        table = rank_table(sizes)
        assert find_sizes(table) == sizes
        count = find_shares(mode, table).number
        for rows in {0, 1, count - 1, count, count + 1, 2 * count + 3}:
            dealt = deal(mode, table, [list(range(rows))])
            dealt_out = [row for [part] in dealt.arguments for row in part]
            assert sorted(dealt_out) == list(range(rows))
            assert answer(dealt, list) == list(range(rows)), sizes


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rows", [1, 5, 8, 9, 13])
def test_a_batch_comes_back_without_its_padding_at_layouts_of_six_ranks(mode, rows):
    batch = make_batch([1 + row % 3 for row in range(rows)])
    for sizes in [
        layout for layout in LAYOUTS if layout.tp_size * layout.dp_size * layout.pp_size == 6
    ]:
        dealt = deal(mode, rank_table(sizes), [batch])
        lengths = {len(part) for [part] in dealt.arguments}
        assert len(lengths) == 1, "ranks have equally many rows"
        result = answer(dealt, lambda part: {"batch": part, "rows": part.rewards * 2, "loss": 0.5})
        assert_equal(result["batch"].known(), batch.known())
        assert identical(result["rows"], batch.rewards * 2)
        assert result["loss"] == 0.5


def test_tensors_for_each_entry_of_a_list_are_put_back_in_its_order():
    table = rank_table(DistGlobalInfo(tp_size=2, dp_size=3, pp_size=2, cp_size=1))
    dealt = deal(Dispatch.MEGATRON_PP_AS_DP_PROTO, table, [list(range(10))])
    result = answer(dealt, lambda part: torch.tensor(part, dtype=torch.int64))
    assert result.tolist() == list(range(10))


def test_ranks_of_a_replica_get_one_share_and_the_last_stage_answers():
    sizes = DistGlobalInfo(tp_size=2, dp_size=2, pp_size=2, cp_size=1)
    shares = find_shares(Dispatch.MEGATRON_COMPUTE_PROTO, rank_table(sizes))
    assert shares.ranks == (0, 0, 1, 1, 0, 0, 1, 1)
    assert shares.answering == (4, 6)


def test_answers_of_stages_that_count_as_replicas_are_ordered_by_share():
    sizes = DistGlobalInfo(tp_size=2, dp_size=4, pp_size=2, cp_size=1)
    dealt = deal(Dispatch.MEGATRON_PP_AS_DP_PROTO, rank_table(sizes), [list("ABCDEFGH")])
    assert dealt.answering == (0, 8, 2, 10, 4, 12, 6, 14)
    by_rank = [dealt.arguments[dealt.ranks[rank]][0][0] for rank in sorted(dealt.answering)]
    assert "".join(by_rank) == "ACEGBDFH", "the order that veRL 0.4 and later collected in"
    assert "".join(answer(dealt, list)) == "ABCDEFGH"


def test_all_ranks_or_rank_0_get_arguments_as_they_are():
    table = rank_table(DistGlobalInfo(tp_size=2, dp_size=1, pp_size=2, cp_size=1))
    everyone = deal(Dispatch.ONE_TO_ALL, table, ["folder", 7])
    assert answer(everyone, lambda *given: given) == [("folder", 7)] * 4
    first = deal(Dispatch.RANK_ZERO, table, ["folder"])
    assert first.ranks == (0,)
    assert answer(first, str.upper) == "FOLDER"


def test_arguments_are_dealt_out_together_and_only_with_as_many_rows():
    table = rank_table(DistGlobalInfo(tp_size=1, dp_size=2, pp_size=1, cp_size=1))
    dealt = deal(Dispatch.DP_COMPUTE_PROTO, table, [[1, 2, 3], ["a", "b", "c"]])
    assert dealt.arguments == [([1, 3], ["a", "c"]), ([2], ["b"])]
    with raises(DispatchRefused, fault="rows", rows=(1, 2)):
        deal(Dispatch.DP_COMPUTE_PROTO, table, [[1, 2], [1]])
    with raises(DispatchRefused, fault="nothing", mode=Dispatch.DP_COMPUTE_PROTO.value):
        deal(Dispatch.DP_COMPUTE_PROTO, table, [])


def test_what_has_no_rows_and_answers_of_other_rows_are_refused():
    table = rank_table(DistGlobalInfo(tp_size=1, dp_size=2, pp_size=1, cp_size=1))
    with raises(UnknownRows, fault="value", kind="str"):
        deal(Dispatch.DP_COMPUTE_PROTO, table, ["folder"])
    batch = make_batch([1, 2, 3])
    with raises(UnknownRows, fault="answers", answered=2, dealt=4, requested=3):
        answer(deal(Dispatch.DP_COMPUTE_PROTO, table, [batch]), lambda part: part.rewards[:1])


def test_a_table_that_lacks_ranks_is_refused():
    table = rank_table(DistGlobalInfo(tp_size=1, dp_size=2, pp_size=2, cp_size=1))
    with raises(DispatchRefused, fault="layout", ranks=3):
        find_shares(Dispatch.MEGATRON_COMPUTE_PROTO, table[:3])
    twice = [DistRankInfo(tp_rank=0, dp_rank=0, pp_rank=0, cp_rank=0)] * 2
    with raises(DispatchRefused, fault="layout", ranks=2):
        find_shares(Dispatch.MEGATRON_PP_AS_DP_PROTO, twice)


def test_padding_rows_are_part_of_no_sum():
    table = rank_table(DistGlobalInfo(tp_size=1, dp_size=4, pp_size=1, cp_size=1))
    dealt = deal(Dispatch.DP_COMPUTE_PROTO, table, [make_batch([2, 3, 1])])
    [padding] = dealt.arguments[3]
    assert isinstance(padding, Batch)
    assert padding.token_count == 0
