"""Planted waste in real runs: goodput finds each kind within two points of what was planted.

Delays are planted in the processes, and their times noted there. The forms of these tests on logs
are in core/test_goodput.py.
"""

import json
import signal
import threading
import time
from collections import Counter, defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

pytest.importorskip("torch")
pytest.importorskip("ray")

from tests.end_to_end.test_goodput import (
    Planted,
    own_seconds,
    read_goodput,
    seconds_of,
    trained,
)
from tests.support.planted_delays import PlantedDelays, measure_union
from tests.support.run_processes import ended, small_run
from tests.support.waits import PATIENCE, wait_until
from trinity_events.record.reader import RolloutRecord

pytestmark = [pytest.mark.processes, pytest.mark.heavy, pytest.mark.timeout(900)]

POINTS = 0.02
"""Greatest distance of a share from what was planted."""
ENVIRONMENT = """
import time

def reply(question, messages):
    began = time.time()
    time.sleep(2.0)
    with open({file!r}, "a") as file:
        file.write(f"{{began}} {{time.time()}}\\n")
    return " b" if len(messages) < 3 else None
"""
INSTALL = "trinity_workers.rollout_engines.huggingface:HuggingFaceEngine.install"
GENERATE = "trinity_workers.rollout_engines.huggingface:HuggingFaceEngine.generate"
TRAIN = "trinity_workers.trainer.workers.fsdp:TrainWorker.train_step"
WRITE = "trinity_workers.engines.state_files:write_state"
JUDGE = "trinity_workers.rewards.pool:RewardPool.judge"
WORK = (INSTALL, GENERATE, JUDGE)
"""Work of an explorer: what a plant does not delay is noted, too."""
IDLE = ("waiting-weights", "waiting-requests", "waiting-tail", "idle")


class JudgeHandler(BaseHTTPRequestHandler):
    """Judge of an OpenAI-compatible endpoint, which takes two seconds for each grade."""

    def do_GET(self):
        self._reply({"data": []})

    def do_POST(self):
        began = time.time()
        self.rfile.read(int(self.headers["Content-Length"]))
        time.sleep(2.0)
        grade = f"Grade: {len(self.server.calls) % 11}"
        self._reply({"choices": [{"message": {"content": grade}, "finish_reason": "stop"}]})
        self.server.calls.append((began, time.time()))

    def _reply(self, content):
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


class SlowJudge(ThreadingHTTPServer):
    """Server of a slow judge, with the times of its calls."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), JudgeHandler)
        self.calls: list[tuple[float, float]] = []


@pytest.fixture
def slow_judge():
    with SlowJudge() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def work_seconds(goodput, process):
    """Return the process's seconds after its start, which takes most on a busy host."""
    return own_seconds(goodput, process) - seconds_of(goodput, process, "starting")


def assert_found(goodput, process, fates, planted):
    """Compare shares of the process's seconds after its start."""
    own = work_seconds(goodput, process)
    seconds = seconds_of(goodput, process, *fates)
    print(
        f"{process} {', '.join(fates)}: planted {planted / own:.1%}, "
        f"found {seconds / own:.1%} of {own:.1f} s"
    )
    assert planted / own > 2 * POINTS
    assert seconds / own == pytest.approx(planted / own, abs=POINTS)


def run_to_its_end(processes, config):
    code, _, error = ended(processes.start("train", str(config)), 8 * PATIENCE)
    assert code == 0, error
    return read_goodput(processes)


