"""The variables of ``/etc/gpufleet/node.env``: what a node knows of its plan and stack.

User data writes the file (infra/user_data.py); shell scripts, training and metrics read it, and systemd for the
training service. Lines are NAME=value, NAME='value' or NAME="value": shell quoting of one word; nothing is evaluated.
No secret belongs in it.
"""

from __future__ import annotations

from typing import TypedDict


class NodeEnvironment(TypedDict):
    """All variables, named as in the file, as text."""

    GPUFLEET_STACK: str
    GPUFLEET_RUN: str  # what is trained and how, 12 hex digits: a new plan, command or training code is a new run
    GPUFLEET_MODE: str  # "training": the nodes are one gang; "workers": each runs the command by itself
    GPUFLEET_REGION: str
    GPUFLEET_ASG_NAME: str
    GPUFLEET_LAUNCH_HOOK: str  # launch lifecycle hook to complete; empty for none
    GPUFLEET_TERMINATE_HOOK: str  # terminate lifecycle hook, completed by launch.sh; empty for none
    GPUFLEET_BUCKET: str
    GPUFLEET_CHECKPOINT_PREFIX: str  # folder of checkpoints in the bucket
    GPUFLEET_KMS_KEY_ARN: str
    GPUFLEET_LOG_GROUP: str  # CloudWatch log group; empty for none
    GPUFLEET_METRIC_NAMESPACE: str  # CloudWatch namespace of the stack's metrics; empty for none
    GPUFLEET_NODE_COUNT: str  # nodes that train together; 1 in mode workers
    GPUFLEET_GPUS_PER_NODE: str  # GPUs of one node; a fraction of a GPU counts as 1
    GPUFLEET_EFA_CARDS: str  # EFA interfaces of one node; 0 for none
    GPUFLEET_GPU: str  # GPU model, as the plan names it (A100)
    GPUFLEET_DATA_PARALLEL: str  # data-parallel ranks; the product of the four kinds of ranks is the number of GPUs
    GPUFLEET_SHARDING: str  # ddp, zero1, zero2 or zero3 over the data-parallel (and context) ranks
    GPUFLEET_TENSOR_PARALLEL: str
    GPUFLEET_PIPELINE_PARALLEL: str
    GPUFLEET_CONTEXT_PARALLEL: str
    GPUFLEET_EXPERT_PARALLEL: str  # data-parallel ranks that share the experts of a mixture; 1 for none
    GPUFLEET_SEQUENCE_PARALLEL: str  # 1 where tensor parallelism also splits norms, dropout and residual, else 0
    GPUFLEET_VIRTUAL_STAGES: str  # model chunks of one pipeline rank; 1 for the plain schedule
    GPUFLEET_SEQ_LEN: str  # tokens of one sample (1 for a CNN): tokens per second are samples per second times it
    GPUFLEET_MICRO_BATCH: str  # samples of one forward pass on a data-parallel rank
    GPUFLEET_GRAD_ACCUM: str  # forward passes of one step
    GPUFLEET_ACTIVATION_CHECKPOINTING: str  # none, selective or full
    GPUFLEET_CHECKPOINT_INTERVAL_S: str  # planned seconds between checkpoints
    GPUFLEET_SCALE_IN_LIMIT_S: str  # time limit of the last checkpoint while the terminate hook holds the node, seconds
    GPUFLEET_DEADLINE_HOURS: str  # deadline of the run, hours; empty for none
    GPUFLEET_BUDGET_USD: str  # spend ceiling of the run, USD; empty for none
    GPUFLEET_PRICE_USD_PER_HOUR: str  # expected compute price of the nodes that train together, USD per hour
    GPUFLEET_TRAIN_ARCHIVE: str  # key of the training code in the bucket, .../train-SHA256.tar.gz; empty for none
    GPUFLEET_TRAIN_COMMAND: str  # command to train with; empty: the node joins and waits
    GPUFLEET_AMI_KIND: str  # dlami or custom; eks on a Kubernetes node, where nothing is installed
