"""Runs of `train` whose processes are killed amid updates, and the oracle of what they recorded."""

from __future__ import annotations

import json
import os
import random
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tests.matrix.matrix_run import started
from tests.support.sessions import find_process, session_members
from tests.support.style_properties import serving_faults
from tests.support.update_reports import EXTENSION, REPORTS, SECONDS
from tests.support.vllm_server import VLLMServer
from tests.support.waits import wait_until
from tests.support.whole_logs import ledger_faults, whole_log
from trinity_events import Synchronizer
from trinity_events.errors import VersionUnavailable
from trinity_events.rollouts.payloads import PayloadFault, SharedMemoryPayloadReader, load_group
from trinity_events.server import connect_sync
from trinity_schemas import (
    Experience,
    ExperienceReference,
    RunKeys,
    StepReady,
    StepRef,
    decode_envelope,
)
from trinity_schemas.codec import decode_reference

PROMPTS, SAMPLES = 4, 4
DEADLINE = 600.0
"""Seconds within which a run gets on after a kill, vLLM's start on a loaded machine included."""
TOLERANCE = 1e-4
"""Nats by which another order of sums may change a log-probability, in float32."""
ENGINES: dict[str, dict[str, Any]] = {
    "vllm": {
        "engine_args": {
            "max_num_seqs": 16,
            "kv_cache_memory_bytes": 1 << 27,
            "worker_extension_cls": EXTENSION,
        }
    },
    "vllm-server": {},
}
VICTIMS = {
    "vllm": ("core", "explorer", "trainer"),
    "vllm-server": ("server", "explorer", "trainer"),
}
MODES = {
    "wait": "fixed",
    "keep": "trainer_driven",
    "retract": "trainer_driven",
    "abort": "trainer_driven",
}
"""Sync style with which each treatment of unfinished turns is tried; a server has no `abort`."""
REWARDS = """
def vowels(question, answer):
    return sum(letter in "aeiou" for letter in answer.text) / 12
"""


class Recorder:
    """Record of a run that outlives its processes: each version's weights, and all answers."""

    def __init__(self, redis_url: str, run_id: str) -> None:
        self.versions: dict[StepRef, dict[str, torch.Tensor]] = {}
        self.answers: list[Experience] = []
        self._references: dict[tuple[Any, ...], list[ExperienceReference]] = {}
        """References to the samples of each answer, in the order of the stream."""
        self._payloads = SharedMemoryPayloadReader(run_id)
        self._redis_url, self._run_id = redis_url, run_id
        self._is_ended = threading.Event()
        self._errors: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Recorder:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_ended.set()
        self._thread.join()
        if self._errors:
            raise self._errors[0]

    def _run(self) -> None:
        try:
            self._record()
        except BaseException as error:  # raised by the thread of the test
            self._errors.append(error)

    def _record(self) -> None:
        keys = RunKeys.of(self._run_id)
        cursors: dict[Any, Any] = {keys.announcements: "0", keys.experiences: "0"}
        with ExitStack() as exits:
            client = exits.enter_context(connect_sync(self._redis_url))
            reader = Synchronizer(
                self._run_id, 0, redis_url=self._redis_url, role="explorer", rank=99
            )
            exits.callback(reader.close)
            while True:
                is_last = self._is_ended.is_set()
                reply: Any = client.xread(cursors, block=200)
                for stream, entries in reply:
                    cursors[stream.decode()] = entries[-1][0]
                    for _, fields in entries:
                        if stream.decode() == keys.announcements:
                            self._pull(reader, decode_envelope(fields[b"e"]).event)
                        elif b"r" in fields:
                            self._add(decode_reference(fields[b"r"]))
                if is_last and not reply:
                    return

    def _pull(self, reader: Synchronizer, event: object) -> None:
        if not isinstance(event, StepReady) or event.kind != "weights":
            return
        try:
            with reader.pull(event) as version:
                self.versions[StepRef(event.epoch, event.step)] = {
                    name: tensor.clone() for name, tensor in version.tensors()
                }
        except VersionUnavailable:
            # Its trainer was killed as it was announced: no explorer has served it then either.
            return

    def _add(self, reference: ExperienceReference) -> None:
        name = reference.explorer, reference.epoch, reference.ordinal, reference.attempt
        references = self._references.setdefault(name, [])
        references.append(reference)
        if len(references) == reference.samples:
            (payload,) = self._payloads.read([reference.payload])
            samples = load_group(references, payload)
            assert not isinstance(samples, PayloadFault), samples.detail
            self.answers += samples


