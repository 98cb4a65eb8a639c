"""The real agent, a real docker daemon and a container: user, folders, signals and exit statuses pass through.

The image holds this machine's own folders, read-only. torch is not in it: in place of torchrun stands a program that
starts one worker as torchrun does.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
TOOLS = REPOSITORY / ".tools/docker/usr"
IMAGE = "111122223333.dkr.ecr.us-east-1.amazonaws.com/train:test"
# Python imports it at its start; only torchrun's process is replaced.
TORCHRUN = """\
import os, signal, subprocess, sys
if "bootstrap.training.torchrun" in sys.orig_argv:
    worker = subprocess.Popen([sys.executable, "train.py"], start_new_session=True)
    signal.signal(signal.SIGTERM, lambda *_: worker.terminate())
    os._exit(worker.wait())
"""
# WORKER: fails, saves on SIGTERM, answers the drain file, or ends on nothing.
TRAIN = """\
import os, pwd, signal, sys, time
from pathlib import Path
how, drain = os.environ["GPUFLEET_TEST_WORKER"], Path(os.environ["GPUFLEET_DRAIN_FILE"])
def say(text): print("worker:", text, flush=True)
def save(*_):
    Path("saved").touch(); say("saved"); sys.exit(0)
user, home = pwd.getpwuid(os.getuid()).pw_name, os.environ["HOME"]
(rights,) = [int(line.split()[1], 16) for line in open("/proc/self/status") if line.startswith("CapEff")]
say(f"user {user} in {os.getcwd()} home {home} rights {rights}")
if how == "at fault": sys.exit(78)
if how == "saves on SIGTERM": signal.signal(signal.SIGTERM, save)
if how == "ignores SIGTERM": signal.signal(signal.SIGTERM, signal.SIG_IGN)
if how == "reads notices": drain.with_suffix(".listener").touch()
say("trains")
while True:
    time.sleep(0.05)
    if how == "reads notices" and drain.exists() and not drain.with_suffix(".saved").exists():
        say(drain.read_text()); drain.with_suffix(".saved").touch()
"""
# The daemon of a test may lower limits but not raise them.
CLIENT = """\
#!/bin/bash
arguments=()
for word in "$@"; do
  case $word in memlock=*) word=memlock={memlock} ;; nofile=*) word=nofile={nofile} ;; esac
  arguments+=("$word")
  [[ $word != run ]] || arguments+=({mounts})
done
exec {docker} "${{arguments[@]}}"
"""


def hard_limit(kind: int) -> int:
    return resource.getrlimit(kind)[1]


@pytest.fixture(scope="module")
def docker() -> Iterator[dict[str, str]]:
    """Environment of a client whose daemon has the image."""
    programs = f"{os.environ['PATH']}:{TOOLS}/bin:{TOOLS}/sbin"
    daemon, client = shutil.which("dockerd", path=programs), shutil.which("docker", path=f"{TOOLS}/bin:{programs}")
    if daemon is None or client is None:
        pytest.skip("no dockerd: run tools/docker.sh")
    if os.geteuid() != 0:
        pytest.skip("only root may start a docker daemon")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        host = f"unix://{folder}/socket"
        arguments = ["--host", host, "--data-root", f"{folder}/data", "--exec-root", f"{folder}/exec"]
        arguments += ["--pidfile", f"{folder}/pid", "--storage-driver", "vfs", "--bridge", "none"]
        arguments += ["--iptables=false", "--ip6tables=false", "--ip-forward=false"]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [daemon, *arguments], env=os.environ | {"PATH": programs}, stdout=log, stderr=log
            )
        try:
            while not (folder / "socket").exists():
                if process.poll() is not None:
                    pytest.skip(f"no docker daemon runs here: {(folder / 'log').read_text().splitlines()[-1]}")
                time.sleep(0.05)
            python = Path(sys.executable).resolve()
            mounts = [
                f"--mount type=bind,source={path},target={path},readonly"
                for path in dict.fromkeys(["/usr", "/lib", "/lib64", "/bin", "/etc", sys.base_prefix])
                if Path(path).is_dir() and (path == "/usr" or not path.startswith("/usr/"))
            ]
            limits = {"memlock": hard_limit(resource.RLIMIT_MEMLOCK), "nofile": hard_limit(resource.RLIMIT_NOFILE)}
            (folder / "bin").mkdir()
            wrapper = folder / "bin/docker"
            wrapper.write_text(CLIENT.format(docker=client, mounts=" ".join(mounts), **limits))
            wrapper.chmod(0o755)
            environment = {"DOCKER_HOST": host, "PATH": f"{folder}/bin:{os.environ['PATH']}"}
            empty = subprocess.run(["tar", "--create", "--files-from", "/dev/null"], capture_output=True, check=True)
            change = f"ENV PATH={folder}/python:{python.parent}:/usr/bin:/bin"
            subprocess.run(
                [wrapper, "import", "--change", change, "--change", 'ENTRYPOINT ["/bin/false"]', "-", IMAGE],
                input=empty.stdout, env=os.environ | environment, stdout=subprocess.DEVNULL, check=True,
            )  # fmt: skip
            yield environment
        finally:
            process.terminate()
            process.wait()
            # The daemon leaves the host's network namespace mounted.
            subprocess.run(["umount", f"{folder}/exec/netns/default"], stderr=subprocess.DEVNULL, check=False)


class Agent:
    """An agent that trains in a container as user nobody."""

    def __init__(self, docker: dict[str, str], folder: Path, how: str) -> None:
        (folder / "code").mkdir(exist_ok=True)
        (folder / "code/train.py").write_text(TRAIN)
        (folder / "code/sitecustomize.py").write_text(TORCHRUN)
        (folder / "code").chmod(0o777)
        self.docker, self.log = docker, folder / "log"
        self.environment = {
            **docker, "HOME": "/root", "GPUFLEET_IMAGE": IMAGE, "GPUFLEET_TRAIN_USER": "nobody",
            "GPUFLEET_TRAIN_COMMAND": "train.py", "GPUFLEET_TRAIN_DIR": str(folder / "code"),
            "GPUFLEET_RUN_DIR": str(folder / "run"), "PYTHONPATH": str(folder / "code"), "GPUFLEET_TEST_WORKER": how,
            "GPUFLEET_DRAIN_LIMIT_S": "2", "GPUFLEET_AGENT": '{"kill_after_s": 1}', "AWS_EC2_METADATA_DISABLED": "true",
        }  # fmt: skip
        with self.log.open("wb") as log:
            command = [sys.executable, "-S", str(REPOSITORY / "bootstrap/agent")]
            self.process = subprocess.Popen(command, env=self.environment, stdout=log, stderr=log)

    def until(self, text: str) -> None:
        deadline = time.monotonic() + 60
        while text not in self.log.read_text():
            assert time.monotonic() < deadline and self.process.poll() is None, self.log.read_text()
            time.sleep(0.05)

    def containers(self) -> list[str]:
        command = ["docker", "ps", "--quiet", "--filter", "name=gpufleet-train"]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=True)
        return done.stdout.split()

    def running_container(self) -> str:
        """The one container; the worker's first lines may come before the daemon lists it."""
        self.until("worker: trains")
        deadline = time.monotonic() + 60
        while not (found := self.containers()):
            assert time.monotonic() < deadline, "no container is listed"
            time.sleep(0.05)
        (container,) = found
        return container


