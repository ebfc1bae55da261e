"""The examples for clusters: their syntax, and that they call what this version has."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.gpu_report import Part, gpu_tests, parts, section

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "cluster"
SLURM, KUBERAY = EXAMPLES / "slurm.sbatch", EXAMPLES / "kuberay.yaml"


def options_of_train():
    return set(re.findall(r"--[a-z-]+", (ROOT / "docs" / "commands" / "train.md").read_text()))


@pytest.mark.processes
def test_the_slurm_script_is_a_script():
    subprocess.run(["bash", "-n", str(SLURM)], check=True)


@pytest.mark.processes
def test_the_slurm_script_refuses_to_run_without_a_configuration_or_a_job():
    for arguments, message in (([], "usage: sbatch"), (["run.yaml"], "submit it with sbatch")):
        done = subprocess.run(
            ["bash", str(SLURM), *arguments],
            capture_output=True,
            text=True,
            check=False,
            env={"HOME": "/nowhere", "PATH": "/usr/bin:/bin"},
        )
        assert done.returncode != 0
        assert message in done.stderr


def test_options_that_the_slurm_script_gives_to_train_exist():
    [called] = re.findall(
        r"trinity-events train (?:.*\\\n)*.*", SLURM.read_text().split("on_head env")[1]
    )
    assert set(re.findall(r"--[a-z-]+", called)) <= options_of_train()


def test_the_manifest_has_a_job_with_this_versions_ray_and_options():
    claim, job = yaml.safe_load_all(KUBERAY.read_text())
    assert (claim["kind"], job["kind"], job["apiVersion"]) == (
        "PersistentVolumeClaim",
        "RayJob",
        "ray.io/v1",
    )
    command, verb, *arguments = job["spec"]["entrypoint"].split()
    assert (command, verb) == ("trinity-events", "train")
    assert {argument for argument in arguments if argument.startswith("--")} <= options_of_train()
    pinned = re.findall(r"^ray==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert [job["spec"]["rayClusterSpec"]["rayVersion"]] == pinned


def test_every_pod_of_the_manifest_shares_the_checkpoint_folder_and_the_log():
    *_, job = yaml.safe_load_all(KUBERAY.read_text())
    cluster = job["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for group in groups:
        pod = group["template"]["spec"]
        [container] = pod["containers"]
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounts["checkpoints"] == "/checkpoints"
        assert set(mounts) == {volume["name"] for volume in pod["volumes"]}
        assert [variable["name"] for variable in container["env"]] == ["TRINITY_REDIS_URL"]


# --- make gpu -----------------------------------------------------------------------------------


@pytest.mark.processes
def test_without_a_gpu_the_report_is_one_sentence_and_a_failure():
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.gpu_report"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: this machine has no GPU that torch sees")
    assert len(done.stderr.splitlines()) == 1


def test_the_report_runs_every_test_that_asks_for_a_gpu():
    paths = [path.as_posix() for path in gpu_tests()]
    assert "tests/weights/transports/test_cuda_transport.py" in paths
    assert "tests/workers/engines/test_fsdp_on_gpu.py" in paths
    tests, *others = parts()
    assert set(paths) <= set(tests.command)
    assert ["weights_gpu" in others[0].command, "demo" in others[1].command] == [True, True]


def test_a_section_of_the_report_has_command_outcome_and_last_lines():
    part = Part("Demo", [sys.executable, "-m", "trinity_events", "demo"])
    report = section(part, "passed", 12.3, "\n".join(map(str, range(100))))
    assert report.startswith("## Demo: passed in 12 s\n\n`python -m trinity_events demo`\n")
    assert "\n99\n" in report
    assert "\n59\n" not in report