class KilledVLLMRun:
    """Run whose engine's core, explorer, trainer or server is killed amid updates.

    Args:
        folder: Folder for its files.
        model: Hugging Face folder of the policy.
        redis_url: Server of the log.
        run_id: Name of the run.
        engine: `vllm` or `vllm-server`.
        mode: Treatment of unfinished turns.
        steps: Training steps.
    """

    def __init__(
        self,
        folder: Path,
        model: Path,
        redis_url: str,
        run_id: str,
        *,
        engine: str,
        mode: str,
        steps: int,
    ) -> None:
        self.redis_url, self.run_id, self.steps = redis_url, run_id, steps
        self.server: VLLMServer | None = None
        self._mode, self._engine = mode, engine
        self._folder, self._model = folder, model
        self._exits = ExitStack()
        self._training: subprocess.Popen[bytes] | None = None
        self._starts = 0

    def __enter__(self) -> KilledVLLMRun:
        with self._exits:
            self._prepare()
            self._start()
            self._exits = self._exits.pop_all()
        return self

    def _prepare(self) -> None:
        self._folder.mkdir(parents=True)
        self._reports = self._exits.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        self._reports.bind(str(self._folder / "updates"))
        os.environ[REPORTS] = str(self._folder / "updates")
        self._exits.callback(os.environ.pop, REPORTS, None)
        options = ENGINES[self._engine]
        if self._engine == "vllm-server":
            self.server = VLLMServer(self._model, self._folder / "server.log", EXTENSION)
            self._exits.callback(self.server.kill)
            options = {"url": self.server.url}
        (self._folder / "rewards.py").write_text(REWARDS)
        settings = {
            "name": self.run_id,
            "steps": self.steps,
            "model": {"path": str(self._model)},
            "rewards": {"function": "./rewards.py:vowels"},
            "trainer": {"ranks": 1, "learning_rate": 1e-2, "warmup_steps": 0},
            "rollouts": {
                "prompts_per_step": PROMPTS,
                "samples_per_prompt": SAMPLES,
                "max_new_tokens": 24,
                "claim_lease": 5.0,
                "request_deadline": DEADLINE,
                "pause_mode": self._mode,
                "keep_answers": "checkpoint",
            },
            "explorer": {"engine": self._engine, "engine_options": options},
            "sync": {"style": MODES[self._mode], "timeout": DEADLINE},
            "checkpoints": {"interval": 2, "root": str(self._folder)},
            "evaluation": {"sets": {}},
        }
        (self._folder / "run.yaml").write_text(json.dumps(settings))  # JSON is YAML
        self.recorder = self._exits.enter_context(Recorder(self.redis_url, self.run_id))

    def __exit__(self, *error: Any) -> None:
        self._exits.__exit__(*error)

    def _start(self) -> None:
        self._starts += 1
        self._output = self._folder / f"train-{self._starts}.txt"
        words = ("train", str(self._folder / "run.yaml"), "--redis-url", self.redis_url)
        self._training = self._exits.enter_context(started(*words, output=self._output))

    def kill_amid_update(self, victim: str, *, updates: int, delay: float) -> None:
        """Kill a process amid the update that comes after some others, and start it again.

        Args:
            victim: `core`, `explorer`, `trainer` or `server`.
            updates: Number of the update, from now on.
            delay: Seconds from the update's begin to the kill.
        """
        self._drain()
        for _ in range(updates):
            updating = self._wait_for_update()
        process = None if victim == "server" else self._find(victim, updating)
        time.sleep(delay)
        while any(b"ended" in report for report in self._drain()):  # on a loaded machine
            self._wait_for_update()
        if process is None:
            assert self.server is not None
            self.server.kill()
            self.server.start()
        else:
            os.kill(process, signal.SIGKILL)
        if victim == "trainer":
            training = self._training
            assert training is not None
            wait_until(
                lambda: training.poll() is not None and not session_members(training.pid),
                f"the run of a killed trainer does not end: {self._tail()}",
                patience=DEADLINE,
            )
            assert training.returncode != 0
            self._start()

    def finish(self) -> None:
        """Wait for the end of the run, and of all its processes."""
        training = self._training
        assert training is not None
        wait_until(
            lambda: training.poll() is not None and not session_members(training.pid),
            f"the run does not end: {self._tail()}",
            patience=DEADLINE,
        )
        assert training.returncode == 0, self._tail()

    def find_faults(self) -> list[str]:
        """Return what is wrong with the prompts' fates, the served versions and the answers."""
        recorder, log = self.recorder, whole_log(self.redis_url, self.run_id)
        return [
            *ledger_faults(self.redis_url, self.run_id, steps=self.steps, prompts=PROMPTS),
            *serving_faults(log),
            *Oracle(self._model, recorder.versions, self._mode).find_faults(recorder.answers),
        ]

    def _find(self, victim: str, updating: int) -> int:
        """Return the process id of a part of the run; the core is the process that updates."""
        assert self._training is not None
        if victim == "core":
            return updating
        return find_process(self._training.pid, b"ray::" + victim.capitalize().encode())

    def _wait_for_update(self) -> int:
        """Wait until an update begins; return the process of the core that makes it."""
        give_up = time.monotonic() + DEADLINE
        while True:
            readable, _, _ = select.select([self._reports], [], [], 1.0)
            if readable:
                what, process = self._reports.recv(32).split()
                if what == b"begun":
                    return int(process)
            assert self._training is not None and self._training.poll() is None, self._tail()
            assert time.monotonic() < give_up, f"no update comes: {self._tail()}"

    def _drain(self) -> list[bytes]:
        reports = []
        while select.select([self._reports], [], [], 0)[0]:
            reports.append(self._reports.recv(32))
        return reports

    def _tail(self) -> str:
        return self._output.read_text()[-4000:]


