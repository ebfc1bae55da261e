"""Boxes of tensors, held against the tensors themselves."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.slices import boxes_in
from trinity_events.weights.slices import (
    CoverageFault,
    TensorSlice,
    byte_spans,
    contains,
    coverage_error,
    find_chunk,
    full_slice,
    intersection,
)

sizes = st.integers(0, 5)
shapes = st.lists(sizes, max_size=3).map(tuple)


@st.composite
def shapes_and_boxes(draw, count):
    shape = draw(shapes)
    return shape, [draw(boxes_in(shape)) for _ in range(count)]


@st.composite
def cuts(draw):
    """A shape, and boxes that tile it: cut again and again at any place."""
    shape = draw(shapes)
    boxes = [full_slice(shape)]
    for _ in range(draw(st.integers(0, 4)) if shape else 0):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, box.shape[dim]))
        for begin, size in ((0, at), (at, box.shape[dim] - at)):
            offsets, sides = list(box.offsets), list(box.shape)
            offsets[dim] += begin
            sides[dim] = size
            boxes.append(TensorSlice(tuple(offsets), tuple(sides)))
    return shape, draw(st.permutations(boxes))


def marked(shape, box):
    """Which elements of a tensor of this shape are in the box."""
    mask = np.zeros(shape, bool)
    mask[box.inside(full_slice(shape))] = True
    return mask


@given(shapes_and_boxes(2))
def test_what_two_boxes_have_in_common_is_what_both_mark(given_boxes):
    shape, (first, other) = given_boxes
    both = marked(shape, first) & marked(shape, other)
    common = intersection(first, other)
    assert (common is None) == (not both.any())
    if common is not None:
        assert np.array_equal(marked(shape, common), both)
        assert (
            contains(first, common)
            and contains(other, common)
            and contains(full_slice(shape), common)
        )


@given(cuts())
def test_what_was_cut_makes_up_the_whole(cut):
    shape, boxes = cut
    assert coverage_error(full_slice(shape), boxes) is None


@given(cuts(), st.data())
def test_a_hole_or_an_overlap_is_always_found(cut, data):
    shape, boxes = cut
    solid = [box for box in boxes if box.volume]
    if not solid:
        return
    chosen = data.draw(st.sampled_from(solid))
    rest = list(boxes)
    rest.remove(chosen)
    whole = full_slice(shape)
    assert coverage_error(whole, rest) == CoverageFault(missing=chosen.volume, volume=whole.volume)
    assert coverage_error(whole, [*boxes, chosen]).twice_at is not None


@given(shapes_and_boxes(4))
def test_a_cover_is_faultless_exactly_when_each_element_is_marked_once(given_boxes):
    shape, (target, *boxes) = given_boxes
    times = sum(marked(shape, box).astype(int) for box in boxes)[target.inside(full_slice(shape))]
    assert (coverage_error(target, boxes) is None) == bool((times == 1).all())


@given(shapes_and_boxes(1), st.integers(1, 4), st.integers(0, 40))
def test_spans_hold_every_byte_of_the_box_and_no_more_than_the_gap_allows(given_box, item, gap):
    shape, [inner] = given_box
    needed = np.repeat(marked(shape, inner).reshape(-1), item)
    spans = list(byte_spans(full_slice(shape), inner, item, gap))
    read = np.zeros_like(needed)
    for begin, end in spans:
        assert 0 <= begin < end <= len(read)
        read[begin:end] = True
        assert needed[begin] and needed[end - 1], "nothing is read at the ends in vain"
    assert not (needed & ~read).any()
    assert spans == sorted(spans)
    # What is read in vain lies in gaps of less than the bound.
    vain = "".join("x" if is_read else "." for is_read in read & ~needed)
    assert all(len(run) <= gap for run in vain.split(".") if run)


@given(st.integers(0, 40), st.integers(1, 9))
def test_even_chunks_tile_a_dimension_as_torch_cuts_it(size, parts):
    torch = pytest.importorskip("torch")
    pieces = [find_chunk(size, parts, index) for index in range(parts)]
    theirs = [len(piece) for piece in torch.arange(size).chunk(parts)] if size else []
    assert [length for _, length in pieces if length] == theirs
    assert [begin for begin, length in pieces if length] == [
        sum(theirs[:index]) for index in range(len(theirs))
    ]


def test_a_box_says_where_it_lies_in_another():
    assert TensorSlice((4, 2), (2, 3)).inside(TensorSlice((3, 2), (5, 5))) == (
        slice(1, 3),
        slice(0, 3),
    )
    assert TensorSlice((), ()).volume == 1
