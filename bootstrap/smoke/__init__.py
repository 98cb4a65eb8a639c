"""DDP smoke test of a node or a gang, before the first paid training step: ``python -m bootstrap.smoke``."""
