"""Files and folders that are written under a temporary name, and what interrupts leave of them."""

import dis
import gc
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest

from trinity_events.archive.format import write_file
from trinity_events.system.open_folder import OpenFolder, partial_folder


class _Exit(SystemExit):
    """What a signal raises."""


def _exit_at(place: int, run: Callable[[], None]) -> bool:
    """Raise an exit at a place in ``run`` where signals are handled; False if it has fewer places.

    CPython runs handlers as it enters a function, goes back in a loop, or returns from a call.
    """
    count = 0
    called: dict[FrameType, bool] = {}

    def trace(frame: FrameType, event: str, _: object) -> object:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            name = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            looks = name == "RESUME" or "JUMP_BACKWARD" in name or called.get(frame, False)
            called[frame] = name.startswith("CALL")
            count += looks
            if looks and count == place:
                sys.settrace(None)
                called.clear()
                raise _Exit
        return trace

    before = sys.gettrace()
    gc.disable()  # its callbacks are of other tests, and Python drops what they raise
    sys.settrace(trace)
    try:
        run()
    except _Exit:
        pass
    finally:
        sys.settrace(before)
        gc.enable()
    return count >= place


def _write(folder: Path) -> None:
    with OpenFolder.at(folder) as opened, opened.part("file") as part:
        part.file.write(b"whole")
        part.finish()


def _write_new(folder: Path) -> None:
    with OpenFolder.at(folder) as opened:
        opened.write_new("file", b"whole")


def _write_by_path(folder: Path) -> None:
    write_file(folder / "file", b"whole")


def _make(folder: Path) -> None:
    with partial_folder(folder / "file") as made:
        (made / "result").write_bytes(b"whole")
        (made / "result").rename(folder / "file")


# What an exit interrupts in the standard library is closed by the garbage collector.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("write", [_write, _write_new, _write_by_path, _make])
def test_an_exit_anywhere_leaves_the_whole_file_or_nothing(write, tmp_path):
    write(tmp_path)  # fills caches, so that all runs have the same places
    (tmp_path / "file").unlink()
    place, counts = 1, set()
    while _exit_at(place, lambda: write(tmp_path)):
        files = {file.name: file.is_file() and file.read_bytes() for file in tmp_path.iterdir()}
        assert files in ({}, {"file": b"whole"}), f"after an exit at place {place}"
        counts.add(len(files))
        for name in files:
            (tmp_path / name).unlink()
        place += 1
    assert counts == {0, 1}, "exits came before the file and after it"
