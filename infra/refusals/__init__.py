"""Refusals: why a stack cannot be deployed as set, each with value, limit, reason and next step.

Every check runs, so that a user sees all problems at once.
"""
