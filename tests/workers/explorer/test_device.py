"""Device of an explorer: the one that is asked for and seen, else a GPU, else the CPU."""

import pytest

torch = pytest.importorskip("torch")

from tests.support.errors import raises  # noqa: E402
from trinity_workers.explorer.device import DeviceMissing, choose_device  # noqa: E402


@pytest.mark.parametrize(
    ("device", "count", "chosen"),
    [
        (None, 0, "cpu"),
        (None, 2, "cuda:0"),
        ("cpu", 2, "cpu"),
        ("cuda", 1, "cuda:0"),
        ("cuda:1", 2, "cuda:1"),
    ],
)
def test_it_takes_what_is_asked_for_else_the_first_gpu(monkeypatch, device, count, chosen):
    current = pretend(monkeypatch, count)
    assert choose_device(device) == chosen
    assert current == ([] if chosen == "cpu" else [int(chosen[-1])]), "a group takes this one"


@pytest.mark.parametrize(("device", "count"), [("cuda", 0), ("cuda:2", 2)])
def test_a_gpu_that_is_not_seen_is_refused(monkeypatch, device, count):
    pretend(monkeypatch, count)
    with raises(DeviceMissing, device=device, count=count):
        choose_device(device)


def pretend(monkeypatch, count):
    """Let torch see a number of GPUs; return the indices that are made the current one."""
    current = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    return current
