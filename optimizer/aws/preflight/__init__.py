"""``gpufleet preflight``: check that this AWS account can carry out a plan today, before anything is created or paid.

Every call only reads. One file a concern, each check a generator of findings; ``run`` has the list of checks and runs
them side by side. A check that AWS does not answer yields "unknown" with the reason, never a guess and never "ok".
"""

from optimizer.aws.preflight.model import LEVELS, Account, Finding, Level, Stack, StackNames, Target
from optimizer.aws.preflight.run import PreflightReport, preflight

__all__ = [
    "LEVELS",
    "Account",
    "Finding",
    "Level",
    "PreflightReport",
    "Stack",
    "StackNames",
    "Target",
    "preflight",
]