@pytest.mark.nightly("core/test_goodput.py::test_seconds_that_are_planted_are_found")
def test_slow_environment_judge_installs_save_and_idle_explorers_are_found(
    processes, policy_folder, tmp_path, slow_judge
):
    file = tmp_path / "replied"
    (tmp_path / "tool.py").write_text(ENVIRONMENT.format(file=str(file)))
    planted = {INSTALL: 1.5, WRITE: 4.0, TRAIN: 2.0, GENERATE: 0.0}
    delays = PlantedDelays(tmp_path / "delays", planted)
    processes.env = delays.plant(processes.env)
    host, port = slow_judge.server_address
    config = small_run(
        *(tmp_path, policy_folder),
        steps=4,
        explorer={"count": 1},
        sync={"max_staleness": 0},
        task={"environment": "./tool.py:reply"},
        rewards={"judge": f"http://{host}:{port}/v1", "judge_model": "slow"},
        rollouts={"prompts_per_step": 4, "samples_per_prompt": 4, "max_turns": 2},
        checkpoints={"interval": 4},
    )
    goodput = run_to_its_end(processes, config)
    rows = [line.split() for line in file.read_text().splitlines()]
    replies = [(float(began), float(end)) for began, end in rows]
    installs, saves, trains = map(delays.read_calls, (INSTALL, WRITE, TRAIN))
    assert replies and slow_judge.calls and installs and saves and trains
    # Of activities at once, a process is in the phase of the first of these: each has what the
    # earlier ones leave of it.
    fates = (("installing", installs), ("environment", replies), ("judging", slow_judge.calls))
    earlier = []
    for fate, calls in fates:
        planted = measure_union([*earlier, *calls]) - measure_union(earlier)
        assert_found(goodput, "explorer-0", [fate], planted)
        earlier += calls
    assert_found(goodput, "trainer-0", ["saving"], measure_union(saves))
    assert_found(goodput, "actor-0", ["training"], measure_union(trains))
    # The explorer may answer with the newest weights alone, so that it has nothing to do while the
    # rank trains, nor at any other time at which no call of it is under way.
    own, work = work_seconds(goodput, "explorer-0"), [*earlier, *delays.read_calls(GENERATE)]
    assert measure_union(trains) / own > 2 * POINTS
    assert_found(goodput, "explorer-0", IDLE, own - measure_union(work))


@pytest.mark.nightly("core/test_goodput.py::test_a_slow_host_is_named_with_what_it_costs")
def test_a_slow_host_and_the_tail_of_its_answers_are_found(processes, policy_folder, tmp_path):
    planted = Planted(
        *(tmp_path, policy_folder),
        seconds=0.05,
        steps=12,
        explorer={"wait_for_run": 0, "groups_per_claim": 1},
        rollouts={"prompts_per_step": 2, "samples_per_prompt": 4},
        sync={"max_staleness": 0},
    )
    own = ("--config", planted.config)
    processes.start("reducer")
    trainer = processes.start("train", planted.config, "--parts", "trainer")
    # As hosts of which one has slower processors: its judgements take far longer.
    quick = PlantedDelays(tmp_path / "quick", dict.fromkeys(WORK, 0.0))
    slow = PlantedDelays(tmp_path / "slow", dict.fromkeys(WORK, 0.0) | {JUDGE: 2.0})
    env = processes.env
    for rank, delays in enumerate((quick, slow)):
        processes.env = delays.plant(env)
        processes.start("explorer", "--rank", str(rank), *own)
    processes.env = env
    code, _, error = ended(trainer, 8 * PATIENCE)
    assert code == 0, error
    goodput = read_goodput(processes)
    stragglers = [
        straggler
        for straggler in goodput["stragglers"]
        if straggler["measure"] == "judging an answer"
    ]
    assert [straggler["process"] for straggler in stragglers] == ["explorer-1"]
    calls = slow.read_calls(JUDGE)
    assert calls, "the slow explorer judged answers"
    worked = work_seconds(goodput, "explorer-1")
    excess = stragglers[0]["excess"]
    busy = quick.read_calls(JUDGE)
    # The excess is what its calls took beyond as many of the quick one.
    usual = sum(call.ended - call.began for call in busy) / len(busy)
    delay = sum(call.ended - call.began - usual for call in calls)
    print(f"excess: planted {delay / worked:.1%}, found {excess / worked:.1%} of {worked:.1f} s")
    assert excess / worked == pytest.approx(delay / worked, abs=POINTS)
    # The quick explorer waits for the slow one while that one alone works. The way of the claims
    # and answers of the slow one is no call, and part of the tail: so this is its least value.
    quick_work, slow_work = (
        [call for function in WORK for call in delays.read_calls(function)]
        for delays in (quick, slow)
    )
    first = min(call.began for call in quick_work)
    later = [call for call in slow_work if call.began > first]
    tail = measure_union([*quick_work, *later]) - measure_union(quick_work)
    own, found_tail = (
        work_seconds(goodput, "explorer-0"),
        seconds_of(goodput, "explorer-0", "waiting-tail"),
    )
    print(f"tail: planted at least {tail / own:.1%}, found {found_tail / own:.1%} of {own:.1f} s")
    assert tail / own > 2 * POINTS
    assert found_tail / own > tail / own - POINTS


