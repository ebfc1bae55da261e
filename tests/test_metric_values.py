"""Metrics of loops arrive as numbers, or are refused by name and cost nothing else."""

import math
from decimal import Decimal
from fractions import Fraction

import pytest

from tests.support.errors import raises
from tests.support.rollout_parts import Parts, answer
from tests.support.waits import PATIENCE
from trinity_events import CheckpointCoordinator, Synchronizer
from trinity_events.log import MemoryEventLog, Publisher, new_producer
from trinity_events.log.memory.event_log import SyncMemoryEventLog
from trinity_events.log.publishing.metric_values import MetricRefused, split_metrics
from trinity_schemas import StepCommitted, StepTrained, decode_envelope

METRICS = {"loss": 0.5, "acc@8": Fraction(1, 2), "note": "0.5", "absent": None}
NUMBERS = {"loss": 0.5, "acc@8": 0.5}
REFUSED = {"note": "str", "absent": "NoneType"}


async def events(log, kind):
    entries = await log.read(limit=1000)
    decoded = [decode_envelope(entry.payload).event for entry in entries]
    return [event for event in decoded if isinstance(event, kind)]


def test_numbers_of_python_numpy_and_torch_are_metrics():
    numpy = pytest.importorskip("numpy")
    torch = pytest.importorskip("torch")
    values = [0.5, Fraction(1, 2), Decimal("0.5"), numpy.float32(0.5), numpy.float64(0.5)]
    values += [numpy.array(0.5), numpy.array([0.5]), torch.tensor(0.5), torch.tensor([[0.5]])]
    values += [torch.tensor(0.5, requires_grad=True), torch.tensor(0.5, dtype=torch.bfloat16)]
    for value in values:
        numbers, refused = split_metrics({"loss": value})
        assert (type(numbers["loss"]), numbers, refused) == (float, {"loss": 0.5}, {})
    whole = {"int": 3, "numpy": numpy.int64(3), "torch": torch.tensor(3), "true": True}
    whole["numpy true"] = numpy.bool_(True)
    numbers, refused = split_metrics(whole)
    assert (list(numbers.values()), refused) == ([3.0, 3.0, 3.0, 1.0, 1.0], {})
    numbers, _ = split_metrics({"loss": math.nan, "norm": torch.tensor(math.inf)})
    assert math.isnan(numbers["loss"])
    assert math.isinf(numbers["norm"])


def test_all_else_is_refused_with_its_name():
    torch = pytest.importorskip("torch")
    values = {"none": None, "text": "0.5", "list": [1.0], "complex": 1j, "huge": 10**400}
    values |= {"two": torch.ones(2), "meta": torch.ones((), device="meta"), 3: object()}
    numbers, refused = split_metrics(values)
    assert numbers == {}
    assert list(refused) == ["none", "text", "list", "complex", "huge", "two", "meta", "3"]
    assert split_metrics(None) == ({}, {})


async def test_a_version_is_committed_without_the_metric_that_is_refused(
    publisher, log, redis_url, weights_url, run_id
):
    weights = Synchronizer(run_id, publisher.epoch, redis_url=redis_url, weights_url=weights_url)
    with raises(MetricRefused, step=3, types=REFUSED):
        weights.commit(3, METRICS)
    weights.flush(PATIENCE)
    weights.close()
    [committed] = await events(log, StepCommitted)
    assert (committed.step, committed.kind, committed.metrics) == (3, "weights", NUMBERS)


async def test_a_checkpoint_is_committed_without_the_metric_that_is_refused():
    memory = MemoryEventLog("run-1")
    sender = Publisher(SyncMemoryEventLog(memory), 1, new_producer("trainer"))
    with pytest.raises(MetricRefused):
        await CheckpointCoordinator(sender).register_and_monitor(3, metrics=METRICS)
    sender.close()
    [committed] = await events(memory, StepCommitted)
    assert (committed.step, committed.kind, committed.metrics) == (3, "checkpoint", NUMBERS)


async def test_a_trained_step_has_its_fates_without_the_metric_that_is_refused(
    client, publisher, log, run_id
):
    parts = Parts(client, publisher, run_id)
    dispatcher = await parts.dispatcher()
    await dispatcher.dispatch(2, parts.version)
    assert await answer(parts.explorer(), 2) == [0, 1]
    groups = await dispatcher.take(2, deadline=PATIENCE)
    with pytest.raises(MetricRefused):
        await dispatcher.trained(1, groups, metrics=METRICS)
    [trained] = await events(log, StepTrained)
    assert (trained.trained, trained.metrics) == (((0, 1),), NUMBERS)
    assert dispatcher.ledger_at(1).trained == 2
