"""Claims about parts by tokens: every row once, within the bound, and even."""

from __future__ import annotations

from itertools import combinations, pairwise, product
from math import factorial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.properties.generated import examples
from trinity_workers.algorithms.partition import (
    RowSize,
    balance,
    least_parts,
    padded_tokens,
    partition,
    places,
)

sizes_of_items = st.lists(st.integers(0, 60), max_size=14)
rows = st.lists(st.builds(RowSize, st.integers(1, 9), st.integers(0, 30)), min_size=1, max_size=12)
bounds = st.integers(1, 120)


def tokens_of(part, sizes) -> int:
    return padded_tokens([sizes[row] for row in part])


@examples(200)
@given(rows, bounds, st.integers(0, 6))
def test_every_row_is_in_one_part_and_no_part_of_several_rows_is_above_the_bound(
    sizes, bound, more
):
    count = least_parts(sizes, bound) + more
    parts = partition(sizes, bound, count)
    assert len(parts) == count
    assert sorted(row for part in parts for row in part) == list(range(len(sizes)))
    assert all(len(part) == 1 or tokens_of(part, sizes) <= bound for part in parts)
    assert sum(1 for part in parts if not part) == max(0, count - len(sizes))


@examples(100)
@given(rows, bounds, st.integers(0, 3))
def test_no_other_division_of_the_sorted_rows_has_a_smaller_largest_part(sizes, bound, more):
    count = least_parts(sizes, bound) + more
    parts = partition(sizes, bound, count)
    order = [row for part in parts for row in part]
    assert [sizes[row].tokens for row in order] == sorted(
        (size.tokens for size in sizes), reverse=True
    )

    def largest(cuts: tuple[int, ...]) -> int:
        edges = [0, *cuts, len(order)]
        parts = [order[a:b] for a, b in pairwise(edges)]
        return max(tokens_of(part, sizes) for part in parts)

    cuts = min(count, len(order)) - 1
    best = min(largest(chosen) for chosen in combinations(range(1, len(order)), cuts))
    assert max(tokens_of(part, sizes) for part in parts) == best


@examples(100)
@given(rows, bounds, st.integers(1, 4), st.data())
def test_values_of_all_parts_are_put_back_in_the_order_of_the_rows(sizes, bound, stages, data):
    count = -(-least_parts(sizes, bound) // stages) * stages
    parts = partition(sizes, bound, count)
    padding = [data.draw(st.integers(0 if part else 1, 2)) for part in parts]
    laid_out = [[*part, *[-1] * more] for part, more in zip(parts, padding, strict=True)]
    end_to_end = [row for part in laid_out for row in part]
    positions = places(parts, [len(part) for part in laid_out])
    assert [end_to_end[place] for place in positions] == list(range(len(sizes)))


def test_rows_of_one_length_are_dealt_out_evenly():
    sizes = [RowSize(2, 3)] * 12
    assert [len(part) for part in partition(sizes, 20, 3)] == [4, 4, 4]
    assert [len(part) for part in partition(sizes, 20, 4)] == [3, 3, 3, 3]


def test_a_long_row_is_alone_and_lets_no_other_part_exceed_the_bound():
    sizes = [RowSize(1, 3), RowSize(1, 99), RowSize(1, 3), RowSize(1, 3)]
    assert partition(sizes, 8, 3) == [[1], [0, 2], [3]]


def test_rows_that_need_more_parts_are_refused():
    with pytest.raises(ValueError, match="need 2 parts of 5 tokens do not fit into 1"):
        partition([RowSize(1, 3)] * 2, 5, 1)


def sums_of(parts, sizes) -> list[int]:
    return [sum(sizes[item] for item in part) for part in parts]


@examples(300)
@given(sizes_of_items, st.integers(1, 5))
def test_every_item_is_in_one_part_and_parts_are_even_in_number_and_in_size(sizes, count):
    parts = balance(sizes, count)
    assert len(parts) == count
    assert sorted(item for part in parts for item in part) == list(range(len(sizes)))
    assert all(part == sorted(part) for part in parts)
    numbers = [len(part) for part in parts]
    assert max(numbers) - min(numbers) <= 1
    # The bound of the method: no more than the widest tuple that it begins with.
    order = sorted(sizes, reverse=True) + [0] * (-len(sizes) % count)
    tuples = [order[start : start + count] for start in range(0, len(order), count)]
    widest = max((items[0] - items[-1] for items in tuples), default=0)
    assert max(sums_of(parts, sizes)) - min(sums_of(parts, sizes)) <= widest
    assert balance(list(sizes), count) == parts


@examples(60)
@given(st.lists(st.integers(1, 40), min_size=4, max_size=8))
def test_two_parts_are_near_the_best_of_all_with_as_many_items(sizes):
    def largest(choice: tuple[int, ...]) -> int:
        first = sum(size for size, part in zip(sizes, choice, strict=True) if part)
        return max(first, sum(sizes) - first)

    even = (len(sizes) // 2, -(-len(sizes) // 2))
    choices = [choice for choice in product((0, 1), repeat=len(sizes)) if sum(choice) in even]
    best = min(largest(choice) for choice in choices)
    # The performance ratio of the paper, for parts of up to seven items.
    most = -(-len(sizes) // 2)
    ratio = 2 - sum(factorial(item) for item in range(most)) / factorial(most)
    assert max(sums_of(balance(sizes, 2), sizes)) <= ratio * best + 1e-9


def test_parts_of_answers_of_very_different_length_are_even():
    lengths = [37 * place % 1000 + (7_000 if place % 8 == 0 else 100) for place in range(64)]
    balanced = sums_of(balance(lengths, 8), lengths)
    in_turn = [sum(lengths[part::8]) for part in range(8)]
    assert max(balanced) < 1.01 * min(balanced)
    assert max(in_turn) > 5 * max(balanced)
