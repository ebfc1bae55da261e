"""Every GPU test, benchmark and the demo, one after another, and one report of them.

Usage: python -m tests.support.gpu_report [REPORT]
"""

from __future__ import annotations

import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
REPORT = ROOT / "gpu-report.md"
_SHOWN = 40
"""Last lines of a part's output that the report shows."""


class Part(NamedTuple):
    """One command of the report."""

    title: str
    command: list[str]


def main() -> int:
    """Run all parts; return 0 if all passed, 1 if one failed, 2 without a GPU."""
    import torch

    if not torch.cuda.is_available():
        sys.stderr.write(
            "error: this machine has no GPU that torch sees: run make gpu on one, with torch built "
            "for CUDA\n"
        )
        return 2
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else REPORT
    names = [torch.cuda.get_device_name(device) for device in range(torch.cuda.device_count())]
    sections = [
        "# Report of the GPU tests, benchmarks and the demo\n",
        f"{', '.join(names)}; torch {torch.__version__}, CUDA {torch.version.cuda}, "
        f"Python {platform.python_version()}\n",
    ]
    failed = 0
    for part in parts():
        began = time.monotonic()
        done = subprocess.run(part.command, cwd=ROOT, capture_output=True, text=True, check=False)
        failed += done.returncode != 0
        outcome = "passed" if done.returncode == 0 else f"failed with {done.returncode}"
        sections.append(section(part, outcome, time.monotonic() - began, done.stdout + done.stderr))
        path.write_text("\n".join(sections))
        sys.stdout.write(sections[-1] + "\n")
    sys.stdout.write(f"{path}: {failed} of {len(parts())} parts failed\n")
    return int(failed > 0)


def parts() -> list[Part]:
    """Return the commands: the tests that ask for a GPU, the benchmark, and the demo."""
    python = sys.executable
    return [
        Part("GPU tests", [python, "-m", "pytest", "-q", "-rs", *map(str, gpu_tests())]),
        Part("Benchmark weights_gpu", [python, "-m", "benchmarks", "weights_gpu"]),
        Part("Demo", [python, "-m", "trinity_events", "demo", "--trainers", "1"]),
    ]


def gpu_tests() -> list[Path]:
    """Return the test modules that use the marks of ``tests.support.gpu``."""
    files = (ROOT / "tests").rglob("test_*.py")
    return sorted(
        file.relative_to(ROOT)
        for file in files
        if "from tests.support.gpu import" in file.read_text()
    )


def section(part: Part, outcome: str, seconds: float, output: str) -> str:
    """Return the part's section of the report."""
    last = "\n".join(output.rstrip().splitlines()[-_SHOWN:])
    command = " ".join(["python", *part.command[1:]])
    return f"## {part.title}: {outcome} in {seconds:.0f} s\n\n`{command}`\n\n```\n{last}\n```\n"


if __name__ == "__main__":
    sys.exit(main())
