"""Facts of platform eks that several files need: version and size of the cluster, names of its objects."""

# Amazon Linux 2023 with driver 580.159.03, container toolkit 1.19.1, EFA's kernel module and the AWS CLI; kubelet
# 1.35.6. Kubernetes 1.35 has EKS's standard support until 2027-03-27; the newest release whose notes were at hand, read
# 2026-11-21: https://github.com/awslabs/amazon-eks-ami/releases/tag/v20260714
# https://docs.aws.amazon.com/eks/latest/userguide/kubernetes-versions.html
KUBERNETES_VERSION = "1.35"
EKS_RELEASE_VERSION = "1.35.6-20260714"

# CoreDNS and controllers survive the loss of one node. Arm is the cheapest with the 2 GiB that they need.
SYSTEM_NODES = 2
SYSTEM_INSTANCE_TYPE = "t4g.small"
SYSTEM_VOLUME_GIB = 20

# Addresses of a node: its own, and the addresses that its CNI keeps for pods.
NODE_ADDRESSES = 6

NAMESPACE = "gpufleet"
SERVICE_ACCOUNT = "gpufleet-train"
# Label and taint of the GPU nodes; pods without GPUs stay away.
STACK_LABEL = "gpufleet/stack"
GPU_TAINT = ("nvidia.com/gpu", "present", "NoSchedule")
