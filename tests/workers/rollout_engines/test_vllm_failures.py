"""Errors of vLLM's workers, as the engine's process raises them again. vLLM is not needed."""

import pytest

pytest.importorskip("torch")

from tests.support.errors import assert_attributes
from trinity_events.errors import CorruptVersion, VersionNotStored, VersionUnavailable
from trinity_events.weights.errors import CorruptChunk
from trinity_schemas import StepReady, StepRef
from trinity_workers.rollout_engines import NotServing
from trinity_workers.rollout_engines.vllm.engine import VLLMEngine, _fetch_error
from trinity_workers.rollout_engines.vllm.reports import WorkerFailure

READY = StepReady(epoch=1, step=4, kind="weights", caused_by="1-0")


@pytest.mark.parametrize(
    ("error", "base", "attributes"),
    [
        (VersionNotStored("weights of step 4", fault="server"), VersionUnavailable, {}),
        (
            CorruptChunk(1, 2, version="weights of step 4", harm="nothing was installed"),
            CorruptVersion,
            {"rank": 1, "chunk": 2},
        ),
    ],
)
def test_an_error_of_a_worker_keeps_its_kind_and_its_text(error, base, attributes):
    raised = _fetch_error(WorkerFailure.of(error), READY)
    assert isinstance(raised, base)
    assert_attributes(raised, reason=str(error), **attributes)


def test_weights_of_the_folder_are_no_version_whatever_is_believed_to_be_served():
    engine = object.__new__(VLLMEngine)
    engine.serves, engine._base = StepRef(1, 4), None
    # A core that started again is back with the weights of its folder, and their label.
    with pytest.raises(NotServing):
        engine._version_of_label("default")
    assert engine._version_of_label("1/3") == StepRef(1, 3)
