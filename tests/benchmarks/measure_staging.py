"""Measure the copy from S3 to disk against ``aws s3 cp``: ``python -m tests.benchmarks.measure_staging > OUT.jsonl``.

Both copy the same prefixes from one moto server on this machine, in turns, to an empty folder: large files, many small
ones, and one, which is the cost of starting. The server is Python and bounds the wall time, so CPU time compares the
clients. One JSON object a copy.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import boto3

from tests.unit.bootstrap.training.conftest import start_moto

# Files and bytes of each: 256 MiB of data, and 39 MiB.
PREFIXES = {"large": (4, 64 * 2**20), "small": (400, 100_000), "one": (1, 100_000)}
REPEATS = 3
BUCKET = "bench"


def main() -> None:
    """Copy each prefix with each client, ``REPEATS`` times."""
    environment = {
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    os.environ.update(environment)
    with start_moto() as url:
        os.environ["AWS_ENDPOINT_URL"] = url
        client = boto3.client("s3")
        client.create_bucket(Bucket=BUCKET)
        for prefix, (files, size) in PREFIXES.items():
            for number in range(files):
                client.put_object(Bucket=BUCKET, Key=f"{prefix}/{number:05d}.bin", Body=os.urandom(size))
        for repeat in range(REPEATS):
            for prefix in PREFIXES:
                for name in ("gpufleet", "aws s3 cp"):
                    sys.stdout.write(json.dumps({"repeat": repeat, **measure(name, prefix)}) + "\n")
                    sys.stdout.flush()


def measure(name: str, prefix: str) -> dict[str, object]:
    """Copy ``prefix`` with one client in a process of its own."""
    files, size = PREFIXES[prefix]
    uri = f"s3://{BUCKET}/{prefix}"
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "bootstrap.training.staging", uri]
        if name == "aws s3 cp":
            program = shutil.which("aws")
            assert program, "the peer is missing: pip install awscli"
            command = [program, "s3", "cp", "--recursive", "--only-show-errors", uri, f"{folder}/copy"]
        before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run(
            command, check=True, env=os.environ | {"GPUFLEET_SCRATCH_DIR": folder}, stdout=subprocess.DEVNULL
        )
        wall_s, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
        copied = [path for path in Path(folder).rglob("*.bin") if path.stat().st_size == size]
        assert len(copied) == files
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "client": name,
        "prefix": prefix,
        "files": files,
        "mib": round(files * size / 2**20, 1),
        "wall_s": round(wall_s, 2),
        "cpu_s": round(cpu_s, 2),
        "load": round(os.getloadavg()[0], 1),
    }


if __name__ == "__main__":
    main()
