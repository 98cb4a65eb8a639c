"""What a node tells CloudWatch once a minute; ``python -m bootstrap.metrics`` is gpufleet-metrics.service."""
