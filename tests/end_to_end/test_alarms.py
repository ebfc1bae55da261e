"""A real run whose reward is constant raises an alarm, says so everywhere, and finishes."""

import json
import subprocess
import sys

import pytest

pytest.importorskip("torch")
pytest.importorskip("ray")

from tests.support.run_processes import ended, small_run
from tests.support.waits import PATIENCE
from trinity_schemas import AlarmRaised, StepTrained

pytestmark = [pytest.mark.processes, pytest.mark.heavy, pytest.mark.timeout(600)]

REWARD = "def reward(question, answer):\n    return 0.5\n"
PROGRAM = "import sys; open(sys.argv[1], 'a').write(sys.stdin.read() + '\\n')\n"
SENTENCE = "100% of the groups have equal rewards"


def test_a_constant_reward_raises_its_alarm_and_the_run_continues(
    processes, policy_folder, tmp_path
):
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "program.py").write_text(PROGRAM)
    messages = tmp_path / "messages"
    config = small_run(
        *(tmp_path, policy_folder),
        steps=7,
        explorer={"count": 1},
        rewards={"function": "./reward.py:reward"},
        notify={
            "command": [sys.executable, str(tmp_path / "program.py"), str(messages)],
            "events": ["alarm"],
        },
    )
    code, output, error = ended(processes.start("train", str(config)), 4 * PATIENCE)
    assert code == 0, error
    assert f"alarm: {SENTENCE}" in output + error
    events = [envelope.event for envelope in processes.log()]
    alarms = {event.alarm: event for event in events if isinstance(event, AlarmRaised)}
    alarm = alarms["equal_rewards"]
    assert (alarm.step, alarm.value, alarm.threshold) == (5, 1.0, 0.98)
    steps = [event for event in events if isinstance(event, StepTrained)]
    assert [event.metrics["rollout/equal_rewards"] for event in steps] == [1.0] * 7
    sent = [json.loads(line) for line in messages.read_text().splitlines()]
    assert len(sent) == len(alarms)
    assert any(
        f"run {processes.run_id}: {alarm.sentence}" == message["sentence"] for message in sent
    )
    status = subprocess.run(
        [sys.executable, "-m", "trinity_events", "status", processes.run_id],
        env=processes.env,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert "Alarm equal_rewards: 100%" in " ".join(status.stdout.split())
