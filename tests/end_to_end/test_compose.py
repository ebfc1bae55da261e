"""The main job as Compose runs it: the file's promises, and its processes without containers."""

import contextlib
import fcntl
import json
import os
import re
import select
import shutil
import signal
import subprocess
import tempfile
import termios
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import pytest

from tests.support.errors import raises
from tests.support.redis_servers import servers
from tests.support.run_processes import Processes, ended, small_run
from tests.support.waits import PATIENCE
from trinity_events.server import connect_sync
from trinity_events.server.access_rules import access_rules
from trinity_schemas import RunKeys, SaveStrategy
from trinity_workers.config.errors import LoggedSettingsUnreadable
from trinity_workers.config.sections.checkpoints import CheckpointsConfig
from trinity_workers.config.sections.explorer import ExplorerConfig
from trinity_workers.config.train_config import TrainConfig

ROOT = Path(__file__).parents[2]
STEPS = 10
MONITORING = ("metrics", "prometheus", "grafana")
"""Services of the profile ``monitoring``."""


# --- the file -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compose():
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load((ROOT / "compose.yaml").read_text())


def keys(value) -> set[str]:
    if isinstance(value, dict):
        return set(value).union(*map(keys, value.values()))
    return set().union(*map(keys, value)) if isinstance(value, list) else set()


def compose_commands() -> list[list[str]]:
    candidates = [["docker-compose"], ["docker", "compose"]]
    commands = [command for command in candidates if shutil.which(command[0])]
    return [
        command
        for command in commands
        if subprocess.run([*command, "version"], capture_output=True, check=False).returncode == 0
    ]


