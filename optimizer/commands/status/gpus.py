"""GPUs of a stack's nodes: columns of the table of nodes, and notices of nodes that waste what all of them cost."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from bootstrap.contract.ledger import SLOW_SHARE
from infra.alarms import IDLE_GPU_PERCENT
from optimizer.aws.log_group import GpuMinute, NodeMinute
from optimizer.commands.status.forecast import current_progress
from optimizer.commands.status.reading import Reading

# Share of a minute; a short slowdown costs less than looking at it.
THROTTLED_SHARE = 0.5
# Minutes in a row; a checkpoint or a restart is shorter.
IDLE_MINUTES = 3
_REPLACE = (
    "where it stays, have the node replaced: "
    "aws autoscaling set-instance-health --instance-id {node} --health-status Unhealthy"
)
GPU_COLUMNS = {"gpu_busy": "GPU %", "gpu_memory": "GPU GiB", "gpu_throttled": "throttled", "gpu_errors": "errors"}


def gpu_columns(minutes: Sequence[NodeMinute]) -> dict[str, float | str | None]:
    """Describe a node's newest minute: mean use, fullest GPU, throttled GPUs, errors."""
    if not minutes or not minutes[-1].gpus:
        return dict.fromkeys(GPU_COLUMNS)
    gpus, busy = minutes[-1].gpus.values(), mean_busy_percent(minutes[-1])
    fullest = max((gpu.memory_used_gib for gpu in gpus if gpu.memory_used_gib is not None), default=None)
    return {
        "gpu_busy": busy,
        "gpu_memory": fullest,
        "gpu_throttled": sum(_is_throttled(gpu) for gpu in gpus),
        "gpu_errors": ", ".join(errors(minutes[-1])) or "none",
    }


def mean_busy_percent(minute: NodeMinute) -> float | None:
    """Return the mean of the GPUs that report their use."""
    found = [gpu.busy_percent for gpu in minute.gpus.values() if gpu.busy_percent is not None]
    return fmean(found) if found else None


def errors(minute: NodeMinute) -> list[str]:
    """Name what the driver and the kernel report: Xid messages, uncorrected memory errors."""
    found = [f"Xid {number}" + (f" x {count}" if count > 1 else "") for number, count in minute.xids.items()]
    uncorrected = {
        gpu: gpu_minute.ecc_uncorrected for gpu, gpu_minute in minute.gpus.items() if gpu_minute.ecc_uncorrected
    }
    return found + [f"{count} uncorrected ECC on GPU {gpu}" for gpu, count in uncorrected.items()]


def gpu_notices(reading: Reading, stack: str) -> list[str]:
    """Say which rank the others wait for, and which nodes' GPUs are throttled, idle or have errors."""
    trains = reading.state is not None and reading.state.phase == "running"
    lines = []
    progress = current_progress(reading)
    if trains and progress and progress.straggler and progress.straggler.slower > SLOW_SHARE:
        lines.append(
            f"STRAGGLER: {progress.straggler}, for which all ranks wait: "
            f"gpufleet logs --rank {progress.straggler.rank} --stack {stack}"
        )
    for node, minutes in _serving(reading).items():
        slow = {gpu: gpu_minute for gpu, gpu_minute in minutes[-1].gpus.items() if _is_throttled(gpu_minute)}
        if slow:
            told = "; ".join(f"GPU {gpu} by {_reasons(gpu_minute)}" for gpu, gpu_minute in slow.items())
            lines.append(f"THROTTLED: {node} {told}: all nodes wait for the slowest; {_REPLACE.format(node=node)}")
        if found := errors(minutes[-1]):
            lines.append(
                f"GPU ERRORS: {node} {', '.join(found)}; the node replaces itself after a fatal one: "
                f"gpufleet logs --stack {stack} --node {node}"
            )
        uses = [busy for minute in minutes[-IDLE_MINUTES:] if (busy := mean_busy_percent(minute)) is not None]
        if trains and len(uses) == IDLE_MINUTES and max(uses) < IDLE_GPU_PERCENT:
            lines.append(
                f"IDLE: the GPUs of {node} were below {IDLE_GPU_PERCENT}% for {IDLE_MINUTES} minutes of a run that "
                f"should train: gpufleet logs --stack {stack} --node {node}"
            )
    return lines


def gpu_use(reading: Reading) -> tuple[float | None, float | None, str]:
    """Return the mean use of the GPUs in service, %, the memory of the fullest, GiB, and a note on the nodes."""
    newest = [minutes[-1] for minutes in _serving(reading).values()]
    uses = [busy for minute in newest if (busy := mean_busy_percent(minute)) is not None]
    memory_gib = [gpu.memory_used_gib for minute in newest for gpu in minute.gpus.values() if gpu.memory_used_gib]
    note = f"least busy node {min(uses):.0f}%" if uses else ""
    return fmean(uses) if uses else None, max(memory_gib, default=None), note


def _serving(reading: Reading) -> dict[str, Sequence[NodeMinute]]:
    nodes = reading.group.nodes if reading.group else ()
    serving = [node.instance_id for node in nodes if node.lifecycle_state == "InService"]
    return {node: reading.gpus[node] for node in serving if node in reading.gpus}


def _is_throttled(gpu: GpuMinute) -> bool:
    return any(share >= THROTTLED_SHARE for share in gpu.throttled.values())


def _reasons(gpu: GpuMinute) -> str:
    told = ", ".join(f"{reason} {share:.0%} of the time" for reason, share in gpu.throttled.items())
    figures = [
        f"{value:,.0f} {unit}"
        for value, unit in ((gpu.temperature_celsius, "°C"), (gpu.power_w, "W"), (gpu.sm_clock_mhz, "MHz"))
        if value is not None
    ]
    return f"{told} ({', '.join(figures)})" if figures else told
