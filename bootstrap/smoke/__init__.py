"""DDP smoke test of one node or a whole gang: ``python -m bootstrap.smoke``.

It answers before the first paid training step: do the ranks compute the same gradients as one process would, how fast
do they add tensors up, and how much speed is lost by going from one process to all of them?
"""