if COMPOSE := compose_commands():  # where there is none, there is nothing to ask

    @pytest.mark.parametrize("files", [("compose",), ("compose", "compose.train")], ids="+".join)
    @pytest.mark.parametrize("command", COMPOSE, ids=" ".join)
    def test_compose_accepts_the_files(command, files, tmp_path):
        options = [option for file in files for option in ("-f", str(ROOT / f"{file}.yaml"))]
        checked = subprocess.run(
            [*command, *options, "config", "-q"],
            env=os.environ | {"TRINITY_FOLDER": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert checked.returncode == 0, checked.stderr


def test_the_file_keeps_to_what_compose_1_29_knows(compose):
    assert set(compose) <= {"services", "volumes", "x-contained", "x-image", "x-server", "x-urls"}
    assert not keys(compose) & {"gpus", "develop", "start_interval", "include", "models"}
    for service in compose["services"].values():
        for condition in service.get("depends_on", {}).values():
            assert set(condition) == {"condition"}


def test_every_service_is_checked_and_hears_signals(compose):
    assert set(compose["services"]) == {
        *("events", "chunks", "reducer", "trainer", "explorer", "dashboard"),
        *MONITORING,
    }
    for name, service in compose["services"].items():
        assert service["healthcheck"]["test"][0] == "CMD", name
        assert service["init"] is True, name


def test_no_container_can_fill_the_host_or_do_what_it_need_not(compose):
    for name, service in compose["services"].items():
        assert service["logging"]["driver"] == "json-file", name
        assert {"max-size", "max-file"} <= set(service["logging"]["options"]), name
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert "mem_limit" in service, name
        if service["image"].startswith("redis"):
            assert service["user"] == "redis", "to become another user takes a capability"
            [most] = re.findall(r"--maxmemory (\d+)(?:mb|gb)", service["command"])
            assert int(most) < int(service["mem_limit"].removesuffix("mb")), name
        elif service["image"] == "trinity-events":
            assert [mount.partition(":")[0] for mount in service["tmpfs"]] == [
                "/tmp",
                "/home/trinity",
            ]


def test_monitoring_is_started_only_when_it_is_asked_for(compose):
    services = compose["services"]
    assert {name for name, service in services.items() if "profiles" in service} == set(MONITORING)
    assert all(services[name]["profiles"] == ["monitoring"] for name in MONITORING)
    needed = {
        dependency for name in services for dependency in services[name].get("depends_on", {})
    }
    assert needed & set(MONITORING) == {"prometheus"}, "only Grafana needs one of them"


def test_nothing_is_published_beyond_loopback(compose):
    published = {name: s["ports"] for name, s in compose["services"].items() if "ports" in s}
    assert set(published) == {"events", "dashboard", "prometheus", "grafana"}
    assert all(port.startswith("127.0.0.1:") for ports in published.values() for port in ports)
    assert not keys(compose) & {"network_mode", "privileged"}


def test_the_log_has_a_file_on_a_volume_and_the_chunks_have_none(compose):
    events, chunks = compose["services"]["events"], compose["services"]["chunks"]
    assert "--appendonly yes" in events["command"]
    assert events["volumes"] == ["events:/data"]
    assert "--appendonly no" in chunks["command"]
    assert "--maxmemory " in chunks["command"]
    assert "volumes" not in chunks
    for server in (events, chunks):
        assert "--maxmemory-policy noeviction" in server["command"]


def test_the_checkpoints_are_shared_and_ray_has_memory(compose):
    services = compose["services"]
    for name in ("reducer", "trainer"):
        assert services[name]["volumes"] == ["checkpoints:/checkpoints"]
    for name in ("explorer", "dashboard"):
        assert services[name]["volumes"] == ["checkpoints:/checkpoints:ro"]
    assert "shm_size" in services["trainer"]
    assert "--fresh" not in services["trainer"]["command"]  # `up` after `stop` resumes
    assert "container_name" not in services["explorer"]  # it could not be scaled


def test_a_file_of_ones_own_is_trained_by_the_same_services(compose, cli):
    yaml = pytest.importorskip("yaml")
    laid_over = yaml.safe_load((ROOT / "compose.train.yaml").read_text())
    assert set(laid_over) == {"services"}
    services = laid_over["services"]
    assert set(services) == {"trainer", "explorer"} < set(compose["services"])
    for name, service in services.items():
        assert set(service) <= {"command", "volumes"}
        [folder] = set(service["volumes"]) - set(compose["services"][name]["volumes"])
        assert folder.endswith("}:/task:ro")
    file = "/task/${TRINITY_CONFIG:-train.yaml}"
    command = [
        argument.replace(file, str(ROOT / "examples/train/fsdp.yaml"))
        for argument in services["trainer"]["command"]
        if "TRINITY_RUN" not in argument
    ]
    checked = cli(*command, "--run", "one", "--check")
    assert checked.returncode == 0, checked.stderr
    own = set(services["explorer"]["command"]) - set(compose["services"]["explorer"]["command"])
    assert own == {f"--config={file}"}, "the explorers have the same file"
    assert (
        len(services["explorer"]["command"]) == len(compose["services"]["explorer"]["command"]) + 1
    )
    assert set(compose["services"]["trainer"]["command"][-2:]) <= set(command)


def test_the_command_of_the_trainer_is_right_and_opens_the_run_alone(compose, cli):
    command = [
        re.sub(r"\$\{\w+:-(\w+)\}", r"\1", argument)
        for argument in compose["services"]["trainer"]["command"]
    ]
    assert "--parts=trainer" in command
    checked = cli(*command, "--check", "--json")
    assert checked.returncode == 0, checked.stderr
    config = json.loads(checked.stdout)
    assert (config["steps"], config["checkpoints"]["interval"], config["explorer"]["count"]) == (
        300,
        100,
        1,
    )


def test_the_image_ignores_all_but_the_package():
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in lines
    assert not any(line.startswith("!.") for line in lines)


def test_the_health_of_trainer_and_explorer_is_that_of_their_own_process(compose):
    for name in ("trainer", "explorer"):
        service = compose["services"][name]
        check = " ".join(service["healthcheck"]["test"])
        assert "trinity-events" not in check, "it would ask the server"
        [option] = [
            argument for argument in service["command"] if argument.startswith("--health-file=")
        ]
        assert option.removeprefix("--health-file=") in check


# --- the processes --------------------------------------------------------------------------


READ_ONLY = """
set -e
mount --make-rprivate /
for folder; do
    [ "$folder" = -- ] && break
    mount --bind "$folder" "$folder"
done
mount -o remount,bind,ro /
while [ "$1" != -- ]; do shift; done
shift
exec setpriv --bounding-set=-all --inh-caps=-all --no-new-privs "$@"
"""
"""Runs a command that can write to these folders alone, and has no capability."""


def contained(*writable: Path) -> tuple[str, ...]:
    return ("unshare", "--mount", "sh", "-c", READ_ONLY, "sh", *map(str, writable), "--")


def can_contain() -> bool:
    try:
        return (
            subprocess.run([*contained(), "true"], capture_output=True, check=False).returncode == 0
        )
    except OSError:
        return False


@dataclass
class SeparateRun:
    """Processes of a run that ended, and the exit status and the output of each."""

    processes: Processes
    ended: dict[str, tuple[int, str, str]]
    contained: bool = False
    """True if the processes could write to the run's own folders alone."""


@pytest.fixture(scope="module")
def access_controlled(tmp_path_factory):
    """A server on which each role is a user with the rules of docs/security.md."""
    folder = tmp_path_factory.mktemp("server")
    users = folder / "users.acl"
    users.write_text("\n".join([*access_rules(), "user admin on >ADMIN ~* &* +@all", ""]))
    with servers(folder, 1, "--aclfile", str(users)) as [server]:
        yield server


@pytest.fixture(scope="module")
def separate(tmp_path_factory, access_controlled):
    """A run whose explorer was killed and started again; contained where that can be.

    Each process has the password of its role alone.
    """
    folder, contains = tmp_path_factory.mktemp("separate"), can_contain()
    urls = {
        user: access_controlled.url_of(user, user.upper())
        for user in ("admin", "reducer", "trainer", "explorer")
    }
    run = Processes(folder, f"separate-{os.getpid()}", urls["admin"], urls["admin"])
    run.urls = urls | {"train": urls["trainer"]}
    room = tempfile.mkdtemp(prefix="t-", dir="/tmp")  # short, for Ray's sockets
    run.env |= {"HOME": f"{room}/home", "TMPDIR": room, "TRINITY_HOME": ""}
    within = contained(folder, Path(room)) if contains else ()
    readers = contained(Path(room)) if contains else ()
    try:
        reducer = run.start("reducer", within=within)
        explorer = run.start("explorer", "--json", within=readers)
        settings = (f"steps={STEPS}", f"checkpoints.interval={STEPS // 2}", "seed=7")
        options = ("--json", *(word for setting in settings for word in ("--set", setting)))
        trainer = run.start("train", "--parts", "trainer", *options, within=within)
        run.wait_for_announcements(5, trainer)
        explorer.kill()
        again = run.start("explorer", "--json", within=readers)
        results = {"trainer": ended(trainer, 2 * PATIENCE), "explorer": ended(again)}
        reducer.terminate()
        yield SeparateRun(run, results | {"reducer": ended(reducer)}, contains)
    finally:
        run.end()
        shutil.rmtree(room)


@pytest.mark.heavy
@pytest.mark.processes
@pytest.mark.server
def test_no_process_of_a_run_is_refused_anything_that_its_role_may_not(separate):
    with connect_sync(separate.processes.redis_url) as client:
        assert client.acl_log() == []


@pytest.mark.heavy
@pytest.mark.processes
@pytest.mark.server
def test_a_run_of_separate_processes_survives_an_explorer_and_comes_to_its_end(separate):
    run = separate.processes
    status, out, error = separate.ended["trainer"]
    assert status == 0, error
    for line in filter(None, error.splitlines()):  # rich 13.0 ends with an empty one
        assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[ ,]", line), "no line without its time"
    assert f"run {run.run_id}: starting Ray" in error
    log = json.loads(out)["log"]
    assert log["steps"] == STEPS
    assert log["versions_unaccounted"] == 0
    status, out, error = separate.ended["explorer"]
    assert status == 0, error
    explored = json.loads(out)
    assert explored["rank"] in (0, 1), "the first rank is free once its lease has lapsed"
    assert 0 < explored["groups"] < 16 * STEPS
    assert run.closed() == ["finished"]
    assert separate.ended["reducer"][0] == 0


@pytest.mark.heavy
@pytest.mark.processes
@pytest.mark.server
@pytest.mark.skipif(not can_contain(), reason="root with mount namespaces alone can try it")
def test_the_parts_write_to_their_checkpoints_their_home_and_temporary_files_alone(separate):
    assert separate.contained
    assert {status for status, _, _ in separate.ended.values()} == {0}
    run = separate.processes
    folder = run.folder / run.run_id
    assert (folder / "latest_checkpointed_iteration.txt").read_text() == str(STEPS)
    assert (folder / "model" / "config.json").is_file()


def healthy(compose, name: str, path: Path, age: int) -> bool:
    """Run the container's health check, of another file and of a shorter age."""
    command = compose["services"][name]["healthcheck"]["test"][1:]
    command = [
        argument.replace("/tmp/alive", str(path)).replace("30 seconds", f"{age} seconds")
        for argument in command
    ]
    assert str(path) in " ".join(command)
    return subprocess.run(command, check=False).returncode == 0


def take_terminal():
    """Before a process is another: it may have been under nohup."""
    fcntl.ioctl(0, termios.TIOCSCTTY)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@contextmanager
def terminal():
    """One that is looked at, with what a process is to be started with to have it as its own."""
    ours, theirs = os.openpty()
    gone = threading.Event()

    def look():
        while not gone.is_set():
            if select.select([ours], [], [], 0.05)[0]:
                with suppress(OSError):  # nobody has it open
                    os.read(ours, 65536)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield {
            **dict.fromkeys(("stdin", "stdout", "stderr"), theirs),
            "preexec_fn": take_terminal,
        }
    finally:
        gone.set()
        looking.join()
        os.close(theirs)
        os.close(ours)


def waited_for(met, seconds: float = PATIENCE):
    give_up = time.monotonic() + seconds
    while not (value := met()):
        assert time.monotonic() < give_up, "waited in vain"
        time.sleep(0.1)
    return value


def amid_a_claim(explorer, condition):
    """Stop an explorer until its claim is waited for: between two claims it holds none."""
    for _ in range(8):
        explorer.send_signal(signal.SIGSTOP)
        with contextlib.suppress(AssertionError):
            return waited_for(condition, PATIENCE / 4)
        explorer.send_signal(signal.SIGCONT)
        waited_for(lambda: not condition())
    raise AssertionError("the trainer never waited for the explorer")


@pytest.mark.heavy
def test_a_frozen_explorer_is_named_and_is_not_healthy_and_a_terminal_that_goes_ends_the_trainer(
    processes, compose, policy_folder, tmp_path, cli
):
    reducer = processes.start("reducer")
    files = [tmp_path / f"alive-{rank}" for rank in (0, 1)]
    at_work = tmp_path / "alive"
    file = small_run(
        tmp_path,
        policy_folder,
        steps=100_000,
        explorer={"count": 2, "groups_per_claim": 1, "wait_for_run": 0},
        rollouts={"claim_lease": 600.0},
    )
    own = ("--config", str(file))
    explorers = [
        processes.start("explorer", "--rank", str(rank), "--health-file", str(alive), *own)
        for rank, alive in enumerate(files)
    ]
    with terminal() as streams:
        options = ("--parts", "trainer", "--health-file", str(at_work))
        trainer = processes.start("train", str(file), *options, **streams)
        processes.wait_for_announcements(5, trainer)
        try:
            status = ("status", processes.run_id, "--redis-url", processes.redis_url)

            def waits():
                waits = json.loads(cli(*status, "--json").stdout).get("waits", {}).values()
                return [wait for wait in waits if wait["by"] == "trainer-0"]

            [wait] = amid_a_claim(
                explorers[1],
                lambda: [wait for wait in waits() if wait["waits_for"] == ["explorer-1"]],
            )
            assert wait["what"].startswith("the rollouts of ")
            assert 0 < time.time() - wait["since"] < 200
            shown = cli(*status, env={"COLUMNS": "400"}).stdout
            [line] = [row for row in shown.splitlines() if wait["what"] in row]
            assert line.split()[0] == "trainer-0"
            assert f"{wait['what']}  explorer-1" in line
            assert healthy(compose, "trainer", at_work, 60)
            trainer.send_signal(signal.SIGSTOP)
            for service, health in (("explorer", files[1]), ("trainer", at_work)):
                waited_for(lambda check=(service, health): not healthy(compose, *check, 10))
            assert healthy(compose, "explorer", files[0], 60)
        finally:
            for process in (trainer, explorers[1]):
                process.send_signal(signal.SIGCONT)
        waited_for(lambda: not waits())
        waited_for(lambda: healthy(compose, "explorer", files[1], 10))
    assert trainer.wait(PATIENCE) == 128 + signal.SIGHUP
    assert processes.closed() == ["interrupted"]
    assert not at_work.exists()
    for explorer in explorers:
        assert ended(explorer)[0] == 0
    reducer.terminate()
    assert ended(reducer)[0] == 0


@pytest.fixture(scope="module")
def run_collective(tmp_path_factory, redis_url, weights_url, policy_folder):
    """Runs some steps with a collective group, in which an explorer may be killed.

    It writes no checkpoints, so that its reducer may have another root.
    """

    def run_steps(steps: int, *, kill_explorer: bool) -> SeparateRun:
        folder = tmp_path_factory.mktemp("collective")
        run = Processes(folder, f"collective-{os.getpid()}-{steps}", redis_url, weights_url)
        explorer = {"count": 2, "groups_per_claim": 1}
        sync = {"method": "nccl"}
        file = small_run(folder, policy_folder, steps=steps, explorer=explorer, sync=sync)
        try:
            reducer = run.start("reducer", "--checkpoint-root", str(folder / "theirs"))
            own = ("--json", "--config", str(file))
            explorers = [run.start("explorer", "--rank", rank, *own) for rank in "01"]
            trainer = run.start("train", str(file), "--parts", "trainer", "--json")
            if kill_explorer:
                run.wait_for_announcements(4, trainer)
                explorers[1].kill()
                explorers[1] = run.start("explorer", "--rank", "1", *own)
            results = {"trainer": ended(trainer, 2 * PATIENCE)}
            results |= {
                f"explorer-{rank}": ended(explorer) for rank, explorer in enumerate(explorers)
            }
            reducer.terminate()
            return SeparateRun(run, results | {"reducer": ended(reducer)})
        finally:
            run.end()

    return run_steps


@pytest.fixture(scope="module")
def collective(run_collective):
    return run_collective(STEPS, kill_explorer=False)


def assert_each_served(run: SeparateRun, steps: int) -> None:
    status, out, error = run.ended["trainer"]
    assert status == 0, error
    assert "weights travel by a collective group" in error
    summary = json.loads(out)
    assert summary["transport"] == "collective"
    assert summary["log"]["versions_published"] == steps + 1
    assert summary["log"]["versions_unaccounted"] == 0
    for rank in (0, 1):
        status, out, error = run.ended[f"explorer-{rank}"]
        assert status == 0, error
        assert json.loads(out)["rank"] == rank
    assert run.ended["reducer"][0] == 0


@pytest.mark.heavy
@pytest.mark.processes
def test_explorers_of_a_collective_group_serve_every_version(collective):
    assert_each_served(collective, STEPS)


@pytest.mark.heavy
@pytest.mark.processes
@pytest.mark.nightly(
    "weights/transports/test_collective_transport.py"
    "::test_an_explorer_that_is_killed_midway_is_an_error_in_time_and_the_next_group_works"
)
def test_explorers_of_a_collective_group_come_and_go(run_collective):
    """The trainer waits for experiences of one that died; who takes its place asks for weights.

    Its steps take longer than an explorer takes to start: what comes after the last one serves
    nothing.
    """
    assert_each_served(run_collective(300, kill_explorer=True), 300)


@pytest.mark.heavy
@pytest.mark.processes
def test_the_trainer_tells_on_the_terminal_that_the_reducer_uses_another_folder(collective):
    run = collective.processes
    _, _, error = collective.ended["trainer"]
    message = " ".join(error.split())
    assert "warning: the reducer of run" in message
    assert "--checkpoint-root" in message
    squeezed = message.replace(" ", "")  # lines end where the terminal does
    assert str(run.folder / "theirs" / run.run_id) in squeezed
    assert str(run.folder / run.run_id) in squeezed


@pytest.mark.heavy
@pytest.mark.processes
def test_sigterm_while_the_trainer_starts_is_no_failure(processes):
    reducer = processes.start("reducer")
    trainer = processes.start("trainer", "--json")
    with connect_sync(processes.redis_url) as client:
        give_up = time.monotonic() + 2 * PATIENCE
        while not client.exists(RunKeys.of(processes.run_id).events):
            assert time.monotonic() < give_up, "waited in vain"
            time.sleep(0.01)
    time.sleep(0.3)  # Ray is starting, and would have a word with the signal too
    trainer.terminate()
    status, out, error = ended(trainer)
    assert status == 143, error
    summary = json.loads(out)
    assert (summary["outcome"], summary["error"], summary["training_seconds"]) == (
        "interrupted",
        None,
        None,
    )
    assert "was interrupted" in error
    assert processes.closed() == ["interrupted"]
    reducer.terminate()
    assert ended(reducer)[0] == 0


@pytest.mark.heavy
@pytest.mark.processes
def test_sigterm_stops_an_explorer_that_waits(processes):
    explorer = processes.start("explorer", "--rank", "0")
    with connect_sync(processes.redis_url) as client:
        before = client.client_list()
        give_up = time.monotonic() + 2 * PATIENCE
        while len(client.client_list()) <= len(before) and time.monotonic() < give_up:
            time.sleep(0.05)
    time.sleep(0.5)
    explorer.terminate()
    assert ended(explorer)[0] == 143


@pytest.mark.heavy
@pytest.mark.processes
def test_an_explorer_of_a_run_that_nobody_opens_says_so(processes):
    status, _, error = ended(processes.start("explorer", "--wait", "0.5"), 60)
    assert status == 1
    assert f"run {processes.run_id} was not opened within 0.5 s" in error
    assert f"there is no run {processes.run_id!r} on this server" in error, "it may be mistyped"


def test_settings_travel_as_text_and_bad_ones_are_refused():
    settings = TrainConfig(
        steps=7,
        explorer=ExplorerConfig(count=2),
        checkpoints=CheckpointsConfig(strategy="single_node"),
    )
    assert TrainConfig.from_text(settings.to_text()) == settings
    placed = settings.placed(
        run_id="one",
        epoch=3,
        redis_url="redis://u:secret@host",
        weights_url="redis://chunks",
        checkpoint_folder=Path("/somewhere/one"),
    )
    assert placed.to_text() == settings.to_text()
    assert placed.checkpoints.strategy == "single_node"
    with raises(LoggedSettingsUnreadable, run_id="", reason=re.compile("steps")):
        TrainConfig.from_text('{"steps": -1}')


@pytest.mark.parametrize("command", ["demo", "trainer"])
def test_every_save_strategy_of_the_contract_is_an_option_and_no_other(cli, command):
    [strategies, *_] = get_args(SaveStrategy)
    shown = cli(command, "--help", env={"COLUMNS": "80"}).stdout
    assert re.search(rf"--save-strategy +\W{re.escape('|'.join(get_args(strategies)))}\W", shown)
