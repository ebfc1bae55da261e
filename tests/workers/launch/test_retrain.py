"""Training again from a record: samples come back to the bit, and gaps are refused."""

import pytest

pytest.importorskip("pyarrow")

from msgspec.structs import replace

from tests.support.errors import raises
from tests.support.experiences import make_groups
from tests.support.rollout_records import write_record
from trinity_events.errors import RunNotFound
from trinity_schemas import StepRef, Turn
from trinity_workers.config.files import COPY
from trinity_workers.config.sections.rollouts import RolloutsConfig
from trinity_workers.config.train_config import TrainConfig
from trinity_workers.launch.retrain import (
    CannotRetrain,
    StepOrder,
    arrange,
    read_groups,
    retrain,
)

CONFIG = TrainConfig(rollouts=RolloutsConfig(prompts_per_step=3, samples_per_prompt=4))


def with_turns(sample):
    """Return a sample with a second turn, of which two versions sampled the tokens."""
    reply = Turn(role="environment", tokens=[7, 8])
    versions = [(StepRef(1, 0), 1), (StepRef(1, 1), 2)]
    turn = Turn(role="policy", tokens=[9, 10, 11], logprobs=[-1, -2, -3], versions=versions)
    return replace(sample, turns=[*sample.turns, reply, turn], finished=False)


@pytest.fixture
def groups():
    first, *others = make_groups("r", 4, count=3)
    return [[with_turns(sample) for sample in first], *others]


def test_recorded_samples_are_those_that_were_trained_on(tmp_path, policy_folder, groups):
    record = write_record(tmp_path / "r", policy_folder, {1: groups, 2: groups})
    steps = read_groups(record, CONFIG)
    assert [step for step, _ in steps] == [1, 2]
    assert [step_groups for _, step_groups in steps] == [groups, groups]


def test_a_record_with_gaps_is_refused(tmp_path, policy_folder, groups):
    record = write_record(tmp_path / "a", policy_folder, {1: groups, 3: groups})
    with raises(CannotRetrain, fault="steps", step=2):
        read_groups(record, CONFIG)
    record = write_record(tmp_path / "b", policy_folder, {1: groups[:2]})
    with raises(CannotRetrain, fault="samples", step=1, recorded=8, needed=12):
        read_groups(record, CONFIG)


def test_a_run_that_is_not_there_is_named_with_the_place_and_the_nearest_one(tmp_path):
    (tmp_path / "demo-1").mkdir()
    (tmp_path / "demo-1" / COPY).touch()
    refused = {"run_id": "demo-2", "fault": "no folder", "nearest": "demo-1", "root": tmp_path}
    with raises(RunNotFound, **refused):
        retrain("demo-2", root=tmp_path)


def test_steps_are_arranged_and_old_groups_left_out(groups):
    steps = [(1, groups), (2, groups), (3, groups)]
    assert arrange(steps, StepOrder.recorded, None, 0) == steps
    turned = arrange(steps, StepOrder.reversed, 1, 0)
    # The version of step 0 is stale by one at step 2, and by two at step 3.
    assert [step for step, _ in turned] == [2, 1]
    assert sorted(step for step, _ in arrange(steps, StepOrder.shuffled, None, 1)) == [1, 2, 3]
