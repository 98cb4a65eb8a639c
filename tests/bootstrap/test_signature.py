"""The EFA installer's signature is verified by the real gpg, with a key made for the test."""

from __future__ import annotations

import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from tests.bootstrap.node import HEALTHY, HERE, Node

pytestmark = pytest.mark.skipif(shutil.which("gpg") is None, reason="gpg is not installed")

CASE = HERE / "cases/install-efa-on-ubuntu"
# Answers downloads with the files of a folder; an answer in input/ comes before the healthy one.
SERVE = """# shellcheck shell=bash
url=${*: -1}
while (($# > 0)); do
  if [[ $1 == --output ]]; then cp "$FAKE_STATE/served/${url##*/}" "$2"; fi
  shift
done
exit 0
"""


def gpg(home: Path, *arguments: str) -> str:
    command = ["gpg", "--homedir", str(home), "--batch", "--yes", "--pinentry-mode", "loopback", "--passphrase", ""]
    return subprocess.run([*command, *arguments], check=True, capture_output=True, text=True).stdout


@pytest.fixture
def node(tmp_path: Path) -> Node:
    case = tmp_path / "case"
    (case / "input/answers").mkdir(parents=True)
    (case / "input/answers/curl.sh").write_text(SERVE)
    node = Node(
        tmp_path / "node",
        case,
        node_env={"GPUFLEET_AMI_KIND": "custom"},
        without=["opt/amazon/efa_installed_packages"],
        # gpg starts its agent and dirmngr by their own paths.
        real=["gpg"],
    )
    # A short path: gpg's agent listens on a socket in it.
    home = Path(subprocess.run(["mktemp", "--directory"], check=True, capture_output=True, text=True).stdout.strip())
    gpg(home, "--quick-generate-key", "test <test@example.com>", "rsa3072", "sign", "never")
    fingerprint = next(
        line.split(":")[9] for line in gpg(home, "--list-keys", "--with-colons").splitlines() if line.startswith("fpr")
    )
    served = node.state / "served"
    served.mkdir()
    tarball = served / "aws-efa-installer-1.50.0.tar.gz"
    with tarfile.open(tarball, "w:gz") as archive:
        archive.add(HEALTHY / "efa/aws-efa-installer", "aws-efa-installer")
    gpg(home, "--armor", "--output", str(served / "aws-efa-installer.key"), "--export")
    gpg(home, "--output", f"{tarball}.sig", "--detach-sign", str(tarball))
    subprocess.run(["gpgconf", "--homedir", str(home), "--kill", "all"], check=False)
    # The agent removes its sockets at the same time.
    shutil.rmtree(home, ignore_errors=True)
    versions = node.bootstrap / "versions.sh"
    text = versions.read_text()
    assert "EFA_KEY_FINGERPRINT=4E9091BCBB97A96B26B15E59A05480B1DD2D3CCC" in text
    versions.write_text(text.replace("4E9091BCBB97A96B26B15E59A05480B1DD2D3CCC", fingerprint))
    return node


def test_what_the_key_has_signed_is_installed(node: Node) -> None:
    outcome = node.run("steps/install-efa.sh")
    assert outcome.exit_code == 0, outcome.output
    assert "efa_installer.sh --yes" in node.calls


def test_a_tarball_changed_after_signing_is_not_installed(node: Node) -> None:
    with (node.state / "served/aws-efa-installer-1.50.0.tar.gz").open("ab") as tarball:
        tarball.write(b"x")
    outcome = node.run("steps/install-efa.sh")
    assert outcome.exit_code == 1
    assert "does not verify: not installing it" in outcome.output
    assert "efa_installer.sh --yes" not in node.calls
