"""The short form of ``make hosts``: leases on hosts that are apart, through its faults."""

import pytest

from .clocks import has_clocks
from .network import explain_absence
from .stage import HostStage

LEASE = 1.0

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.processes,
    pytest.mark.server,
    pytest.mark.timeout(300),
]


@pytest.fixture(scope="module")
def stage():
    """A trainer on host a and an explorer on host b, whose clocks are 20 minutes apart."""
    absence = explain_absence()
    if absence:
        pytest.skip(absence)
    with HostStage({"a": -600.0, "b": 600.0} if has_clocks() else {}) as hosts:
        hosts.start_member("a", "trainer", LEASE)
        hosts.seconds_until(lambda state: state.trainer_status == "running")
        hosts.start_member("b", "explorer", LEASE)
        hosts.seconds_until(hosts.is_explorer(0, "running"))
        yield hosts


def test_an_explorer_whose_link_is_cut_is_lost_and_returns_and_the_trainer_continues(stage):
    stage.network["b"].cut()
    stage.seconds_until(stage.is_explorer(0, "lost"))
    reached = stage.state().trainer_step
    stage.seconds_until(lambda state: state.trainer_step >= reached + 5)
    stage.network["b"].heal()
    stage.seconds_until(stage.is_explorer(0, "running"))


def test_a_trainer_whose_link_is_cut_is_silent_and_returns_in_its_epoch(stage):
    stage.network["a"].cut()
    stage.seconds_until(lambda state: state.trainer_status == "silent")
    reached = stage.state().trainer_step
    stage.network["a"].heal()
    stage.seconds_until(
        lambda state: state.trainer_status == "running" and state.trainer_step >= reached + 5
    )
    assert stage.state().epoch == 1


def test_packets_that_are_late_or_lost_end_no_lease(stage):
    with stage.network["b"].impaired(delay=0.05, loss=0.01):
        reached = stage.state().trainer_step
        # Three leases, by the steps of the trainer.
        stage.seconds_until(lambda state: state.trainer_step >= reached + 3 * LEASE / 0.1 * 0.8)
        assert stage.is_explorer(0, "running")(stage.state())


def test_a_host_that_is_off_is_named_and_another_start_of_its_trainer_is_followed(stage):
    stage.network["a"].power_off()
    stage.seconds_until(lambda state: state.trainer_status == "silent")
    cause = stage.find_silence("d")
    assert (cause["process"], cause["host"]) == ("trainer-0", "host-a")
    stage.network["a"].boot()
    stage.start_member("a", "trainer", LEASE)
    stage.seconds_until(lambda state: state.epoch == 2 and state.trainer_status == "running")
