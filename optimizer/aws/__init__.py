"""Calls to AWS: clients, error classes, times to live."""
