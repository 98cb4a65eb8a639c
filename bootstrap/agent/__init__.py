"""Supervisor of a node: starts torchrun, ends it in order, and speaks for the node to its group and the controller.

Runs in the system's Python: no environment exists before the set-up, and a node without one must leave cleanly too.
Standard library only; calls of the group, reports and the lease in Python 3.9 (Amazon Linux 2023, on Kubernetes
nodes), the rest in 3.10 (Ubuntu 22.04).
"""
