"""The ledger gives each ordinal one fate, and stays small (invariants of ledger.py)."""

from __future__ import annotations

from itertools import pairwise

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.support.errors import raises
from trinity_events.core.ledger import Ledger, LedgerError, ordinals, ranges
from trinity_events.core.limits import KEPT_DROP_REASONS, KEPT_EXCEPTIONS
from trinity_events.core.ordinal_ranges import count, difference, intersection, union

FINGERPRINT = "sha256:" + "1" * 64
FEW = st.sets(st.integers(0, 40))


@given(FEW)
def test_ranges_hold_the_ordinals_that_they_were_made_of(numbers):
    spans = ranges(sorted(numbers, reverse=True))
    assert list(ordinals(spans)) == sorted(numbers)
    assert all(last + 1 < after for (_, last), (after, _) in pairwise(spans))
    assert count(spans) == len(numbers)


@given(FEW, FEW)
def test_arithmetic_of_ranges_is_that_of_sets(numbers, others):
    a, b = ranges(numbers), ranges(others)
    assert union(a, b) == list(ranges(numbers | others))
    assert intersection(a, b) == list(ranges(numbers & others))
    assert difference(a, b) == list(ranges(numbers - others))


class LedgerBesideDict(RuleBasedStateMachine):
    """The ledger, beside a dict of every ordinal's fate: invariants 1 to 3."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(fingerprint=FINGERPRINT)
        self.fates: dict[int, str | None] = {}

    @rule(size=st.integers(1, 8), off=st.sampled_from([0, 0, 0, 1, -1]))
    def dispatch(self, size: int, off: int) -> None:
        first = len(self.fates) + off
        if off:
            with raises(LedgerError, fault="order", expected=len(self.fates)):
                self.ledger.dispatch(first, first + size - 1)
            return
        self.ledger.dispatch(first, first + size - 1)
        self.fates |= dict.fromkeys(range(first, first + size))

    @rule(chosen=st.lists(st.integers(0, 60), max_size=6), reason=st.sampled_from([None, "a", "b"]))
    def settle_strictly(self, chosen: list[int], reason: str | None) -> None:
        before = msgspec.msgpack.encode(self.ledger)
        is_open = [ordinal in self.fates and self.fates[ordinal] is None for ordinal in chosen]
        try:
            if reason is None:
                self.ledger.train(iter(chosen))
            else:
                self.ledger.drop(reason, iter(chosen))
        except LedgerError:
            assert not all(is_open) or len(set(chosen)) < len(chosen)
            assert msgspec.msgpack.encode(self.ledger) == before
        else:
            assert all(is_open)
            assert len(set(chosen)) == len(chosen)
            self.fates |= dict.fromkeys(chosen, reason or "trained")

    @rule(chosen=st.sets(st.integers(0, 60)), reason=st.sampled_from([None, "a", "b"]))
    def settle_those_that_are_open(self, chosen: set[int], reason: str | None) -> None:
        twice, undispatched = self.ledger.settle(reason, ranges(chosen))
        assert list(ordinals(twice)) == sorted(
            ordinal for ordinal in chosen if self.fates.get(ordinal)
        )
        assert list(ordinals(undispatched)) == sorted(chosen - self.fates.keys())
        fated = [ordinal for ordinal in chosen if ordinal in self.fates and not self.fates[ordinal]]
        self.fates |= dict.fromkeys(fated, reason or "trained")

    @rule(share=st.integers(1, 10))
    def settle_the_lowest(self, share: int) -> None:
        lowest = self.ledger.open_ordinals()[:share]
        self.ledger.train(lowest)
        self.fates |= dict.fromkeys(lowest, "trained")

    @rule()
    def restore(self) -> None:
        contract = self.ledger.to_contract(7)
        encoded = msgspec.msgpack.encode(contract)
        self.ledger = Ledger.restored(msgspec.msgpack.decode(encoded, type=type(contract)))

    @rule()
    def load_a_snapshot(self) -> None:
        encoded = msgspec.msgpack.encode(self.ledger)
        self.ledger = msgspec.msgpack.decode(encoded, type=Ledger)

    @invariant()
    def agrees(self) -> None:
        ledger, fates = self.ledger, self.fates
        still = [ordinal for ordinal, fate in fates.items() if fate is None]
        assert ledger.next == len(fates)
        assert ledger.open_ordinals() == still
        assert ledger.open_count == len(still)
        assert ledger.mark == min(still, default=len(fates))
        assert [
            ordinal for ordinal in range(-1, len(fates) + 2) if ledger.is_open(ordinal)
        ] == still
        values = list(fates.values())
        assert ledger.trained == values.count("trained")
        assert ledger.dropped == {
            reason: values.count(reason) for reason in ("a", "b") if reason in values
        }
        assert all(first > ledger.mark for first, _ in ledger.settled)


TestLedgerBesideDict = LedgerBesideDict.TestCase
TestLedgerBesideDict.settings = settings(
    max_examples=60, stateful_step_count=40, derandomize=True, deadline=None, database=None
)


def test_settling_in_order_keeps_no_exception():
    """Invariant 4."""
    ledger = Ledger()
    for step in range(1000):
        ledger.dispatch(step * 8, step * 8 + 7)
        ledger.train(range(step * 8, step * 8 + 8))
    assert (ledger.mark, ledger.next, ledger.settled) == (8000, 8000, [])


def test_a_range_of_any_length_costs_no_more_than_a_short_one():
    ledger = Ledger()
    ledger.dispatch(0, 2**53)
    assert ledger.settle(None, [(1, 2**53)]) == ([], [])
    assert (ledger.open_ordinals(), ledger.trained) == ([0], 2**53)


def test_a_ledger_of_too_many_exceptions_is_refused_and_unchanged():
    """Invariants 3 and 4."""
    ledger = Ledger()
    end = 2 * KEPT_EXCEPTIONS
    ledger.dispatch(0, end + 9)
    ledger.train(range(2, end + 2, 2))
    with raises(LedgerError, fault="exceptions", actual=0, expected=KEPT_EXCEPTIONS):
        ledger.train([end + 2])
    assert (len(ledger.settled), ledger.trained) == (KEPT_EXCEPTIONS, KEPT_EXCEPTIONS)
    ledger.train([0, 1, end + 2])  # The mark passes the exceptions that it reaches.
    assert (ledger.mark, ledger.settled[0]) == (3, (4, 4))
    assert (len(ledger.settled), ledger.settled[-1]) == (KEPT_EXCEPTIONS, (end + 2, end + 2))


def test_reasons_beyond_the_limit_are_counted_together():
    """Invariant 4."""
    ledger = Ledger()
    ledger.dispatch(0, 99)
    for ordinal in range(KEPT_DROP_REASONS + 5):
        ledger.drop(f"reason-{ordinal}", [ordinal])
    assert len(ledger.dropped) == KEPT_DROP_REASONS + 1
    assert ledger.dropped["other"] == 5


def test_errors_name_the_ordinals():
    ledger = Ledger()
    ledger.dispatch(0, 9)
    ledger.train([0, 1, 2, 5])
    with raises(LedgerError, fault="settled", fate="trained", ranges=((1, 2), (5, 5))):
        ledger.train([1, 2, 3, 5])
    with raises(LedgerError, fault="undispatched", fate="dropped (late)", ranges=((10, 10),)):
        ledger.drop("late", [9, 10])
    with raises(LedgerError, fault="settled", fate="trained", ranges=((7, 7),)):
        ledger.train([7, 7])


def test_a_ledger_whose_sums_do_not_add_up_is_not_restored():
    """Invariant 2."""
    ledger = Ledger(fingerprint=FINGERPRINT)
    ledger.dispatch(0, 9)
    ledger.train([0, 3])
    contract = ledger.to_contract(1)
    assert Ledger.restored(contract) == ledger
    with raises(LedgerError, fault="sums", step=1, actual=3, expected=2):
        Ledger.restored(msgspec.structs.replace(contract, trained=3))


def test_a_ledger_without_a_fingerprint_does_not_go_into_a_checkpoint():
    with raises(LedgerError, fault="fingerprint", step=1):
        Ledger().to_contract(1)