@pytest.fixture
def start(docker: dict[str, str]) -> Iterator[Callable[[str], Agent]]:
    agents: list[Agent] = []
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)

        def begin(how: str) -> Agent:
            agents.append(Agent(docker, Path(name), how))
            return agents[-1]

        yield begin
        for agent in agents:
            if agent.process.poll() is None:
                agent.process.kill()
                agent.process.wait()
        for container in agents[0].containers():
            subprocess.run(["docker", "rm", "--force", container], env=agents[0].environment, check=True)


def test_a_command_at_fault_ends_the_agent_with_its_own_status(start: Callable[[str], Agent]) -> None:
    """The image's entry point, which fails, is not run; the user has the node's folders and no right of root's."""
    agent = start("at fault")
    assert agent.process.wait(timeout=60) == 78, agent.log.read_text()
    said = re.findall(r"worker: (.*)", agent.log.read_text())
    code = agent.environment["GPUFLEET_TRAIN_DIR"]
    assert said == [f"user nobody in {code} home /nonexistent rights 0"]
    assert "its settings are at fault" in agent.log.read_text()


def test_a_step_has_the_images_python_and_its_exit_status(docker: dict[str, str], tmp_path: Path) -> None:
    program = "import os, sys, bootstrap.contract; print(os.getcwd(), os.path.exists(sys.argv[1])); sys.exit(3)"
    command = [sys.executable, str(REPOSITORY / "bootstrap/agent"), "run-python", "-c", program, str(tmp_path)]
    environment = {**docker, "GPUFLEET_IMAGE": IMAGE, "GPUFLEET_TRAIN_USER": "nobody"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (3, "/ False\n"), done.stderr


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("saves on SIGTERM", ["sending SIGTERM to 1", "worker: saved"]),
        ("reads notices", ["the agent got SIGTERM", "state is saved; ending torchrun"]),
        ("ignores SIGTERM", ["state is NOT saved in time", "torchrun does not end; killing it"]),
    ],
)
def test_a_node_that_ends_has_the_state_saved_and_the_container_gone(
    start: Callable[[str], Agent], how: str, says: list[str]
) -> None:
    agent = start(how)
    agent.until("worker: trains")
    agent.process.send_signal(signal.SIGTERM)
    assert agent.process.wait(timeout=60) == 0, agent.log.read_text()
    text = agent.log.read_text()
    positions = [text.find(words) for words in says]
    assert -1 not in positions and positions == sorted(positions), text
    deadline = time.monotonic() + 10
    while agent.containers():
        assert time.monotonic() < deadline, "the container runs on"
        time.sleep(0.05)
    if how == "saves on SIGTERM":
        assert (Path(agent.environment["GPUFLEET_TRAIN_DIR"]) / "saved").stat().st_uid == 65534


def test_the_container_of_a_killed_agent_goes_before_the_next_one_starts(start: Callable[[str], Agent]) -> None:
    first = start("saves on SIGTERM")
    left = first.running_container()
    first.process.kill()
    first.process.wait()
    second = start("saves on SIGTERM")
    assert second.running_container() != left
    second.process.send_signal(signal.SIGTERM)
    assert second.process.wait(timeout=60) == 0
