"""Steps of a record, by the names of its files alone."""

from trinity_events.record.files import EpochMark, RecordFile, find_steps, parse_file_name


def names(*files: RecordFile, marks: dict[int, int]) -> list[str]:
    return [
        *(file.name for file in files),
        *(EpochMark(epoch, step).name for epoch, step in marks.items()),
        ".step_9_epoch_1_rank_0.parquet.tmp",
    ]


def test_a_name_is_parsed_back_and_foreign_names_are_not():
    file = RecordFile(epoch=3, step=12, rank=1)
    assert parse_file_name(file.name) == file
    assert parse_file_name(f".{file.name}.tmp") is None
    assert parse_file_name(f"{file.name}.old") is None


def test_steps_that_a_later_epoch_took_again_are_superseded():
    """Invariant 2."""
    files = [RecordFile(1, step, rank) for step in (1, 2, 3, 4) for rank in (1, 0)]
    files += [RecordFile(2, 3, 0), RecordFile(3, 3, 0)]
    steps = find_steps(names(*files, marks={1: 0, 2: 2, 3: 2}))
    assert [(step.epoch, step.step, step.is_current) for step in steps] == [
        (1, 1, True),
        (1, 2, True),
        (1, 3, False),
        (1, 4, False),
        (2, 3, False),
        (3, 3, True),
    ]
    assert [file.rank for file in steps[0].files] == [0, 1]


def test_a_step_is_superseded_before_its_epoch_has_recorded_one():
    """Invariant 2."""
    steps = find_steps(names(RecordFile(1, 5, 0), marks={1: 0, 2: 4}))
    assert [step.is_current for step in steps] == [False]
