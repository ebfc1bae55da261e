#!/usr/bin/env bash
# Builds the wheel, installs its base alone into an empty environment, and tries it there against
# the embedded server of the development environment.
set -euo pipefail
cd "$(dirname "$0")/../.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
.venv/bin/python -m build --wheel --outdir "$work/dist" . >"$work/build.log" 2>&1 || {
  cat "$work/build.log"
  exit 1
}
.venv/bin/python -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet -c constraints.txt "$work"/dist/*.whl
check=$PWD/tests/install/check_base.py
TRINITY_HOME=$work/home .venv/bin/python - "$work" "$check" <<'PY'
import subprocess
import sys

from trinity_events.server import serving

work, check = sys.argv[1:]
with serving(None) as url:
    python = f"{work}/venv/bin/python"
    sys.exit(subprocess.run([python, check, url], cwd=work, check=False).returncode)
PY
