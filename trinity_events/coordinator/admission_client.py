"""Client of save admission: requests a turn and waits for its grant."""

from __future__ import annotations

import time

from trinity_schemas import (
    ContractError,
    SaveGranted,
    SaveRequested,
    Slot,
    decode_envelope,
)

from ..errors import BufferFull, StaleEpoch, TrinityError, TurnNotGranted
from ..log import Publisher, SyncEventLog
from ..log.redis.error_replies import reply_text
from ..log.retry import backoff_delays, is_transient
from ..replay import announced
from .timeouts import SaveTimeouts

_LONGEST_PAUSE = 2.0  # seconds: a server that is back is asked within this time


def wait_for_turn(
    publisher: Publisher,
    request: SaveRequested,
    deadline: float,
    timeouts: SaveTimeouts = SaveTimeouts(),
) -> None:
    """Publish the request and wait for its grant, even while the server is away or restarts.

    Raises:
        TurnNotGranted: after ``deadline`` seconds, or if the server refuses the read.
        StaleEpoch: if the run has a newer epoch by now.
        PublishError: if the server refuses the request permanently.
    """
    what = f"a turn to save {request.slot.name} of step {request.slot.step}"
    # The report makes a long wait for a turn visible in the log (decision 24).
    with publisher.waits.waiting(what, deadline=deadline, step=request.slot.step):
        _wait_for_turn(publisher, request, deadline, timeouts)


def _wait_for_turn(
    publisher: Publisher, request: SaveRequested, deadline: float, timeouts: SaveTimeouts
) -> None:
    # The monotonic clock: a clock that is set back must not prolong the deadline.
    began = asked_at = time.monotonic()
    fault = _publish_request(publisher, request, began + deadline)
    faults = backoff_delays(_LONGEST_PAUSE)
    while (remaining := began + deadline - time.monotonic()) > 0:
        try:
            # Each grant has its own key, because a thousand readers of the announcements would cost
            # a million deliveries (decision 10).
            if publisher.log.granted(request.save_id, min(remaining, timeouts.grant_read)):
                return
            # The server answered: the next outage begins with short pauses again.
            fault, faults = None, backoff_delays(_LONGEST_PAUSE)
            # A fold of a newer epoch never grants a request of an older one: waiting longer is
            # useless.
            if publisher.log.epoch() > publisher.epoch:
                break
            # The fold may have dropped the request while this process could not renew its
            # heartbeat.
            if time.monotonic() - asked_at >= timeouts.request_again:
                asked_at = time.monotonic()
                fault = _publish_request(publisher, request, began + deadline)
        # Any error is kept, so that the refusal names the last one as its cause.
        except Exception as error:
            fault = error
            if not is_transient(error):
                break
            time.sleep(min(remaining, next(faults)))
    raise _refusal(publisher, request.slot, time.monotonic() - began, fault) from fault


def _publish_request(
    publisher: Publisher, request: SaveRequested, give_up: float
) -> Exception | None:
    """Publish the request once the buffer has room; return the error if it never has."""
    faults = backoff_delays(_LONGEST_PAUSE)
    while True:
        try:
            publisher.publish(request)
            return None
        # A full buffer drains once the server is back; other publish errors are permanent.
        except BufferFull as error:
            remaining = give_up - time.monotonic()
            if remaining <= 0:
                return error
            time.sleep(min(remaining, next(faults)))


def _refusal(
    publisher: Publisher, slot: Slot, waited: float, fault: Exception | None
) -> TrinityError:
    run_id = publisher.run_id
    what = f"{slot.name} of step {slot.step}"
    epoch, turn = publisher.epoch, None
    # After a failed read another read would only wait for the same server.
    if fault is None:
        try:
            epoch, turn = _last_turn(publisher.log, max(epoch, publisher.log.epoch()))
        except Exception as error:  # this read only explains the failure
            fault = error
    if epoch > publisher.epoch:
        return StaleEpoch(run_id, publisher.epoch, epoch, what)
    last = None
    if fault is not None:
        why = f"the server of the log could not be read ({reply_text(fault)})"
    elif turn is None:
        why = f"no save was given one: is a reducer running for run {run_id}?"
    else:
        last = f"{turn.name} of step {turn.step} of {turn.role}-{turn.rank}"
        why = f"the last went to {last}: see trinity-events explain {run_id} {turn.step}"
    return TurnNotGranted(
        f"{what} was given no turn to save",
        round(waited, 1),
        why,
        run_id=run_id,
        step=slot.step,
        last=last,
    )


def _last_turn(log: SyncEventLog, epoch: int) -> tuple[int, Slot | None]:
    """Return the newest epoch of the announcements, and the slot of its newest grant."""
    turn = None
    for entry in announced(log):
        try:
            envelope = decode_envelope(entry.payload)
        # An entry that is no event must not hide the reason for which the turn was refused.
        except ContractError:
            continue
        # Grants of earlier epochs say nothing about the queue of this one.
        if envelope.epoch > epoch:
            epoch, turn = envelope.epoch, None
        if isinstance(envelope.event, SaveGranted) and envelope.epoch == epoch:
            turn = envelope.event.slot
    return epoch, turn
