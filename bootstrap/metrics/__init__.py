"""Metrics that a node publishes to CloudWatch; ``python -m bootstrap.metrics`` is gpufleet-metrics.service."""
