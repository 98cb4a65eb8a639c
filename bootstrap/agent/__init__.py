"""Supervisor of a node: starts torchrun, ends it in order, and speaks for the node to its group and the controller.

Runs in the system's Python: no environment exists before the set-up, and a node without one must leave cleanly too.
Standard library only, in Python 3.10 (Ubuntu 22.04).
"""