class Oracle:
    """Oracle that computes recorded answers again, with the versions that they name.

    Args:
        folder: Hugging Face folder of the policy.
        versions: Tensors of each version.
        mode: Under `keep` a token is computed with the caches of the versions before; else each
            token with its version alone.
    """

    def __init__(
        self, folder: Path, versions: dict[StepRef, dict[str, torch.Tensor]], mode: str
    ) -> None:
        self._folder, self._versions, self._mode = folder, versions, mode
        self._models: dict[StepRef, Any] = {}
        self.separated = 0
        """Tokens whose log-probability by the version before is another one."""

    def find_faults(self, answers: Sequence[Experience]) -> list[str]:
        """Return what is wrong with answers."""
        faults = [] if answers else ["no answer was recorded"]
        for answer in answers:
            prompt, turn = answer.turns[0], answer.turns[1]
            versions = [version for version, count in turn.versions for _ in range(count)]
            name = f"ordinal {answer.ordinal} of {answer.explorer} in epoch {answer.epoch}"
            absent = sorted(set(versions) - self._versions.keys())
            if absent:
                faults.append(f"{name} names {absent[0]}, which was never published")
                continue
            tokens = [[*prompt.token_view], [*turn.token_view]]
            logprobs = torch.tensor([*turn.logprob_view])  # (tokens,)
            expected = self._compute(*tokens, versions)
            largest = float((expected - logprobs).abs().max())
            if largest > TOLERANCE:
                faults.append(f"{name}, of {sorted(set(versions))}, is off by {largest:.3g} nats")
            self._count_separated(*tokens, versions, logprobs)
        if answers and not self.separated:
            faults.append("no answer differs from what other versions give: nothing was tested")
        return faults

    def _count_separated(
        self, prompt: list[int], tokens: list[int], versions: list[StepRef], logprobs: torch.Tensor
    ) -> None:
        earlier = [version for version in self._versions if version < versions[0]]
        if earlier:
            others = self._compute(prompt, tokens, [max(earlier)] * len(tokens))
            self.separated += int(((others - logprobs).abs() > 10 * TOLERANCE).sum())

    @torch.no_grad()
    def _compute(
        self, prompt: list[int], tokens: list[int], versions: list[StepRef]
    ) -> torch.Tensor:
        """Return the log-probability of each token, in one tensor of shape (tokens,)."""
        chosen = torch.tensor(tokens)[:, None]  # (tokens, 1)
        if self._mode == "keep":
            cache, inputs, rows = None, prompt, []
            for token, version in zip(tokens, versions, strict=True):
                output = self._model(version)(
                    torch.tensor([inputs]), past_key_values=cache, use_cache=True
                )
                cache, inputs = output.past_key_values, [token]
                rows.append(output.logits[0, -1])
            logits = torch.stack(rows)
        else:
            whole = torch.tensor([prompt + tokens])
            by_version = {
                version: self._model(version)(whole).logits[0, len(prompt) - 1 : -1]
                for version in set(versions)
            }
            logits = torch.stack(
                [by_version[version][place] for place, version in enumerate(versions)]
            )
        return logits.float().log_softmax(-1).gather(1, chosen)[:, 0]

    def _model(self, version: StepRef) -> Any:
        if version not in self._models:
            model: Any = AutoModelForCausalLM.from_pretrained(self._folder, dtype=torch.float32)
            missing, unexpected = model.load_state_dict(self._versions[version], strict=False)
            assert not unexpected and set(missing) <= {"lm_head.weight"}
            self._models[version] = model.eval()
        return self._models[version]


def kill_at_random(run: KilledVLLMRun, victims: Sequence[str], seed: int) -> None:
    """Kill each victim amid an update, at instants of the seed, and let the run end."""
    chosen = random.Random(seed)
    for victim in victims:
        delay = chosen.uniform(0.0, SECONDS / 2)
        # Not the first update: explorers that never serve a version are started three times.
        run.kill_amid_update(victim, updates=chosen.choice((2, 3)), delay=delay)
    run.finish()
