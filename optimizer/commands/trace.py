"""``gpufleet logs trace``: a profiler trace of a running training."""

from __future__ import annotations

import time
import uuid
from datetime import UTC, datetime, timedelta
from pathlib import Path

import click

from bootstrap.contract.trace import MAX_AGE, POLL_S, TraceRequest
from bootstrap.contract.words import counted
from infra.naming import Names
from optimizer.aws import clients, errors, training
from optimizer.commands.options import Hours, OutputFolder, one_stack_options
from optimizer.commands.output import say
from optimizer.commands.progress import patience
from optimizer.commands.stack_file import read_stack, resolve_names
from optimizer.contract.errors import GpufleetError, InvalidInputError

LOOK_S = 5
# A GPU's trace of one step has tens of thousands of events.
MOST_STEPS = 100
# nsys writes the report, of all processes of the node, at once.
MOST_SECONDS = 60
NSIGHT_KEY = "gpufleet:nsight"


@click.command(
    epilog="""\b
Example:
  gpufleet logs trace --stack dev
  gpufleet logs trace --rank 11 --steps 2 --out traces --stack dev
  gpufleet logs trace --rank 11 --nsight --seconds 5 --stack dev
"""
)
@one_stack_options
@click.option("--rank", type=click.IntRange(min=0), default=0, show_default=True, help="Rank of the GPU (RANK).")
@click.option(
    "--steps", type=click.IntRange(1, MOST_STEPS), default=3, show_default=True, help="Optimizer steps to trace."
)
@click.option("--nsight", is_flag=True, help="Trace the rank's whole node with Nsight Systems instead.")
@click.option(
    "--seconds", type=click.IntRange(1, MOST_SECONDS), default=10, show_default=True, help="Time that --nsight traces."
)
@click.option(
    "--out",
    type=OutputFolder(),
    default=Path(),
    help="Folder for the trace.  [default: the current one]",
)
@click.option("--timeout", type=Hours(), default="15min", show_default=True, help="How long to wait for it.")
def command(
    stack: str | None, directory: Path, rank: int, steps: int, nsight: bool, seconds: int, out: Path, timeout: float
) -> None:
    """Trace some steps of a running training with torch.profiler, and download the trace.

    Writes traces/request.json beside the stack's checkpoints; within a minute the training traces the steps, which take
    a little longer, and puts the trace there. It needs the reference trainer, or a loop of SpotTolerantRun's steps.

    With --nsight, nsys traces all processes of the rank's node: CUDA, NVTX and calls of the operating system. The stack
    needs gpufleet:nsight, and its nodes nsys.

    Needs s3:PutObject, s3:GetObject and s3:ListBucket below the checkpoints' prefix, and the stack's key. The file's
    path is the result.
    """
    file = read_stack(stack, directory)
    ranks = file.plan.node_count * file.plan.node.ranks
    if rank >= ranks:
        raise InvalidInputError(f"rank {rank}", limit=f"0 to {ranks - 1}: the GPUs of the stack's plan")
    if nsight and str(file.config.get(NSIGHT_KEY)).lower() != "true":
        raise InvalidInputError(
            f"{NSIGHT_KEY} is not true in {file.path}",
            next_step=f"pulumi config set {NSIGHT_KEY} true --stack {file.stack}, pulumi up",
        )
    names, caller = resolve_names(file)
    now = datetime.now(UTC).replace(microsecond=0)
    name = f"{now:%Y%m%dT%H%M%SZ}-{uuid.uuid4().hex[:6]}"
    request = TraceRequest(id=name, rank=rank, steps=steps, at=now, by=caller, nsight_s=seconds if nsight else 0)
    content = _carry_out(names, request, timedelta(hours=timeout))
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"trace-{names.stack}-rank-{rank}-{name}.{request.suffix}"
    path.write_bytes(content)
    click.echo(path)
    viewer = (
        "nsys-ui, of the nodes' version or a newer one" if nsight else "https://ui.perfetto.dev or chrome://tracing"
    )
    say(f"open it in {viewer}", err=True)


def _carry_out(names: Names, request: TraceRequest, wait: timedelta) -> bytes:
    """Ask for a trace and return it."""
    s3 = clients.s3(names.region)
    copied = f"aws s3 cp s3://{names.bucket}/{names.checkpoint_prefix}/{request.trace} ."
    with errors.explained(
        f"stack {names.stack} cannot be asked for a trace",
        next_step=f"use credentials that may read and write below s3://{names.bucket}/{names.checkpoint_prefix}/",
    ):
        training.ask_trace(s3, names.bucket, names.checkpoint_prefix, request)
        extent = f"{request.nsight_s} s of its node" if request.nsight_s else counted(request.steps, "step")
        say(f"asked rank {request.rank} of stack {names.stack} for {extent}", err=True)
        ends_at = time.monotonic() + wait.total_seconds()
        try:
            with patience("waiting for the trace"):
                while (content := training.read_trace(s3, names.bucket, names.checkpoint_prefix, request)) is None:
                    if time.monotonic() >= ends_at:
                        raise GpufleetError(
                            f"stack {names.stack} has sent no trace within {wait.total_seconds() / 60:.0f} minutes",
                            why=f"the training looks every {POLL_S:.0f} s, and only with SpotTolerantRun.steps on a "
                            f"node; the request stands for {MAX_AGE.total_seconds() / 60:.0f} minutes",
                            next_step=f"gpufleet logs --rank {request.rank} --stack {names.stack}; later: {copied}",
                        )
                    time.sleep(LOOK_S)
        except KeyboardInterrupt as error:
            raise GpufleetError("no longer waited for; the request stands", next_step=copied) from error
    return content
