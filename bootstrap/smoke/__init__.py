"""DDP smoke test of a node or a gang, before the first paid training step: ``python -m bootstrap.smoke``.

Checks the gradients against one process's, measures all-reduce bandwidth and scaling efficiency.
"""
