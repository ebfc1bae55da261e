"""A save that the system refuses names the system's error, which torch answers with another."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("megatron.core")

SAVES = """
import resource, signal, sys
from pathlib import Path
import torch
from torch.distributed import checkpoint as dcp
from trinity_events.system.error_text import checkpoint_cause
from trinity_workers.engines.megatron.checkpoint import DurableWriter
from trinity_workers.engines.state_files import write_state

folder = Path(sys.argv[1])
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write past the limit is then an error
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
state = {"weight": torch.ones(1 << 16)}
saves = {
    "state": lambda: write_state(folder / "model.pt", state),
    "shards": lambda: dcp.save(state, storage_writer=DurableWriter(folder / "model")),
}
for name, save in saves.items():
    try:
        save()
    except BaseException as error:
        cause = checkpoint_cause(error)
        print(f"{name}: {type(cause).__name__}: {cause}")
print(*sorted(path.name for path in folder.iterdir()))
"""


@pytest.mark.processes
def test_a_save_past_what_the_system_allows_names_its_error_and_the_path(tmp_path):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SAVES, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    state, shards, left_behind = done.stdout.splitlines()
    assert state == f"state: OSError: [Errno 27] File too large: '{tmp_path}/model.pt'"
    assert shards == f"shards: OSError: [Errno 27] File too large: '{tmp_path}/model'"
    assert left_behind == "model", "no part of a file takes room"
