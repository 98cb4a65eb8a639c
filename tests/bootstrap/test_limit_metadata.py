"""The rule that keeps the training off the metadata service, by the real iptables in a network namespace."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.bootstrap.node import BOOTSTRAP

# The service's address on a loopback device of its own; then the step, twice, and a request by each user.
SCRIPT = """
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


def test_root_reaches_the_service_and_the_trainings_user_does_not(tmp_path: Path) -> None:
    for tool in ("unshare", "ip", "iptables", "setpriv", "curl"):
        if shutil.which(tool) is None:
            pytest.skip(f"needs {tool}")
    if os.geteuid() != 0 or subprocess.run(["unshare", "--net", "true"], check=False).returncode:
        pytest.skip("needs a network namespace")
    etc = tmp_path / "etc/gpufleet"
    etc.mkdir(parents=True)
    (etc / "node.env").write_text("GPUFLEET_TRAIN_ROLE_ARN=arn:aws:iam::123456789012:role/train\n")
    (etc / "runtime.env").write_text("GPUFLEET_TRAIN_USER=nobody\n")
    (tmp_path / "metadata").mkdir()
    (tmp_path / "metadata/who").write_text("credentials")
    done = subprocess.run(
        ["unshare", "--net", "bash", "-euo", "pipefail", "-c", SCRIPT],
        env={**os.environ, "ROOT": str(tmp_path), "STEP": str(BOOTSTRAP / "steps/limit-metadata.sh")}
        | {"PYTHON": shutil.which("python3") or "python3"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    # curl's 7: could not connect.
    said = ["before: credentials", "rules: 1", "root: credentials", "nobody: 7"]
    assert done.stdout.splitlines() == said, done.stderr
