"""Slices of tensors for property tests."""

from hypothesis import strategies as st

from trinity_events.weights.slices import TensorSlice


@st.composite
def boxes_in(draw, shape):
    offsets, sides = [], []
    for size in shape:
        begin = draw(st.integers(0, size))
        offsets.append(begin)
        sides.append(draw(st.integers(0, size - begin)))
    return TensorSlice(tuple(offsets), tuple(sides))
