"""Streams the training's output to CloudWatch Logs as it is written."""
