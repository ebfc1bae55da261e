"""Names in a run's directory are parsed as they are formatted, and foreign names are refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trinity_events.checkpoints import layout

numbers = st.integers(0, 10**12)
tokens = st.text("0123456789abcdef", min_size=8, max_size=8)


@given(numbers)
def test_a_final_name_gives_its_step(step):
    assert layout.parse_final_name(layout.final_name(step)) == step


@given(numbers, numbers, tokens, numbers)
def test_a_staged_name_gives_its_epoch_and_step(epoch, step, token, replaced):
    name = layout.staged_name(epoch, step, token)
    made = layout.StagedFolder(name, epoch, step)
    assert layout.parse_staged_name(name) == made
    assert layout.parse_made_from(layout.format_staged_path(name)) == made
    old = layout.replaced_name(name, layout.final_name(replaced))
    assert layout.parse_staged_name(old) == layout.StagedFolder(old, epoch, step, replaced)
    assert layout.parse_made_from(layout.format_staged_path(old)) is None


@given(numbers, numbers, numbers, tokens, st.integers(1, 10**9))
def test_a_name_in_the_trash_gives_the_fence_of_its_leader(epoch, step, at, token, fence):
    staged = layout.staged_name(epoch, step, token)
    final = layout.final_name(step)
    for name in (final, staged, layout.replaced_name(staged, final)):
        assert layout.parse_trashed_name(layout.trashed_name(name, at, fence)) == fence


@pytest.mark.parametrize("after_gap", [False, True])
def test_a_segment_name_gives_its_parts(after_gap):
    name = layout.SegmentName("events", "1-0", "7-3", 12, after_gap)
    assert layout.parse_segment_name(str(name)) == name
    assert layout.is_unfinished_segment(f".{name}.0123456789abcdef.part", "events")
    assert not layout.is_unfinished_segment(str(name), "events")


def test_a_segment_name_of_an_older_format_has_no_count():
    name = layout.parse_segment_name("events.1-0.7-3.jsonl")
    assert name == layout.SegmentName("events", "1-0", "7-3", None)


@pytest.mark.parametrize(
    "name", ["", "global_step_", "global_step_1x", "by-hand", "epoch_1_step_2", "epoch_1_step_2_zz"]
)
def test_a_foreign_name_is_refused(name):
    assert layout.parse_final_name(name) is None
    assert layout.parse_staged_name(name) is None
    assert layout.parse_trashed_name(name) is None
    assert layout.parse_made_from(layout.format_staged_path(name)) is None


@pytest.mark.parametrize("name", ["events", "events.jsonl", "events.1-0.7-3.1.2.jsonl"])
def test_a_foreign_segment_name_is_refused(name):
    with pytest.raises(ValueError, match=r"segment|unpack|values"):
        layout.parse_segment_name(name)


@pytest.mark.parametrize(
    ("path", "folder"),
    [
        (".staging/epoch_1_step_2_ab/actor/model.pt", ".staging/epoch_1_step_2_ab"),
        (".staging/mine", ".staging/mine"),
        (".staging", None),
        (".staging/../x", None),
        ("global_step_1/x", None),
        (None, None),
    ],
)
def test_a_path_gives_its_staged_folder(path, folder):
    assert layout.parse_staged_folder(path) == folder
