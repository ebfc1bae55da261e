"""The plan of a resharding: every wanted element once, and no byte that a rank has itself."""

from __future__ import annotations

from itertools import product

import pytest

pytest.importorskip("torch")

from tests.support.errors import raises
from trinity_events.weights.slices import TensorSlice, coverage_error
from trinity_workers.engines.megatron.resharding import UnreshardableTensor, buckets, plan

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
    sources, targets = rows_of(world, mine), rows_of(world, theirs)
    copies = plan(sources, targets)
    for target, slices in enumerate(targets):
        for index, (name, _, place) in enumerate(slices):
            incoming = [
                copy for copy in copies if (copy.target, copy.target_index) == (target, index)
            ]
            assert coverage_error(place, [copy.place for copy in incoming]) is None
            for copy in incoming:
                assert sources[copy.source][copy.source_index][0] == name
    sent = sum(copy.nbytes for copy in copies if copy.source != copy.target)
    lacking = 0
    for rank in range(world):
        for (_, _, place), (_, _, own) in zip(targets[rank], sources[rank], strict=True):
            overlap = [
                max(0, min(a + n, b + m) - max(a, b))
                for a, n, b, m in zip(*place, *own, strict=True)
            ]
            lacking += 4 * (place.volume - overlap[0] * overlap[1])
    assert sent == lacking


def test_replicas_share_the_sending():
    sources, targets = rows_of(4, 4), rows_of(4, 1)
    sent = [0] * 4
    for copy in plan(sources, targets):
        sent[copy.source] += copy.nbytes if copy.source != copy.target else 0
    assert len(set(sent)) == 1


@pytest.mark.parametrize("limit", [1, 47, 48, 100, 400, 10_000])
def test_buckets_hold_all_copies_in_order_within_their_limit(limit):
    copies = plan(rows_of(4, 4), rows_of(4, 1))
    batches = list(buckets(copies, limit))
    assert [copy for bucket in batches for copy in bucket] == copies
    for bucket in batches:
        sizes = [copy.nbytes for copy in bucket if copy.source != copy.target]
        assert sum(sizes) <= limit or len(sizes) == 1


def test_a_slice_that_no_rank_holds_is_refused_by_name():
    with raises(UnreshardableTensor, fault="coverage", target=0, tensor="column"):
        plan([[("column", "float32", TensorSlice((0, 0), (8, 3)))]], rows_of(1, 1))


def test_another_dtype_is_refused():
    sources = [[("row", "bfloat16", TensorSlice((0,), (4,)))]]
    targets = [[("row", "float32", TensorSlice((0,), (4,)))]]
    with raises(UnreshardableTensor, fault="dtype", dtype="bfloat16", expected="float32"):
        plan(sources, targets)
