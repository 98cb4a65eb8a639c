"""Audit of a plan before money is spent on it: its numbers against each other, and its facts against the catalog."""

from optimizer.audit.fault import Fault
from optimizer.audit.run import audit, check_plan

__all__ = ["Fault", "audit", "check_plan"]
