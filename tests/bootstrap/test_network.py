"""The step that changes a node's network, by the real iptables in a network namespace."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.bootstrap.node import BOOTSTRAP

# The service's address on a loopback device of its own; then the step, twice, and a request by each user.
METADATA_SCRIPT = """
ip link set lo up
ip address add 169.254.169.254/32 dev lo
"$PYTHON" -m http.server --bind 169.254.169.254 --directory "$ROOT/metadata" 80 >/dev/null 2>&1 &
server=$!
trap 'kill $server' EXIT
ask() {
  setpriv --reuid "$1" --clear-groups curl --silent --max-time 5 --retry 20 --retry-connrefused --retry-delay 1 \\
    "http://$2/who" || echo "refused $?"
}
ask root 169.254.169.254 >/dev/null
echo "before: $(ask nobody 169.254.169.254)"
"$STEP" && "$STEP"
echo "rules: $(iptables --list-rules OUTPUT | grep --count REJECT)"
echo "root: $(ask root 169.254.169.254)"
echo "nobody: $(setpriv --reuid nobody --clear-groups curl --silent --max-time 5 http://169.254.169.254/who || echo $?)"
"""


def run(script: str, step: str, root: Path, node_env: str, *tools: str) -> str:
    """Run ``script`` as root in a network of its own, where STEP is the step and ROOT its root; return what it says."""
    for tool in ("unshare", "ip", *tools):
        if shutil.which(tool) is None:
            pytest.skip(f"needs {tool}")
    if os.geteuid() != 0 or subprocess.run(["unshare", "--net", "true"], check=False).returncode:
        pytest.skip("needs a network namespace")
    etc = root / "etc/gpufleet"
    etc.mkdir(parents=True)
    (etc / "node.env").write_text(node_env)
    (etc / "runtime.env").write_text("GPUFLEET_TRAIN_USER=nobody\n")
    done = subprocess.run(
        ["unshare", "--net", "bash", "-euo", "pipefail", "-c", script],
        env={**os.environ, "ROOT": str(root), "STEP": str(BOOTSTRAP / f"steps/{step}.sh")}
        | {"PYTHON": shutil.which("python3") or "python3"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_root_reaches_the_metadata_service_and_the_trainings_user_does_not(tmp_path: Path) -> None:
    (tmp_path / "metadata").mkdir()
    (tmp_path / "metadata/who").write_text("credentials")
    role = "GPUFLEET_TRAIN_ROLE_ARN=arn:aws:iam::123456789012:role/train\n"
    said = run(METADATA_SCRIPT, "limit-metadata", tmp_path, role, "iptables", "setpriv", "curl")
    # curl's 7: could not connect.
    assert said.splitlines() == ["before: credentials", "rules: 1", "root: credentials", "nobody: 7"]
