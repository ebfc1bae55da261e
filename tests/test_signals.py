"""A process that is asked to end ends, wherever the signal meets it."""

import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.processes

PATIENCE = 60

DROPS = """
import gc, os, signal, sys, weakref

def hit(number):
    os.kill(os.getpid(), number)
    for _ in range(1000):  # the interpreter runs handlers between bytecodes
        pass

class Finalized:
    def __init__(self, number):
        self.number = number
    def __del__(self):
        hit(self.number)

def finalizer(number):
    Finalized(number)

def weak_reference(number):
    class Referent: pass
    referent = Referent()
    reference = weakref.ref(referent, lambda _: hit(number))
    del referent

def collector(number):
    def collected(phase, _):
        gc.callbacks.remove(collected)
        hit(number)
    gc.callbacks.append(collected)
    gc.collect()

def wait():
    sys.stdin.read()
"""

COMMAND = """
class Waiting:
    def find_spec(self, name, *_):
        if name == "trinity_events.cli.app":
            {drop}(signal.{number})
            wait()
sys.meta_path.insert(0, Waiting())
from trinity_events.cli import main
main()
"""


def child(code):
    return subprocess.Popen(
        [sys.executable, "-c", DROPS + code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(code):
    """Return the child's status, output and errors; its standard input stays open meanwhile."""
    with child(code) as process:
        try:
            status = process.wait(PATIENCE)
            return status, process.stdout.read(), process.stderr.read()
        finally:
            process.kill()


@pytest.mark.parametrize(("number", "status"), [("SIGTERM", 143), ("SIGINT", 130)])
@pytest.mark.parametrize("drop", ["finalizer", "weak_reference", "collector"])
def test_a_command_ends_even_if_the_interpreter_drops_its_exit(drop, number, status):
    assert ended(COMMAND.format(drop=drop, number=number)) == (status, "", "")


def test_an_exit_that_unwinds_is_not_interrupted_by_more_signals():
    assert ended(
        """
from trinity_events.system.signals import exit_on_signals
exit_on_signals()
try:
    finalizer(signal.SIGTERM)
    wait()
finally:
    hit(signal.SIGTERM)
    finalizer(signal.SIGTERM)
    import time
    time.sleep(0.2)  # longer than a dropped exit takes to be asked for again
    print("cleaned", flush=True)
"""
    ) == (143, "cleaned\n", "")


def test_a_signal_after_an_exit_that_was_suppressed_exits():
    assert ended(
        """
from trinity_events.system.signals import exit_on_signals
exit_on_signals()
try:
    hit(signal.SIGTERM)
except SystemExit:
    print("suppressed", flush=True)
hit(signal.SIGTERM)
wait()
"""
    ) == (143, "suppressed\n", "")


BLOCK = """
from trinity_events.system.signals import exiting_on_signals
hook = sys.unraisablehook
try:
    with exiting_on_signals():
        {block}
finally:
    print("left", sys.unraisablehook is hook, signal.getsignal(signal.SIGTERM).name, flush=True)
    {after}
"""


def test_a_block_ends_even_if_the_interpreter_drops_its_exit():
    code = BLOCK.format(block="finalizer(signal.SIGTERM); wait()", after="")
    assert ended(code) == (143, "left True SIG_DFL\n", "")


def test_a_signal_whose_exit_a_block_dropped_last_ends_the_process():
    code = BLOCK.format(block="finalizer(signal.SIGTERM)", after="wait()")
    status, _, errors = ended(code)
    # It is sent again in the block or after it, as fast as the machine is.
    assert (status, errors) in {(143, ""), (-signal.SIGTERM, "")}


def test_a_second_signal_to_a_block_kills_the_process():
    block = "\n        ".join(
        ["try: hit(signal.SIGTERM)", "finally: hit(signal.SIGTERM); print('cleaned', flush=True)"]
    )
    assert ended(BLOCK.format(block=block, after="")) == (-signal.SIGTERM, "", "")


def test_an_error_of_a_finalizer_is_still_reported():
    status, output, errors = ended(
        """
from trinity_events.system.signals import exit_on_signals
exit_on_signals()
class Failing:
    def __del__(self):
        raise ValueError("of a finalizer")
Failing()
"""
    )
    assert (status, output) == (0, "")
    assert "ValueError: of a finalizer" in errors


def test_signals_cancel_a_block_whose_cleanup_they_do_not_interrupt():
    assert ended(
        """
import anyio
from trinity_events.system.signals import cancelled_by_signals, exit_on_signals
exit_on_signals()
handler = signal.getsignal(signal.SIGTERM)

async def main():
    received = []
    async with cancelled_by_signals(received.append):
        try:
            hit(signal.SIGTERM)
            await anyio.sleep_forever()
        finally:
            hit(signal.SIGTERM)
            hit(signal.SIGINT)
            with anyio.CancelScope(shield=True):
                await anyio.sleep(0.1)
            print("cleaned", received[0], signal.getsignal(signal.SIGTERM) is handler)
    print("left", signal.getsignal(signal.SIGTERM) == handler)

anyio.run(main)
"""
    ) == (0, "cleaned 15 False\nleft True\n", "")


def test_a_command_writes_its_stacks_when_it_is_asked_and_goes_on():
    code = """
class Waiting:
    def find_spec(self, name, *_):
        if name == "trinity_events.cli.app":
            print("up", flush=True)
            wait()
            print("on", flush=True)
sys.meta_path.insert(0, Waiting())
sys.argv = ["trinity-events", "--version"]
from trinity_events.cli import main
main()
"""
    with child(code) as process:
        try:
            assert process.stdout.readline() == "up\n"
            process.send_signal(signal.SIGUSR1)
            output, stacks = process.communicate(timeout=PATIENCE)
        finally:
            process.kill()
    assert "(most recent call first):" in stacks
    assert "in find_spec\n" in stacks
    assert output.startswith("on\ntrinity-events ")
    assert process.returncode == 0
