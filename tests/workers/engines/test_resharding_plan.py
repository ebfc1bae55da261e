"""The plan of a resharding: every wanted element once, and no byte that a rank has itself."""

from __future__ import annotations

from itertools import product

import pytest

pytest.importorskip("torch")

from trinity_events.errors import IncompatibleWeights
from trinity_events.weights.slices import TensorSlice, coverage_error
from trinity_workers.engines.megatron.resharding import buckets, plan

SIZES = [1, 2, 4, 8]


def rows_of(world: int, tensor: int) -> list[list[tuple[str, str, TensorSlice]]]:
    """What each rank of a layout holds of two parameters: one cut by rows, one by columns."""
    return [
        [
            (
                "column",
                "float32",
                TensorSlice((rank % tensor * (16 // tensor), 0), (16 // tensor, 3)),
            ),
            ("row", "float32", TensorSlice((0, rank % tensor * (16 // tensor)), (3, 16 // tensor))),
        ]
        for rank in range(world)
    ]


@pytest.mark.parametrize(("mine", "theirs", "replicas"), list(product(SIZES, SIZES, (1, 2, 8))))
def test_copies_cover_every_wanted_slice_once_and_send_only_what_is_lacking(mine, theirs, replicas):
    world = max(mine, theirs) * replicas
    held, wanted = rows_of(world, mine), rows_of(world, theirs)
    copies = plan(held, wanted)
    for target, slices in enumerate(wanted):
        for index, (name, _, place) in enumerate(slices):
            found = [one for one in copies if (one.target, one.target_index) == (target, index)]
            assert coverage_error(place, [one.place for one in found]) is None
            for one in found:
                assert held[one.source][one.source_index][0] == name
    sent = sum(one.nbytes for one in copies if one.source != one.target)
    lacking = 0
    for rank in range(world):
        for (_, _, place), (_, _, own) in zip(wanted[rank], held[rank], strict=True):
            overlap = [
                max(0, min(a + n, b + m) - max(a, b))
                for a, n, b, m in zip(*place, *own, strict=True)
            ]
            lacking += 4 * (place.volume - overlap[0] * overlap[1])
    assert sent == lacking


def test_replicas_share_the_sending():
    held, wanted = rows_of(4, 4), rows_of(4, 1)
    sent = [0] * 4
    for one in plan(held, wanted):
        sent[one.source] += one.nbytes if one.source != one.target else 0
    assert len(set(sent)) == 1


@pytest.mark.parametrize("limit", [1, 47, 48, 100, 400, 10_000])
def test_buckets_hold_all_copies_in_order_within_their_limit(limit):
    copies = plan(rows_of(4, 4), rows_of(4, 1))
    found = list(buckets(copies, limit))
    assert [one for bucket in found for one in bucket] == copies
    for bucket in found:
        sizes = [one.nbytes for one in bucket if one.source != one.target]
        assert sum(sizes) <= limit or len(sizes) == 1


def test_a_slice_that_no_rank_holds_is_refused_by_name():
    with pytest.raises(IncompatibleWeights, match="column cannot be resharded for rank 0"):
        plan([[("column", "float32", TensorSlice((0, 0), (8, 3)))]], rows_of(1, 1))


def test_another_dtype_is_refused():
    held = [[("row", "bfloat16", TensorSlice((0,), (4,)))]]
    wanted = [[("row", "float32", TensorSlice((0,), (4,)))]]
    with pytest.raises(IncompatibleWeights, match="bfloat16, and float32 is wanted"):
        plan(held, wanted)
