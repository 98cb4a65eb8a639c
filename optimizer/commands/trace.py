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
from optimizer.commands.options import Hours, OutputFile, one_stack_options
from optimizer.commands.output import say
from optimizer.commands.progress import patience
from optimizer.commands.stack_file import read_stack, resolve_names
from optimizer.contract.errors import GpufleetError, InvalidInputError

LOOK_S = 5
# A GPU's trace of one step has tens of thousands of events.
MOST_STEPS = 100


@click.command(
    epilog="""\b
Example:
  gpufleet logs trace --stack dev
  gpufleet logs trace --rank 11 --steps 2 --out traces --stack dev
"""
)
@one_stack_options
@click.option("--rank", type=click.IntRange(min=0), default=0, show_default=True, help="Rank of the GPU (RANK).")
@click.option(
    "--steps", type=click.IntRange(1, MOST_STEPS), default=3, show_default=True, help="Optimizer steps to trace."
)
@click.option(
    "--out",
    type=OutputFile(is_folder=True),
    default=Path(),
    help="Folder for the trace.  [default: the current one]",
)
@click.option("--timeout", type=Hours(), default="15min", show_default=True, help="How long to wait for it.")
def command(stack: str | None, directory: Path, rank: int, steps: int, out: Path, timeout: float) -> None:
    """Trace some steps of a running training with torch.profiler, and download the trace.

    Writes traces/request.json beside the stack's checkpoints; within a minute the training traces the steps, which take
    a little longer, and puts the trace there. It needs the reference trainer, or a loop of SpotTolerantRun's steps.

    Needs s3:PutObject, s3:GetObject and s3:ListBucket below the checkpoints' prefix, and the stack's key. The file's
    path is the result.
    """
    file = read_stack(stack, directory)
    ranks = file.plan.node_count * file.plan.node.ranks
    if rank >= ranks:
        raise InvalidInputError(f"rank {rank}", limit=f"0 to {ranks - 1}: the GPUs of the stack's plan")
    names, caller = resolve_names(file)
    now = datetime.now(UTC).replace(microsecond=0)
    name = f"{now:%Y%m%dT%H%M%SZ}-{uuid.uuid4().hex[:6]}"
    request = TraceRequest(id=name, rank=rank, steps=steps, at=now, by=caller)
    content = _carry_out(names, request, timedelta(hours=timeout))
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"trace-{names.stack}-rank-{rank}-{name}.json.gz"
    path.write_bytes(content)
    click.echo(path)
    say("open it in https://ui.perfetto.dev or chrome://tracing", err=True)


def _carry_out(names: Names, request: TraceRequest, wait: timedelta) -> bytes:
    """Ask for a trace and return it."""
    s3 = clients.s3(names.region)
    copied = f"aws s3 cp s3://{names.bucket}/{names.checkpoint_prefix}/{request.trace} ."
    with errors.explained(
        f"stack {names.stack} cannot be asked for a trace",
        next_step=f"use credentials that may read and write below s3://{names.bucket}/{names.checkpoint_prefix}/",
    ):
        training.ask_trace(s3, names.bucket, names.checkpoint_prefix, request)
        say(f"asked rank {request.rank} of stack {names.stack} for {counted(request.steps, 'step')}", err=True)
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
