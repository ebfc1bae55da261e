"""Saves in the background or at once, each told to the log as it starts, finishes or fails."""

from __future__ import annotations

import hashlib
import logging
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path

import anyio.to_thread

from trinity_schemas import (
    Kind,
    Registration,
    SaveFailed,
    SaveFinished,
    SaveStarted,
    Slot,
    StepCommitted,
    ThreadCountRegistered,
)

from ..errors import PublishError, SaveError
from ..log import Publisher

logger = logging.getLogger(__name__)

_LONGEST_MESSAGE = 2000


class CheckpointCoordinator:
    """Runs saves and publishes what becomes of them.

    The four calls and their meanings are those of Trinity-RFT's coordinator, with two
    differences: a save that fails is an event, and :meth:`wait_all` raises it.

    Args:
        publisher: Who publishes; its role and rank name the slots.
        run_folder: The run's checkpoint directory. Paths in events are relative to it.
    """

    def __init__(self, publisher: Publisher, run_folder: Path | None = None) -> None:
        self._publisher = publisher
        self._run_folder = run_folder
        self._threads: dict[str, threading.Thread] = {}
        self._failures: list[tuple[str, BaseException]] = []
        self._lock = threading.Lock()

    def save_async(
        self,
        name: str,
        save_fn: Callable[[], None],
        global_step: int,
        is_state_dict: bool = False,
        *,
        path: Path | str | None = None,
    ) -> None:
        """Run ``save_fn`` in a background thread, with its events.

        Saves of one name are serialised: this waits for the one before it.

        Args:
            name: Name of the save within this worker, such as ``"model_state_dict"``.
            save_fn: Does the I/O. What it raises fails the save.
            global_step: The training step.
            is_state_dict: Whether it is a state dict for weight sync, not part of a checkpoint.
            path: The file or folder that it writes, when it lies in the run's directory.
        """
        self._join(name)
        slot = self._slot(name, global_step, is_state_dict)

        def run() -> None:
            try:
                self._save(slot, save_fn, path)
            except BaseException as error:
                logger.exception("background save %s of step %d failed", name, global_step)
                with self._lock:
                    self._failures.append((f"{name} of step {global_step}", error))

        # Not a daemon: a process that ends waits for its saves to be whole.
        thread = threading.Thread(target=run, name=f"save-{name}-step-{global_step}")
        self._threads[name] = thread
        thread.start()

    def save_sync(
        self,
        save_fn: Callable[[], None],
        global_step: int,
        is_state_dict: bool = False,
        *,
        name: str = "save_sync",
        path: Path | str | None = None,
    ) -> None:
        """Run ``save_fn`` in this thread, with its events; raises what it raises.

        For saves that must run on the training thread, because barriers are part of them.
        """
        self._save(self._slot(name, global_step, is_state_dict), save_fn, path)

    def wait_all(self) -> None:
        """Wait for all background saves.

        Raises:
            SaveError: when any failed since the last call, naming the first and holding all.
        """
        for name in list(self._threads):
            self._join(name)
        with self._lock:
            failures, self._failures = tuple(self._failures), []
        if failures:
            more = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
            what, first = failures[0]
            raise SaveError(
                f"background save {what} failed{more}: {type(first).__name__}: {first}: "
                "mend that, and save the step again; until then it is not ready",
                tuple(error for _, error in failures),
            ) from first

    async def register_and_monitor(
        self,
        global_step: int,
        is_state_dict: bool = False,
        state_dict_thread_count: int = 0,
        checkpoint_thread_count: int = 0,
        *,
        metrics: dict[str, float] | None = None,
    ) -> None:
        """Register how many saves to expect of a step, and commit it.

        To be called once the saves are dispatched; they may be anywhere between not started and
        finished. The kind that is committed is registered in any case: a count of zero says
        that there is nothing to wait for.

        Args:
            global_step: The training step.
            is_state_dict: Whether to commit its state dict, not its checkpoint.
            state_dict_thread_count: State-dict saves to expect, over all workers.
            checkpoint_thread_count: Checkpoint saves to expect, over all workers.
            metrics: The training step's metrics, for those who watch.
        """
        kind: Kind = "state_dict" if is_state_dict else "checkpoint"
        counts: list[tuple[Kind, int]] = [
            ("state_dict", state_dict_thread_count),
            ("checkpoint", checkpoint_thread_count),
        ]
        who = self._publisher.producer
        # One id for each registrar: saving a step again, after a failure, expects no more of it.
        registrations = tuple(
            Registration(registration_id=f"{who.role}-{who.rank}-{one}", kind=one, expected=count)
            for one, count in counts
            if count or one == kind
        )
        await anyio.to_thread.run_sync(
            self._commit, global_step, kind, registrations, metrics or {}
        )

    def _commit(
        self,
        step: int,
        kind: Kind,
        registrations: tuple[Registration, ...],
        metrics: dict[str, float],
    ) -> None:
        for registration in registrations:
            self._publisher.publish(ThreadCountRegistered(step=step, registration=registration))
        self._publisher.publish(
            StepCommitted(step=step, kind=kind, registrations=registrations, metrics=metrics)
        )

    def _slot(self, name: str, step: int, is_state_dict: bool) -> Slot:
        who = self._publisher.producer
        kind: Kind = "state_dict" if is_state_dict else "checkpoint"
        return Slot(step=step, kind=kind, role=who.role, rank=who.rank, name=name)

    def _save(self, slot: Slot, save_fn: Callable[[], None], path: Path | str | None) -> None:
        save_id = secrets.token_hex(8)
        relative = self._relative(path)
        self._publisher.publish(SaveStarted(save_id=save_id, slot=slot, path=relative))
        began = time.monotonic()
        try:
            save_fn()
            nbytes, digest = _measure(Path(path)) if path is not None else (0, None)
        except BaseException as error:
            self._tell_failure(save_id, slot, error)
            raise
        self._publisher.publish(
            SaveFinished(
                save_id=save_id,
                slot=slot,
                path=relative,
                bytes=nbytes,
                seconds=time.monotonic() - began,
                digest=digest,
            )
        )

    def _tell_failure(self, save_id: str, slot: Slot, error: BaseException) -> None:
        failed = SaveFailed(
            save_id=save_id,
            slot=slot,
            error_type=type(error).__name__,
            message=str(error)[:_LONGEST_MESSAGE],
        )
        try:
            self._publisher.publish(failed)
        except PublishError:
            # The save's own error is the one that its caller must see.
            logger.exception("the failure of save %s could not be published", slot.name)

    def _relative(self, path: Path | str | None) -> str | None:
        """The path as events have it; None when it lies elsewhere, where nothing is promoted."""
        if path is None or self._run_folder is None:
            return None
        full, root = Path(path).resolve(), self._run_folder.resolve()
        return str(full.relative_to(root)) if full.is_relative_to(root) else None

    def _join(self, name: str) -> None:
        thread = self._threads.pop(name, None)
        if thread is not None:
            thread.join()


def _measure(path: Path) -> tuple[int, str | None]:
    """Bytes of a file or a folder, and a file's digest. Raises OSError when it is not there."""
    if path.is_dir():
        return sum(one.stat().st_size for one in path.rglob("*") if one.is_file()), None
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return path.stat().st_size, f"sha256:{digest}"
