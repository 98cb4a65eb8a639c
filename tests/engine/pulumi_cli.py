"""The Pulumi CLI with a project and a state of its own, on the emulated AWS."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.engine.provider_binary import VARIABLE
from tests.engine.recording import DEPLOYER

REPOSITORY = Path(__file__).parents[2]
BUILT = REPOSITORY / ".tools/bin"
HOW_TO_GET_IT = (
    "run `make engine-tools` (needs Go), or install the CLI: https://www.pulumi.com/docs/iac/download-install/"
)
LANGUAGE_HOST = ("pulumi-language-python", "pulumi-language-python-exec")

# Limit of one run on a busy machine. A destroy that hangs on a group takes 600 s and more, and must fail.
TIME_LIMIT_S = 400


def find_pulumi(path: str) -> Path | None:
    """The folder of a Pulumi CLI with its Python language host: one on ``path``, else the one make built; or None."""
    installed = shutil.which("pulumi", path=path)
    if installed:
        return Path(installed).resolve().parent
    return BUILT if all((BUILT / name).exists() for name in ("pulumi", *LANGUAGE_HOST)) else None


def write_plugin(folder: Path, provider_binary: Path) -> None:
    """Put an executable ``pulumi-resource-aws`` into ``folder``; the engine takes it from PATH for every version."""
    program = folder / "pulumi-resource-aws"
    program.write_text(
        f"#!/bin/sh\nexport PYTHONPATH={shlex.quote(str(REPOSITORY))} {VARIABLE}={shlex.quote(str(provider_binary))}\n"
        f'exec {shlex.quote(sys.executable)} -m tests.engine.plugin "$@"\n',
        encoding="utf-8",
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)


@contextmanager
def attached_plugin(env: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """One ``pulumi-resource-aws`` for all runs of a stack; yields the variable that tells the CLI of it.

    Else an engine starts it up to twice a run, two seconds of a core each. Each run configures it anew:
    https://www.pulumi.com/docs/iac/guides/building-extending/providers/debugging-providers/
    """
    program = shutil.which("pulumi-resource-aws", path=env["PATH"])
    assert program is not None
    with subprocess.Popen([program], env=dict(env), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield {"PULUMI_DEBUG_PROVIDERS": f"aws:{int(process.stdout.readline())}"}
        finally:
            process.terminate()


def environment(*, pulumi: Path, plugins: Path, scratch: Path, endpoint: str, region: str) -> dict[str, str]:
    """Environment of a run: nothing of the user's AWS or Pulumi settings, and no address but the emulated AWS.

    Args:
        pulumi: folder of the CLI.
        plugins: folder with ``pulumi-resource-aws``.
        scratch: gets Pulumi's home and state.
        endpoint: URL of the emulated AWS.
        region: AWS region, like us-east-1.
    """
    home, state, temporary = scratch / "pulumi-home", scratch / "state", scratch / "tmp"
    for folder in (home, state, temporary):
        folder.mkdir(parents=True, exist_ok=True)
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("AWS_", "PULUMI_", "TF_"))}
    virtual_environment = Path(sys.executable).parent  # the language host takes python3 from PATH
    return kept | {
        "PATH": os.pathsep.join(map(str, (virtual_environment, plugins, pulumi, os.environ["PATH"]))),
        "HOME": str(scratch),
        "TMPDIR": str(temporary),
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": DEPLOYER,
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_REGION": region,
        "AWS_DEFAULT_REGION": region,
        "AWS_EC2_METADATA_DISABLED": "true",
        "PULUMI_HOME": str(home),
        "PULUMI_BACKEND_URL": f"file://{state}",
        "PULUMI_CONFIG_PASSPHRASE": "a state that ends with the test",
        "PULUMI_SKIP_UPDATE_CHECK": "true",
        "PULUMI_DISABLE_AUTOMATIC_PLUGIN_ACQUISITION": "true",
        "PULUMI_AUTOMATION_API_SKIP_VERSION_CHECK": "true",  # `make engine-tools` builds a CLI without a version
        # The state is written when a run ends, failed or not, and not twice a resource; no stack outlives a killed run.
        "PULUMI_SKIP_CHECKPOINTS": "true",
        "PULUMI_DEBUG_COMMANDS": "true",  # for --event-log, which the Automation API reads as well
        # By default the provider logs all it can, 1 MB at each start; TF_LOG_PROVIDER=DEBUG shows its requests.
        "TF_LOG_SDK": "ERROR",
        "TF_LOG_PROVIDER": os.environ.get("TF_LOG_PROVIDER", "ERROR"),
        "GPUFLEET_ENGINE_LOG": str(scratch / "provider.log"),
    }


class PulumiError(Exception):
    """A failed run of the CLI; the message is its output."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """Result of one run of the engine.

    ``operations`` holds each resource's URN with its operation (create, update, replace, same, delete, refresh);
    ``output`` is what the CLI printed.
    """

    operations: tuple[tuple[str, str], ...]
    output: str

    def changed(self) -> dict[str, list[str]]:
        """Types and names of the resources by what was done to them, in order; unchanged ones are left out."""
        changes: dict[str, list[str]] = {}
        for urn, operation in sorted(self.operations):
            if operation not in ("same", "refresh"):
                changes.setdefault(operation, []).append(urn.split("::", 2)[-1])
        return changes

    def types(self) -> Counter[str]:
        """Number of resources by type."""
        return Counter(urn.split("::")[2].split("$")[-1] for urn, _ in self.operations)


@dataclass(frozen=True, kw_only=True)
class Stack:
    """One stack of one project, in an environment made by ``environment``."""

    project: Path
    name: str
    env: Mapping[str, str]
    _outputs: dict[str, Any] = field(default_factory=dict, compare=False)

    def init(self) -> None:
        """Create the stack."""
        self._pulumi("stack", "init", self.name)

    def preview(self) -> Run:
        """Plan without acting."""
        return self._run("preview")

    def up(self) -> Run:
        """Carry out the program."""
        return self._run("up", "--yes", "--skip-preview")

    def settled(self) -> Run:
        """Refresh and carry out the program; fails where either changes anything."""
        return self._run("up", "--refresh", "--yes", "--skip-preview", "--expect-no-changes")

    def destroy(self, *, keep_protected: bool = False) -> Run:
        """Delete everything, or all but what is protected."""
        kept = ["--exclude-protected"] if keep_protected else []
        return self._run("destroy", "--yes", "--skip-preview", *kept)

    def lose_state(self) -> None:
        """Delete the stack's state, and every copy of it that the backend keeps."""
        shutil.rmtree(Path(self.env["PULUMI_BACKEND_URL"].removeprefix("file://")) / ".pulumi")

    def run(self, arguments: str) -> str:
        """Run ``pulumi ARGUMENTS``; return its output."""
        return self._pulumi(*shlex.split(arguments))

    def outputs(self) -> dict[str, Any]:
        """The stack's outputs with secrets, read once after each run, as the CLI is slow."""
        if not self._outputs:
            text = self._pulumi("stack", "output", "--stack", self.name, "--json", "--show-secrets")
            self._outputs.update(json.loads(text))
        return dict(self._outputs)

    def resources(self) -> list[dict[str, Any]]:
        """The resources in the stack's state."""
        deployment = json.loads(self._pulumi("stack", "export", "--stack", self.name))["deployment"]
        return list(deployment.get("resources") or [])

    def _run(self, command: str, *arguments: str) -> Run:
        self._outputs.clear()
        log = self.project / "events.json"
        log.unlink(missing_ok=True)
        options = ("--stack", self.name, "--diff", "--suppress-permalink=true", f"--event-log={log}")
        output = self._pulumi(command, *arguments, *options)
        events = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
        steps = [event["resourcePreEvent"]["metadata"] for event in events if "resourcePreEvent" in event]
        return Run(operations=tuple((step["urn"], step["op"]) for step in steps), output=output)

    def _pulumi(self, *arguments: str) -> str:
        program = shutil.which("pulumi", path=self.env["PATH"])
        assert program is not None
        with tempfile.TemporaryFile("w+") as complaints:
            # A session of its own, so that a run past its limit ends with all it started.
            process = subprocess.Popen(
                [program, *arguments, "--non-interactive", "--color=never"],
                cwd=self.project,
                env=dict(self.env),
                stdout=subprocess.PIPE,
                stderr=complaints,
                text=True,
                start_new_session=True,
            )
            try:
                output, _ = process.communicate(timeout=TIME_LIMIT_S)
                outcome = "" if process.returncode == 0 else f"ended with {process.returncode}"
            except subprocess.TimeoutExpired:
                kill_session(process.pid)
                output, _ = process.communicate()
                outcome = f"did not end within {TIME_LIMIT_S:g} s"
            if outcome:
                complaints.seek(0)
                raise PulumiError(f"pulumi {' '.join(arguments)} {outcome}\n{output}{complaints.read()}")
        return output


def kill_session(session: int) -> None:
    """Kill the process that leads ``session`` and, on Linux, all others in it.

    The engine gives each plugin a process group of its own, so that killing one group leaves the language host behind.
    """
    os.kill(session, signal.SIGKILL)
    for stat_file in Path("/proc").glob("[0-9]*/stat"):
        try:
            # PID (NAME) STATE PPID PGRP SESSION ...; the name may hold spaces: proc_pid_stat(5)
            fields = stat_file.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            if int(fields[3]) == session:
                os.kill(int(stat_file.parent.name), signal.SIGKILL)
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended meanwhile
