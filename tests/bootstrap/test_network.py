"""The steps that change a node's network, by the real iptables and tc in a network namespace."""

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

# A card with a default route; the step, twice; then datagrams into the VPC and out of it.
UPLOAD_SCRIPT = """
ip link add ens5 type veth peer name far
# An address of IPv6 is announced by packets, which would be counted as well.
ip link set ens5 addrgenmode none
ip address add 10.42.0.5/24 dev ens5
ip link set ens5 up
ip link set far up
ip neighbour add 10.42.0.1 lladdr 0e:49:61:0f:c3:11 dev ens5
ip route add default via 10.42.0.1
PATH=$ROOT/bin:$PATH
"$STEP" && "$STEP"
for _ in 1 2 3; do echo inside >/dev/udp/10.42.0.1/9; done
for _ in 1 2 3 4 5; do echo outside >/dev/udp/198.51.100.1/9; done
tc -statistics class show dev ens5
tc -statistics qdisc show dev ens5
"""
# Answers of the metadata service, in place of curl.
UPLOAD_CURL = """#!/bin/bash
case "$*" in
  *PUT*) echo -n TOKEN && exit ;;
  */mac) echo -n 0e:49:61:0f:c3:11 ;;
  */vpc-ipv4-cidr-blocks) printf '10.42.0.0/16\\n10.43.0.0/16' ;;
esac
cat >/dev/null
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


def test_what_leaves_the_vpc_is_bounded_and_the_rest_is_not(tmp_path: Path) -> None:
    (tmp_path / "proc").symlink_to("/proc")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/curl").write_text(UPLOAD_CURL)
    (tmp_path / "bin/curl").chmod(0o755)
    said = run(UPLOAD_SCRIPT, "share-bandwidth", tmp_path, "GPUFLEET_UPLOAD_MBIT_PER_S=4000\n", "tc")
    assert "rate 4Gbit ceil 4Gbit" in said
    # Five datagrams of 8 bytes and 42 of headers; three passed the class by.
    assert "Sent 250 bytes 5 pkt" in said
    assert "direct_packets_stat 3 " in said