@pytest.mark.nightly(
    "workers/record/test_discarded.py::test_every_discarded_answer_is_recorded_before_its_payload_is_freed"
)
def test_answers_that_became_stale_are_counted_to_the_token(processes, policy_folder, tmp_path):
    config = small_run(
        *(tmp_path, policy_folder),
        steps=12,
        explorer={"count": 2, "groups_per_claim": 4},
        rollouts={"prompts_per_step": 2, "samples_per_prompt": 4, "order": "arrival"},
        sync={"style": "fully_async", "max_staleness": 1, "when_stale": "drop"},
        record={"rollouts": "all"},
    )
    goodput = run_to_its_end(processes, config)
    assert goodput["tokens"].get("stale", 0) > 0
    record = RolloutRecord(processes.folder / processes.run_id, processes.run_id)
    recorded = Counter()
    for row in record.read_all(
        record.list_steps(discarded=True), ("ordinal", "sample", "fate", "turns")
    ):
        recorded[row["fate"]] += sum(
            turn["tokens"] for turn in row["turns"] if turn["role"] == "policy"
        )
    assert recorded["stale"] == goodput["tokens"]["stale"]
    assert recorded["trained"] == goodput["tokens"]["trained"]


@pytest.mark.nightly("core/test_goodput.py::test_tokens_that_are_planted_are_found_to_the_token")
def test_answers_of_an_explorer_that_stood_still_are_surplus(processes, policy_folder, tmp_path):
    planted = Planted(
        *(tmp_path, policy_folder),
        seconds=0.3,
        steps=16,
        explorer={"wait_for_run": 0, "groups_per_claim": 2},
        rollouts={"claim_lease": 2.0, "prompts_per_step": 4},
        task={"questions": "./questions.jsonl"},
    )
    # Each question has one prompt, so that answers of both explorers to it are of one request.
    questions = [{"prompt": f"spell {number}:", "answer": str(number)} for number in range(256)]
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, questions)))
    own, env = ("--config", planted.config), processes.env
    processes.start("reducer")
    trainer = processes.start("train", planted.config, "--parts", "trainer")
    explorers = []
    for rank, name in enumerate(("quick", "slow")):
        processes.env = env | {"WITNESS": name}
        explorers.append(processes.start("explorer", "--rank", str(rank), *own))
    processes.env = env
    slow = explorers[1]

    def judged_by_slow():
        return sum(answer.explorer == "slow" for answer in planted.judged())

    before = trained(processes)
    wait_until(lambda: trained(processes) >= before + 2, patience=8 * PATIENCE)
    # Amid the judgement of its claims.
    answers = judged_by_slow()
    wait_until(lambda: judged_by_slow() > answers, patience=2 * PATIENCE)
    slow.send_signal(signal.SIGSTOP)
    stopped = trained(processes)
    # Its claims lapse, and the other explorer answers in its place.
    wait_until(lambda: trained(processes) >= stopped + 3, patience=8 * PATIENCE)
    slow.send_signal(signal.SIGCONT)
    code, _, error = ended(trainer, 8 * PATIENCE)
    assert code == 0, error
    for explorer in explorers:
        ended(explorer, 2 * PATIENCE)
    goodput = read_goodput(processes)
    by_prompt = defaultdict(Counter)
    for answer in planted.judged():
        by_prompt[answer.prompt][answer.explorer] += answer.tokens
    # The quick explorer has answered before the slow one could go on.
    surplus = sum(tokens["slow"] for tokens in by_prompt.values() if len(tokens) == 2)
    print(f"surplus: planted {surplus}, found {goodput['tokens'].get('surplus', 0)} tokens")
    assert goodput["tokens"]["surplus"] == surplus > 0
    assert goodput["samples"] == 16 * 16
    # To the token: each answer was judged, and each judged answer has one fate.
    assert sum(goodput["tokens"].values()) == sum(answer.tokens for answer in planted.judged())
