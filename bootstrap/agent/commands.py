"""Programs that the agent runs: the AWS CLI, and the scripts of ``steps/``; its log, and the error that ends it."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

BOOTSTRAP = Path(__file__).resolve().parents[1]
# The AWS CLI's own retries, for throttling while a whole fleet starts; and the endpoint of STS that the VPC has, where
# CLI version 1 and older SDKs ask sts.amazonaws.com:
# https://docs.aws.amazon.com/sdkref/latest/guide/feature-sts-regionalized-endpoints.html
# By default the AWS CLI asks the metadata service once, for one second, and then has no credentials:
# https://docs.aws.amazon.com/sdkref/latest/guide/feature-ec2-instance-metadata.html, boto/botocore issue 2117.
AWS_ENVIRONMENT = {
    "AWS_RETRY_MODE": "standard", "AWS_MAX_ATTEMPTS": "5", "AWS_PAGER": "", "AWS_STS_REGIONAL_ENDPOINTS": "regional",
    "AWS_METADATA_SERVICE_TIMEOUT": "5", "AWS_METADATA_SERVICE_NUM_ATTEMPTS": "3",
}  # fmt: skip
AWS_LIMIT_S = 60.0


class AgentError(Exception):
    """Reason for the agent to end with 1; systemd starts it again."""


def log(message: str) -> None:
    """Write one line with the time in UTC to stderr, which is a file (../gpufleet-train.service)."""
    sys.stderr.write(f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} agent: {message}\n")
    sys.stderr.flush()


def python_path(environ: Mapping[str, str]) -> str:
    """PYTHONPATH that finds this package first, in whatever directory a program runs."""
    own = str(BOOTSTRAP.parent)
    return ":".join([own, *(folder for folder in environ.get("PYTHONPATH", "").split(":") if folder not in ("", own))])


def aws_cli(region: str, *arguments: str) -> str | None:
    """Text output of the AWS CLI; None where the call failed, or took a minute."""
    command = ["aws", "--region", region, "--output", "text"]
    command += ["--cli-connect-timeout", "5", "--cli-read-timeout", "20", *arguments]
    return output_of(command, AWS_LIMIT_S)


@contextmanager
def file_of(text: str, run_dir: Path) -> Iterator[str]:
    """Path of a file with this text, in memory beside ``run_dir``: the root volume may be full."""
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=run_dir.parent, prefix=f"{run_dir.name}.", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        yield file.name


def start_as(
    user: pwd.struct_passwd | None, words: Sequence[str], environment: Mapping[str, str], folder: Path
) -> subprocess.Popen[bytes]:
    """Start a program as a user, None for the agent's own, with the unit's limits (LimitMEMLOCK, for EFA)."""
    return subprocess.Popen(
        words, cwd=folder, env=environment, stdin=subprocess.DEVNULL, user=user.pw_uid if user else None,
        group=user.pw_gid if user else None, extra_groups=[] if user else None,
    )  # fmt: skip


def output_of(command: Sequence[str], limit_s: float) -> str | None:
    """Output of a program; None where it is absent, failed, or took longer than the limit."""
    try:
        done = subprocess.run(
            command, env={**os.environ, **AWS_ENVIRONMENT}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            timeout=limit_s, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        log(f"{command[0]}: {error}")
        return None
    return done.stdout.decode("utf-8", errors="replace") if done.returncode == 0 else None
