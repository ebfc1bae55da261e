"""Plugin that vLLM calls in each of its processes: it registers the way of the weights.

It imports nothing heavy: every process of an installation with this package calls it.
"""

from __future__ import annotations

import os
import select
import signal
import threading

BACKEND = "trinity"
"""Name of the weight-transfer engine, for vLLM's WeightTransferConfig."""
OWNER = "TRINITY_VLLM_OWNER"
"""Environment variable with the process id of the explorer, whose end ends vLLM's processes."""


def register() -> None:
    """Register the weight-transfer engine; entry point of the group `vllm.general_plugins`."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    # vLLM may load its plugins several times in one process, and refuses a second engine.
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "trinity_workers.rollout_engines.vllm.transfer", "PulledWeights"
        )
    end_with_owner()


def end_with_owner() -> None:
    """End this process with the explorer: vLLM's core outlives a parent that was killed."""
    owner = os.environ.get(OWNER)
    # The explorer's own process loads the plug-ins of vLLM too.
    if owner is None or int(owner) == os.getpid():
        return
    try:
        # A descriptor, since the number of a process that ended is given to another one.
        descriptor = os.pidfd_open(int(owner))
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGKILL)
        return

    def watch() -> None:
        select.select([descriptor], [], [])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name="trinity-owner").start()
