"""Combinations of ``make matrix``, and the faults that it finds in a log."""

import json

import pytest

pytest.importorskip("torch")

from tests.matrix.combinations import Combination, combinations
from tests.matrix.matrix_run import LATE, REWARD, STEPS, judged, settings
from trinity_schemas import (
    AppliedPhases,
    Envelope,
    Producer,
    RolloutsDispatched,
    StepReady,
    StepRef,
    StepTrained,
    WeightsApplied,
)
from trinity_workers.config.files import read_config
from trinity_workers.learning.policy import create_policy

DIGEST, OTHER = (f"sha256:{digit * 64}" for digit in "12")
COMBINATION = Combination("fsdp", "memory", "fully_async")


def log_of(*events):
    """Return events of rank 0, or of the rank that they come with, as envelopes."""
    pairs = [event if isinstance(event, tuple) else (event, 0) for event in events]
    return [
        Envelope(
            run_id="run",
            epoch=1,
            producer=Producer(role="explorer", rank=rank, node="here", incarnation=f"of-{rank}"),
            sequence=number,
            occurred_at=1.0,
            event=event,
        )
        for number, (event, rank) in enumerate(pairs, 1)
    ]


def ready(step, digest=DIGEST):
    return StepReady(epoch=1, step=step, kind="weights", caused_by="1-0", version_digest=digest)


def applied(step, rank, digest=DIGEST):
    event = WeightsApplied(
        version=StepRef(1, step),
        digest=digest,
        bytes=8,
        verified_at=1.0,
        phases=AppliedPhases(fetch=0.1, pause=0.1),
    )
    return event, rank


def trained(step):
    return StepTrained(step=step, trained=((step, step),), staleness={0: 4})


SOUND = [
    ready(0),
    RolloutsDispatched(ordinals=((0, STEPS),), oldest=StepRef(1, 0), fingerprint=DIGEST),
    *(trained(step) for step in range(1, STEPS + 1)),
    ready(STEPS),
    *(applied(STEPS, rank) for rank in range(LATE + 1)),
]


def faults_of(*events):
    return judged(COMBINATION, log_of(*events), [], seconds=1.0).faults


VLLM_ROWS = {
    *(
        f"vllm-fsdp-{method}-{style}"
        for method in ("memory", "checkpoint")
        for style in ("fixed", "trainer_driven", "explorer_driven", "fully_async")
    ),
    *(f"vllm-megatron-{method}-trainer_driven" for method in ("memory", "checkpoint")),
}
"""Rows with explorers of vLLM, whose workers are no members of a collective group."""


def test_each_allowed_combination_is_run_on_fsdp_and_each_method_on_megatron():
    names = [combination.name for combination in combinations()]
    assert len(set(names)) == len(names)
    assert "fsdp-nccl-fully_async" not in names
    megatron = {name for name in names if "megatron" in name}
    assert {name for name in names if name.startswith("vllm")} == VLLM_ROWS
    assert (len(names) - len(VLLM_ROWS), len(megatron - VLLM_ROWS)) == (14, 3)


@pytest.mark.parametrize(
    "combination", list(combinations()), ids=lambda combination: combination.name
)
def test_the_file_of_each_run_is_one_that_train_reads(combination, tmp_path):
    (tmp_path / "reward.py").write_text(REWARD)
    create_policy(tmp_path / "model", seed=0)
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(settings(combination, tmp_path / "model")))
    assert read_config(file).problems == []


def test_a_sound_log_has_no_fault_and_is_told_in_one_line():
    result = judged(COMBINATION, log_of(*SOUND), [], seconds=1.0)
    assert (result.faults, result.holds, result.steps) == ([], ["fully_async"], STEPS)
    assert result.applied == {"explorer-0": 1, "explorer-1": 1, "explorer-2": 1}
    assert f"joined at version {STEPS}" in result.line()


def test_what_is_not_as_it_must_be_is_named():
    assert faults_of(*SOUND[:-1], applied(STEPS, LATE, OTHER)) == [
        f"explorer-{LATE} served other bytes of step {STEPS}"
    ]
    assert faults_of(*SOUND[:-1], applied(0, LATE)) == [
        f"explorer-{LATE} ended with the version of step 0"
    ]
    assert faults_of(*SOUND[:-1]) == ["explorer-0, explorer-1 served versions"]
    assert faults_of(*SOUND[1:], ready(0)) == ["the log has the properties of trainer_driven"]
