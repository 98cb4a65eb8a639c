"""The variables of ``/etc/gpufleet/node.env``, written by infra/user_data.py: no secret among them.

The set-up adds ``/etc/gpufleet/runtime.env``, which the training command has too: GPUFLEET_PYTHON, GPUFLEET_TRAIN_DIR,
GPUFLEET_SCRATCH_DIR (local NVMe), GPUFLEET_DATA_DIR (folder or file of gpufleet:data on this node).

systemd and a shell read the lines, whose values infra quotes.
"""

from __future__ import annotations

from typing import TypedDict


class PlanEnvironment(TypedDict):
    """Variables of the plan, which every training of it has (optimizer/contract/plan_variables.py)."""

    GPUFLEET_NODE_COUNT: str  # 1 in mode workers
    GPUFLEET_GPUS_PER_NODE: str  # ranks; a fraction of a GPU counts as 1
    GPUFLEET_EFA_CARDS: str  # EFA interfaces of a node
    GPUFLEET_GPUDIRECT: str  # 1 where EFA reads and writes GPU memory, else 0
    GPUFLEET_INSTANCE_TYPE: str  # the plan's; a spot fleet may hold others with the same GPUs
    GPUFLEET_GPU: str  # GPU model (A100)
    GPUFLEET_PLAN: str  # JSON: job, layout and predictions (node_plan.py)
    GPUFLEET_CHECKPOINT_INTERVAL_S: str  # planned, s
    GPUFLEET_SCALE_IN_LIMIT_S: str  # of the last checkpoint, s
    GPUFLEET_PRICE_USD_PER_HOUR: str  # expected compute price of the nodes that train together


class NodeEnvironment(PlanEnvironment):
    """All variables, as text."""

    GPUFLEET_STACK: str
    GPUFLEET_RUN: str  # 12 hex digits; a new plan, command or training code is a new run
    GPUFLEET_MODE: str  # "training": one gang; "workers": each node runs the command by itself
    GPUFLEET_REGION: str
    GPUFLEET_ASG_NAME: str  # groups of the node's place with commas, its own first
    GPUFLEET_TERMINATE_HOOK: str  # empty for none, as in the next ones
    GPUFLEET_BUCKET: str
    GPUFLEET_REPORT_FOLDER: str  # of this node's report in the bucket, <id>.json (report.py)
    GPUFLEET_KMS_KEY_ARN: str
    GPUFLEET_LOG_GROUP: str  # empty for none; its name without the first slash is the metrics' namespace
    GPUFLEET_TRAIN_ARCHIVE: str  # key in the bucket, .../train-SHA256.tar.gz; empty for none
    GPUFLEET_TRAIN_COMMAND: str  # empty: the node joins and waits
    GPUFLEET_IMAGE: str  # container image that the training runs in, by digest; empty: the node's own environment
    GPUFLEET_STANDBY: str  # 1: processes stand by for any command; empty: for the reference trainer
    GPUFLEET_TRAIN_ROLE_ARN: str  # role of the training's own; empty: it has the node's
    GPUFLEET_TRAIN_DATA: str  # s3:// URI or path on the node; empty for none
    GPUFLEET_LUSTRE: str  # file system of the data, DNS-NAME@tcp:/MOUNT-NAME; empty for none
    GPUFLEET_STAGING_LIMIT_S: str  # time that the set-up may take longer for the data, s; 0 without data in S3
    GPUFLEET_BASE_WEIGHTS: str  # s3:// URI or path on the node; empty for random weights
    GPUFLEET_AMI_KIND: str  # dlami or custom
