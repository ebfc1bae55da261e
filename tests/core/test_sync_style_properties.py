"""The property of each sync style holds for a log of that style, and for none of the others."""

import pytest

from tests.support.event_histories import History, opened
from tests.support.style_properties import PROPERTIES, reissued, stalest
from trinity_schemas import (
    ReissuedRollout,
    RolloutsDispatched,
    StepReady,
    StepRef,
    StepTrained,
    SyncRequested,
)


class Log(History):
    """Log of a run with two prompts a step, each with two samples."""

    @property
    def envelopes(self):
        return [envelope for _, envelope in self.entries]

    def ask(self, step, version, *, exact=False):
        ordinals = ((2 * step - 2, 2 * step - 1),)
        self.add(RolloutsDispatched(ordinals=ordinals, oldest=StepRef(1, version), exact=exact))

    def publish(self, version):
        self.add(opened(version))
        ready = StepReady(epoch=1, step=version, kind="weights", caused_by="1-0")
        self.add(ready, by="reducer")

    def train(self, step, late=0):
        ordinals = ((2 * step - 2, 2 * step - 1),)
        self.add(StepTrained(step=step, trained=ordinals, staleness={late: 4}))


def fixed():
    log = Log()
    for step in (1, 2, 3):
        log.ask(step, step - 1, exact=True)
        log.publish(step - 1)
        log.train(step)
    log.publish(3)
    return log


def trainer_driven():
    log = Log()
    log.ask(1, 0)
    for step in (1, 2, 3):
        log.ask(step + 1, step - 1)
        log.publish(step - 1)
        log.train(step, late=min(step - 1, 1))
    log.publish(3)
    return log


def explorer_driven():
    log = Log()
    for step in (1, 2, 3):
        if step > 1:
            log.add(SyncRequested(oldest_version=StepRef(1, step - 1)), by="explorer")
        log.ask(step, step - 1)
        log.publish(step - 1)
        log.train(step)
    log.publish(3)
    return log


def fully_async():
    log = Log()
    for step in (1, 2, 3):
        log.publish(step - 1)
        log.ask(step, step - 1)
        log.train(step)
    log.publish(3)
    return log


LOGS = {
    "fixed": fixed,
    "trainer_driven": trainer_driven,
    "explorer_driven": explorer_driven,
    "fully_async": fully_async,
}


@pytest.mark.parametrize("style", LOGS)
def test_a_log_of_a_style_has_the_property_of_no_other(style):
    log = LOGS[style]().envelopes
    assert {name for name, holds in PROPERTIES.items() if holds(log)} == {style}


def test_a_sample_of_another_version_than_its_request_names_is_not_of_the_style_fixed():
    log = fixed()
    log.ask(4, 3, exact=True)
    log.train(4, late=1)
    assert not PROPERTIES["fixed"](log.envelopes)


def test_a_prompt_that_was_issued_again_counts_with_its_last_request():
    log = fixed()
    log.ask(4, 2, exact=True)
    again = [ReissuedRollout(ordinal=ordinal, attempt=2, reason="superseded") for ordinal in (6, 7)]
    log.add(RolloutsDispatched(reissued=tuple(again), oldest=StepRef(1, 3), exact=True))
    log.train(4)
    assert PROPERTIES["fixed"](log.envelopes)
    assert reissued(log.envelopes) == {"superseded": 2}


def test_without_any_of_its_requests_a_log_is_not_of_the_style_explorer_driven():
    log = explorer_driven().envelopes
    requests = [entry for entry in log if isinstance(entry.event, SyncRequested)]
    assert len(requests) == 2
    for request in requests:
        assert not PROPERTIES["explorer_driven"]([other for other in log if other is not request])


def test_a_single_early_request_is_not_of_the_style_fully_async():
    log = fully_async()
    log.ask(4, 4)
    log.publish(4)
    assert not PROPERTIES["fully_async"](log.envelopes)


def test_the_stalest_sample_is_found():
    assert (stalest(trainer_driven().envelopes), stalest(fixed().envelopes)) == (1, 0)
