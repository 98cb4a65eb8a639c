# shellcheck shell=bash disable=SC2034
# Versions on a node. With at least _MIN on the image a step is skipped; else it installs _PIN. Never "latest". Pages
# read 2026-11-21.

# NVIDIA driver. 580.65.06 is the oldest that runs CUDA 13.0, which torch 2.11 is built with:
# https://docs.nvidia.com/cuda/archive/13.0.0/cuda-toolkit-release-notes/index.html (table of minimum drivers).
NVIDIA_DRIVER_MIN=580.65.06
# Package of https://developer.download.nvidia.com/compute/cuda/repos/ubuntu2404/. 580 is the last branch that drives Volta.
NVIDIA_DRIVER_PIN=580.159.03-1ubuntu1
NVIDIA_DRIVER_BRANCH=580

# CUDA toolkit on the host, for extensions compiled on the node (torch's wheels bring their own). 12.8 is the first that
# compiles for Blackwell: https://docs.nvidia.com/cuda/archive/12.8.0/cuda-toolkit-release-notes/index.html
CUDA_MIN=12.8
CUDA_TOOLKIT_PACKAGE=cuda-toolkit-13-0
CUDA_PIN=13.0.2-1

# NCCL on the host, for programs outside torch (nccl-tests), without which a node trains: the version of torch's
# environment, which requirements-torch.txt pins.
NCCL_PIN=2.28.9-1+cuda13.0

# EFA installer (driver, libfabric, aws-ofi-nccl plugin), of
# https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-start-nccl.html. Verified by its signature: the page gives the
# key's fingerprint and publishes a .sig for each version. 1.41.0 brings libfabric 2.1 (aws-parallelcluster-cookbook
# pull request 2953).
EFA_INSTALLER_MIN=1.41.0
EFA_INSTALLER_PIN=1.50.0
EFA_INSTALLER_URL=https://efa-installer.amazonaws.com
EFA_KEY_FINGERPRINT=4E9091BCBB97A96B26B15E59A05480B1DD2D3CCC

# Container toolkit. 1.17.8 fixes CVE-2025-23266 (escape from a container):
# https://nvidia.custhelp.com/app/answers/detail/a_id/5659
CONTAINER_TOOLKIT_MIN=1.17.8
CONTAINER_TOOLKIT_PIN=1.19.0-1
CONTAINER_TOOLKIT_URL=https://nvidia.github.io/libnvidia-container
CONTAINER_TOOLKIT_KEY_FINGERPRINT=C95B321B61E88C1809C4F759DDCAE044F796ECB0

# The package with the key of NVIDIA's CUDA repository (fingerprint EB693B3035CD5710E231E123A4B469963BF863CC), by
# Ubuntu release and NVIDIA's name of the CPU architecture. apt verifies everything else with that key.
CUDA_REPOSITORY_URL=https://developer.download.nvidia.com/compute/cuda/repos
CUDA_KEYRING_PIN=1.1-1
declare -A CUDA_KEYRING_SHA256=(
  ["ubuntu2204/x86_64"]=d93190d50b98ad4699ff40f4f7af50f16a76dac3bb8da1eaaf366d47898ff8df
  ["ubuntu2404/x86_64"]=d2a6b11c096396d868758b86dab1823b25e14d70333f1dfa74da5ddaf6a06dba
  ["ubuntu2404/sbsa"]=6ea7d2737648936820e85677177957a0f6521b840d98eb0bbae0a4f003fa7249
)

# torch, and the NCCL that it was tested with, in the environment that trains: the image's, or requirements-torch.txt.
TORCH_MIN=2.11.0
TORCH_NCCL_MIN=2.28.9
